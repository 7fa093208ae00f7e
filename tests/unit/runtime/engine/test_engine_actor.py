"""The engine's process: what breaks a step comes out of the next poll, and new weights hold no step up."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import engine_cases as cases
import numpy as np
import pytest
import ray
import torch

from rollart.config.schema import EngineConfig, ScratchModel
from rollart.core.errors import EngineError
from rollart.core.types import EngineBook, Failure, Generation, Live, RequestId, TrajId, Version
from rollart.runtime.encoding import decoded
from rollart.runtime.engine.actor import PIECE_BYTES, EngineActor, EnginePoll, _pieces
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.weights import fingerprint, manifest, pack
from rollart.sched.precedence import ENGINE_NICENESS

MODEL = ScratchModel(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, max_positions=32)
VOCAB = 8


class Broken(EngineActor):
    """Its steps raise what no engine raises on purpose."""

    def _collect(self, answers: Sequence[tuple[RequestId, Generation]]) -> None:
        raise IndexError("slot 7 of 4")


def test_whatever_breaks_a_step_comes_out_of_the_next_poll() -> None:
    async def main() -> None:
        actor = Broken(MODEL, VOCAB, EngineConfig(max_live=4, kv_tokens=64))
        await actor.start()
        await actor.submit(pickle.dumps([cases.request("t", [VOCAB])]))
        with pytest.raises(IndexError, match="slot 7 of 4"):
            await actor.poll(1.0)

    asyncio.run(main())


def test_an_answer_carries_the_book_whole() -> None:
    rid, other = RequestId(TrajId("t"), 0, 3, 1), RequestId(TrajId("u"), 1, 0, 0)
    live = {rid: Live(n_tokens=7, oldest_version=4), other: Live(n_tokens=0, oldest_version=None)}
    book = EngineBook(sampled={"train": 9, "eval": 2}, live=live, rebuilt_tokens=5)
    poll = pickle.loads(pickle.dumps(EnginePoll.of([], book)))
    assert poll.book() == book
    assert poll.answers == ()
    assert EnginePoll.of([], EngineBook()).book() == EngineBook()


class Bucket:
    """Notes which thread reads it."""

    def __init__(self, data: np.ndarray[Any, Any], readers: set[threading.Thread]) -> None:
        self._data, self._readers = data, readers
        self.nbytes = data.nbytes

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        self._readers.add(threading.current_thread())
        return self._data[part]


def test_weights_are_unpacked_aside_from_the_loop_that_steps() -> None:
    async def main() -> None:
        actor = EngineActor(MODEL, VOCAB, EngineConfig(max_live=4, kv_tokens=64))
        readers: set[threading.Thread] = set()
        digests = {}
        for version in (0, 1):
            tensors = named_weights(build_model(hf_config(MODEL, VOCAB), seed=version))
            index, buckets = pack(tensors, 1000)
            digests[version] = fingerprint(tensors)
            handles = [Bucket(bucket, readers) for bucket in buckets]
            await actor.prefetch(manifest(version, index, handles, digests[version]))
            assert (await _applied(actor, version)) == digests[version]
        assert readers
        assert threading.current_thread() not in readers

    asyncio.run(main())


def test_an_fp32_trainers_weights_are_cast_and_the_fingerprint_is_of_what_was_handed_over() -> None:
    async def main() -> None:
        actor = EngineActor(MODEL, VOCAB, EngineConfig(max_live=4, kv_tokens=64, dtype="bf16"))
        for version in (0, 1, 2):
            tensors = named_weights(build_model(hf_config(MODEL, VOCAB), seed=version))
            index, buckets = pack(tensors, 1000)
            await actor.prefetch(manifest(version, index, buckets, fingerprint(tensors)))
            if version == 2:
                _flip_a_bit(actor)
                assert await _applied(actor, version) != fingerprint(tensors)
            else:
                assert await _applied(actor, version) == fingerprint(tensors)
        rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        index, buckets = pack(rounded, 1000)
        await actor.prefetch(manifest(3, index, buckets, fingerprint(rounded)))
        assert await _applied(actor, 3) == fingerprint(rounded), "bitwise where nothing is cast"

    asyncio.run(main())


def test_steps_go_on_while_large_weights_are_hashed_and_nothing_is_written_over_them() -> None:
    large = ScratchModel(layers=1, hidden=512, heads=8, kv_heads=8, ffn=2048, max_positions=32)
    release = threading.Event()

    async def main() -> None:
        actor = EngineActor(large, VOCAB, EngineConfig(max_live=4, kv_tokens=64))
        await actor.start()
        tensors = named_weights(build_model(hf_config(large, VOCAB), seed=0))
        index, buckets = pack(tensors, PIECE_BYTES)
        await actor.prefetch(manifest(0, index, buckets, "not looked at"))
        aside = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(aside)
        aside.submit(release.wait)  # the hash waits behind it
        applying = asyncio.create_task(actor.apply(0, "rebuild", 0.0))
        await actor.submit(pickle.dumps([cases.request("t", [1, 2], max_tokens=3)]))
        answers: tuple[tuple[RequestId, Generation], ...] = ()
        while not answers:
            answers = decoded(await actor.poll(1.0)).answers
        ((_, answer),) = answers
        assert [(span.version, span.n_tokens) for span in answer.tokens.spans] == [(0, 3)]
        sleeping = asyncio.create_task(actor.sleep())
        await asyncio.sleep(0)
        assert (applying.done(), actor._core.asleep) == (False, False)
        release.set()
        assert (await applying).fingerprint.digest == fingerprint(tensors)
        await sleeping
        assert actor._core.asleep
        actor.end()

    try:
        asyncio.run(asyncio.wait_for(main(), 60.0))
    finally:
        release.set()


def _flip_a_bit(actor: EngineActor) -> None:
    """In the memory that the forward pass will read."""
    staged = actor._core._staged
    assert staged is not None
    view, _ = staged[1].named["model.norm.weight"]
    view.view(torch.int16)[3] ^= 1


def test_a_device_that_is_not_there_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match=r"engine\.device=cuda"):
            EngineActor(MODEL, VOCAB, EngineConfig(device="cuda"))


async def _applied(actor: EngineActor, version: Version) -> str:
    digest: str = (await actor.apply(version, "rebuild", 0.0)).fingerprint.digest
    return digest


def test_weights_are_laid_out_in_pieces() -> None:
    quarter = torch.empty(PIECE_BYTES // 16)
    tensors = {str(n): quarter for n in range(6)} | {"large": torch.empty(PIECE_BYTES), "last": torch.empty(1)}
    pieces = list(_pieces(tensors))
    assert [list(piece) for piece in pieces] == [["0", "1", "2", "3"], ["4", "5"], ["large"], ["last"]]


class Gone:
    """What stands for a bucket whose owner died."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        raise ray.exceptions.OwnerDiedError("00ab", b"", "")


