"""vLLM keeps the contract of the engine port: the adapter with a stand-in for the server, and with vLLM where it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import engine_contract
import pytest
import torch
from rigs import EngineRig
from vllm_rigs import PYTHON, Sharing, engine, faked, published, true_scores, weights

from rollart.control.weights import same_weights
from rollart.core.types import Applied, Failure

Contract = Callable[[EngineRig], Coroutine[Any, Any, None]]
HANGS_S = 200.0
"""A contract that takes as long waits for a turn that will never end: turns that are held end by what they are to meet."""
# those last that take the one server with them, which takes half a minute to start
IN_ORDER = sorted(engine_contract.CONTRACTS, key=lambda contract: "lost" in contract.__name__)
contracts = pytest.mark.parametrize("contract", IN_ORDER, ids=lambda contract: contract.__name__)


def real(test: Any) -> Any:
    """Needs vLLM itself."""
    there = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make vllm` makes .venv-vllm")
    return pytest.mark.vllm(there(test))


@pytest.fixture(scope="module")
def sharing() -> Iterator[Sharing]:
    shared = Sharing()
    yield shared
    shared.close()


@contracts
def test_stand_in(contract: Contract) -> None:
    async def main() -> None:
        async with faked() as rig, asyncio.timeout(HANGS_S):
            await contract(rig)

    asyncio.run(main())


@real
def test_a_disturbed_layer_is_found_and_a_restored_one_is_not(sharing: Sharing) -> None:
    """Every layer's weights by a tenth of their size, and the embeddings; the bytes' digest is made to agree each time."""

    async def served(rig: EngineRig, version: int, tensors: dict[str, torch.Tensor]) -> Applied:
        assert await rig.engine.prefetch(published(version, tensors, true_scores)) is None
        applied = await rig.engine.apply(version, kept="rebuild", pinned_deadline_s=0.0)
        assert not isinstance(applied, Failure), applied
        return applied

    async def main() -> None:
        good = weights(0)
        parts = [
            "embed_tokens",
            "layers.0.self_attn",
            "layers.0.mlp",
            "layers.1.self_attn",
            "layers.1.mlp",
            "model.norm",
        ]
        async with engine(sharing, true_scores, str(PYTHON)) as rig:
            for at, part in enumerate(parts):
                bad = {name: weight * (1.1 if part in name else 1.0) for name, weight in good.items()}
                assert any(part in name for name in good)
                told = published(0, good, true_scores).fingerprint
                wrong = await served(rig, 2 * at + 1, bad)
                blind = type(told)(digest=told.digest, probe=wrong.fingerprint.probe)
                assert not same_weights(blind, told, rig.engine.info), part
                right = await served(rig, 2 * at + 2, good)
                assert same_weights(right.fingerprint, told, rig.engine.info), part

    asyncio.run(main())


@real
@contracts
def test_vllm(contract: Contract, sharing: Sharing) -> None:
    async def main() -> None:
        async with engine(sharing, true_scores, str(PYTHON)) as rig, asyncio.timeout(HANGS_S):
            await contract(rig)

    asyncio.run(main())
