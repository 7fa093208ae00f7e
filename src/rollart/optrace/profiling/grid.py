"""The operators that a device is measured by when no job is named: shapes that the layers of language models have.

Owns the grids. Invariant: coarse points come first, so that a profile cut short still spans the range. Why:
`measured_ops` carries a time to shapes between the measured ones and twice beyond, no further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rollart.optrace.measured_ops import distinct
from rollart.optrace.ops import Op
from rollart.perf.operators import FLASH_BACKWARD_FLOPS, OPERAND_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of a grid; tokens are of one micro-batch, bytes those of the operand of a pass."""

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    vocabulary: tuple[int, ...]
    sequences: tuple[int, ...]
    heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    decoded_heads: tuple[int, ...]
    """Heads of all sequences where each has one query: batches are larger then."""
    pass_elements: tuple[int, ...]
    update_elements: tuple[int, ...]


GRIDS = {
    "large": Grid(
        tokens=(16, 64, 256, 1024, 4096, 16384), widths=(1024, 2048, 4096, 8192, 16384), vocabulary=(32768, 131072),
        sequences=(512, 1024, 2048, 4096, 8192), heads=(8, 32, 128), head_dims=(64, 128), decoded_heads=(32, 512, 4096),
        pass_elements=(1 << 18, 1 << 21, 1 << 24, 1 << 27), update_elements=(1 << 20, 1 << 24, 1 << 28),
    ),
    "small": Grid(
        tokens=(32, 128, 512, 2048), widths=(64, 128, 256, 512, 1024), vocabulary=(512, 8192),
        sequences=(32, 128, 512), heads=(8, 32, 128), head_dims=(16, 64), decoded_heads=(8, 128),
        pass_elements=(1 << 12, 1 << 15, 1 << 18, 1 << 21),
        update_elements=(1 << 12, 1 << 16, 1 << 20),
    ),
    "tiny": Grid(
        tokens=(16, 64), widths=(32, 64), vocabulary=(128,), sequences=(16, 32), heads=(4, 8), head_dims=(16,),
        decoded_heads=(16, 64),
        pass_elements=(1 << 10, 1 << 12, 1 << 14), update_elements=(1 << 12, 1 << 14),
    ),
}  # fmt: skip
"""`large`: models of 1 to 100 billion parameters on a GPU; `small`: what a CPU trains; `tiny`: a trial of the program."""

STREAMS = {
    "add": 3.0, "mul": 3.0, "silu": 2.0, "silu_backward": 3.0, "_softmax": 2.0, "native_layer_norm": 2.0,
    "native_layer_norm_backward": 3.0, "clone": 2.0, "cos": 2.0, "neg": 2.0, "cat": 2.0,
}  # fmt: skip
"""Passes of the grid, in operands read and written."""
UPDATES = {"_fused_adamw_": 7.0, "_foreach_lerp_": 3.0, "_foreach_addcdiv_": 4.0, "_foreach_mul_": 2.0}


def gemm_op(rows: int, columns: int, inner: int, batch: int = 1, *, dtype: str, weight_gradient: bool = False) -> Op:
    """A product as an operator."""
    moved = OPERAND_BYTES[dtype] * batch * (float(rows) * inner + float(inner) * columns + float(rows) * columns)
    return Op(
        id=0, name="aten.bmm" if batch > 1 else "aten.mm", kind="gemm", shape=(rows, columns, inner, batch), dtype=dtype,
        flops=2.0 * rows * columns * inner * batch, moved_bytes=moved, weight_gradient=weight_gradient,
    )  # fmt: skip