def test_a_version_whose_bytes_are_gone_is_a_failure_of_the_store_and_the_held_one_can_still_be_applied() -> None:
    async def main() -> None:
        actor = EngineActor(MODEL, VOCAB, EngineConfig(max_live=4, kv_tokens=64))
        tensors = named_weights(build_model(hf_config(MODEL, VOCAB), seed=0))
        index, buckets = pack(tensors, 1000)
        assert await actor.prefetch(manifest(0, index, buckets, fingerprint(tensors))) is None
        why = await actor.prefetch(manifest(1, index, [*buckets[:-1], Gone()], "never seen"))
        assert isinstance(why, Failure)
        assert (why.where, why.kind, why.retryable) == ("store", "missing", True)
        assert "version 1" in why.detail
        assert await _applied(actor, 0) == fingerprint(tensors)

    asyncio.run(main())


def test_an_engine_that_is_alone_in_its_process_stands_back_with_the_thread_that_steps() -> None:
    def niceness(alone: bool) -> int:
        async def main() -> int:
            actor = EngineActor(MODEL, VOCAB, EngineConfig(max_live=4, kv_tokens=64), alone)
            before = os.nice(0)
            await actor.start()
            actor.end()
            return os.nice(0) - before

        return asyncio.run(main())

    with ThreadPoolExecutor(1) as aside:  # niceness is a thread's, and is not had back
        assert aside.submit(niceness, False).result() == 0
        assert aside.submit(niceness, True).result() == ENGINE_NICENESS
