"""What lies between the matrix products, by torch and by the compiled functions: the same to rounding, whatever the model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.live_weights import Layer, LiveWeights
from rollart.runtime.engine.native import decode_kernel
from rollart.runtime.engine.passes import CompiledPasses, Memory, TorchPasses
from rollart.runtime.engine.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="qwen3", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=32, ffn=80, vocab=64, max_positions=40,
    rope_theta=1e4, rms_eps=1e-5, tied=True, qkv_bias=False, qk_norm=True,
)  # fmt: skip


def both(shape: ModelShape) -> tuple[TorchPasses, CompiledPasses]:
    found = decode_kernel(torch.float32, CPU, shape.head_dim)
    if found.kernel is None:
        pytest.skip(found.why)
    compiled = found.kernel.passes(shape)
    assert compiled is not None
    return TorchPasses(shape, CPU), compiled


def layer_of(shape: ModelShape) -> Layer:
    layer = LiveWeights(shape, torch.float32, CPU).layers[1]
    for field in fields(layer):
        weight = getattr(layer, field.name)
        if weight is not None:
            weight.copy_(torch.randn(weight.shape) * 0.5 + 1.0)
    return layer


def cache_of(shape: ModelShape) -> KVCache:
    cache = KVCache(shape, torch.float32, CPU)
    cache.repack(np.empty(0, np.int64), 9, 24)
    return cache


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.usefixtures("threads")
def test_norms_and_gates_are_those_of_torch(rows: int) -> None:
    torch.manual_seed(rows)
    wide, gates, weight = torch.randn(rows, 48) * 3, torch.randn(rows, 160) * 9, torch.randn(48)
    by_torch, compiled = both(SHAPE)
    strided = torch.randn(rows, 96)[:, ::2]
    for x in (wide, strided):
        assert torch.allclose(compiled.norm(x, weight), by_torch.norm(x, weight), atol=1e-5, rtol=1e-5)
    assert torch.allclose(compiled.gate(gates), by_torch.gate(gates), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("n", [1, 5, 200])
@pytest.mark.usefixtures("threads")
def test_heads_are_turned_and_stored_as_torch_does(head_dim: int, normed: bool, n: int) -> None:
    torch.manual_seed(n)
    shape = replace(SHAPE, head_dim=head_dim, qk_norm=normed)
    layer, draws = layer_of(shape), np.random.default_rng(n)
    cells = draws.permutation(9 * 24)[:n]
    slots, places = cells // 24, cells % 24
    for n_queries, kept in ((6, True), (0, True), (6, False)):
        heads = torch.randn(n, (n_queries + (4 if kept else 0)) * head_dim)
        found = list[tuple[Tensor, ...]]()
        for passes in both(shape):
            cache = cache_of(shape)
            write = torch.from_numpy(cache.write_index(slots, places))
            memory = Memory(cache, 1, write) if kept else None
            queries = passes.place(heads.clone(), layer, passes.turns(torch.from_numpy(places)), memory)
            assert queries.shape == (n, n_queries, head_dim)
            found.append((queries, cache.keys[1], cache.values[1]))
            assert not cache.keys[0].any(), "another layer is not touched"
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


def test_models_in_bf16_are_computed_by_torch() -> None:
    found = decode_kernel(torch.bfloat16, CPU, 32)
    if found.kernel is None:
        pytest.skip(found.why)
    assert found.kernel.passes(SHAPE) is None