def attention_op(queries: int, keys: int, heads: int, head_dim: int, *, dtype: str, backward: bool = False) -> Op:
    """Fused causal attention (one query: all keys) as an operator."""
    pairs = float(queries) * keys * heads * (1.0 if queries == 1 else 0.5)
    width = OPERAND_BYTES[dtype]
    moved = width * heads * head_dim * (2.0 * queries + 2.0 * keys) * (2.0 if backward else 1.0)
    return Op(
        id=0, name="aten.scaled_dot_product_attention", kind="attention_backward" if backward else "attention", dtype=dtype,
        shape=(queries, keys, heads, 2 * head_dim), moved_bytes=moved,
        flops=4.0 * pairs * head_dim * (FLASH_BACKWARD_FLOPS if backward else 1.0),
    )  # fmt: skip


def pass_op(name: str, shape: Sequence[int], streams: float, *, dtype: str) -> Op:
    """A pass that moves `streams` operands of `shape`."""
    moved = streams * math.prod(shape) * OPERAND_BYTES[dtype]
    return Op(id=0, name=f"aten.{name}", kind="pass", shape=tuple(shape), dtype=dtype, moved_bytes=moved)


def operators(grid: Grid, dtype: str) -> list[Op]:
    """All of the grid once, coarse points first. Updates of the optimizer are in fp32, products also in the layout of
    gradients.
    """
    ranked: list[tuple[int, Op]] = []
    for kind in (_products, _attentions, _passes):
        ranked += list(kind(grid, dtype))
    return distinct(op for _, op in sorted(ranked, key=lambda pair: pair[0]))


def _products(grid: Grid, dtype: str) -> Iterator[tuple[int, Op]]:
    for level, (tokens, columns, inner) in _levels(grid.tokens, grid.widths, grid.widths):
        yield level, gemm_op(tokens, columns, inner, dtype=dtype)
        if level == 0:
            yield 1, gemm_op(columns, inner, tokens, dtype=dtype, weight_gradient=True)
    for level, (tokens, columns, inner) in _levels(grid.tokens, grid.vocabulary, grid.widths[::2]):
        yield level + 1, gemm_op(tokens, columns, inner, dtype=dtype)
    for level, (sequence, heads, dim) in _levels(grid.sequences, grid.heads, grid.head_dims):
        if dtype != "fp8":
            yield level + 2, gemm_op(sequence, sequence, dim, heads, dtype=dtype)


def _attentions(grid: Grid, dtype: str) -> Iterator[tuple[int, Op]]:
    if dtype == "fp8":
        return
    for level, (sequence, heads, dim) in _levels(grid.sequences, grid.heads, grid.head_dims):
        yield level, attention_op(sequence, sequence, heads, dim, dtype=dtype)
        yield level, attention_op(sequence, sequence, heads, dim, dtype=dtype, backward=True)
    for level, (sequence, heads, dim) in _levels(grid.sequences, grid.decoded_heads, grid.head_dims):
        yield level + 1, attention_op(1, sequence, heads, dim, dtype=dtype)


def _passes(grid: Grid, dtype: str) -> Iterator[tuple[int, Op]]:
    if dtype == "fp8":
        return
    width = grid.widths[len(grid.widths) // 2]
    for name, streams in STREAMS.items():
        for level, (elements,) in _levels(grid.pass_elements):
            yield level, pass_op(name, (max(1, elements // width), width), streams, dtype=dtype)
    for name, streams in UPDATES.items():
        for level, (elements,) in _levels(grid.update_elements):
            yield level + 1, pass_op(name, (elements,), streams, dtype="fp32")


def _levels(*axes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Points of a grid with how fine they are: 0 where all sizes are every second of their axis or its last."""

    def coarse(axis: Sequence[int], at: int) -> bool:
        return at % 2 == 0 or at == len(axis) - 1

    for places in product(*(range(len(axis)) for axis in axes)):
        fine = sum(not coarse(axis, at) for axis, at in zip(axes, places, strict=True))
        yield fine, tuple(axis[at] for axis, at in zip(axes, places, strict=True))


def within(
    ops: Sequence[Op], held_bytes: float, size_of: Callable[[Op], float] = lambda op: op.moved_bytes
) -> list[Op]:
    """Those whose operands fit into `held_bytes`."""
    return [op for op in ops if size_of(op) <= held_bytes]
