"""What a decoding layer computes between its matrix products: norms, gates, and heads on their way to attention.

Owns these with torch, for every dtype and device, and as functions in C (`heads.c`, `passes.c`) for float32 on CPUs.
Invariant: both give the same to rounding. What the functions are for: a step of a small model is mostly the calls of many small
products of torch, each over all tokens in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rollart.runtime.compiled import GATE_FORWARD, NORM_FORWARD, Helpers
from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.live_weights import Layer
from rollart.runtime.engine.shape import ModelShape

CELLS_A_THREAD = 1 << 14
"""Fewer numbers are not worth another thread."""


class Memory(NamedTuple):
    """Where keys and values of a layer go."""

    cache: KVCache
    layer: int
    write: Tensor
    """`KVCache.write_index` of every token."""


class Passes(Protocol):
    """Of one model on one device."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """(n, width), each row over its root mean square, times `weight`."""
        ...

    def gate(self, both: Tensor) -> Tensor:
        """silu(gate) * up: (n, 2 ffn), gates before ups -> (n, ffn)."""
        ...

    def turns(self, positions: Tensor) -> Tensor:
        """What `place` turns tokens at positions (n,) by; a row for each."""
        ...

    def place(self, heads: Tensor, layer: Layer, turns: Tensor, memory: Memory | None) -> Tensor:
        """Turn queries and keys of (n, width) heads; what is not a query is stored in `memory`, without which there are queries
        only. Queries (n, any number, head_dim) are returned; `heads` is used up."""
        ...


def rotations(shape: ModelShape) -> Tensor:
    """complex64 (max_positions, head_dim / 2)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(shape.max_positions, dtype=torch.float32)[:, None] / shape.rope_theta**exponents
    return torch.complex(angles.cos(), angles.sin())


class TorchPasses:
    """By torch alone."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._rotations = shape, rotations(shape).to(device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), weight, self._shape.rms_eps)
        # Elsewhere that is no kernel of its own but several, each over all tokens in memory.
        wide = x.float()
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norms.square_().mul_(1 / x.shape[-1]).add_(self._shape.rms_eps).rsqrt_()
        normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
        return normed

    def gate(self, both: Tensor) -> Tensor:
        ffn = self._shape.ffn
        return F.silu(both[:, :ffn]).mul_(both[:, ffn:])

    def turns(self, positions: Tensor) -> Tensor:
        return self._rotations.index_select(0, positions)[:, None]

    def place(self, heads: Tensor, layer: Layer, turns: Tensor, memory: Memory | None) -> Tensor:
        each = heads.view(len(heads), -1, self._shape.head_dim)
        kv_heads = 0 if memory is None else self._shape.kv_heads
        n_queries = each.shape[1] - 2 * kv_heads
        turned = each[:, : n_queries + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = ((turned[:, :n_queries], layer.q_norm), (turned[:, n_queries:], layer.k_norm))
            turned = torch.cat([self.norm(part, weight) for part, weight in parts], 1)
        turned = _rotated(turned, turns)
        if memory is not None:
            memory.cache.write(memory.layer, memory.write, turned[:, n_queries:], each[:, -kv_heads:])
        return turned[:, :n_queries]


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim) whose pairs lie side by side, by (tokens, 1, head_dim / 2)."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2))
    turned = torch.view_as_real(pairs * turn).view(heads.shape)
    return turned if heads.dtype == torch.float32 else turned.to(heads.dtype)


class _Placed(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "turns", "at", "write", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("stride", "query_heads", "kv_heads", "size")),
        ("eps", ctypes.c_float),
    )


class CompiledPasses:
    """By the functions of the library; float32 on the CPU. Uses as many threads as torch does here."""

    def __init__(self, library: ctypes.CDLL, shape: ModelShape) -> None:
        self._shape, self._table = shape, torch.view_as_real(rotations(shape)).contiguous()
        self._norm, self._gate, self._place = library.norm_forward, library.gate_forward, library.place_heads
        self._norm.argtypes, self._gate.argtypes = NORM_FORWARD, GATE_FORWARD
        self._place.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 2)
        self._helpers = Helpers()

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        out, row = torch.empty_like(x), x.element_size() * x.shape[1]
        begin, to, by, eps, width = x.data_ptr(), out.data_ptr(), weight.data_ptr(), self._shape.rms_eps, x.shape[1]
        over_rows(
            self._helpers, x.shape, lambda a, b: self._norm(begin + a * row, by, to + a * row, None, eps, b - a, width)
        )
        return out

    def gate(self, both: Tensor) -> Tensor:
        both, ffn = both.contiguous(), self._shape.ffn
        out, row = both.new_empty(len(both), ffn), both.element_size() * ffn
        begin, to = both.data_ptr(), out.data_ptr()
        over_rows(self._helpers, both.shape, lambda a, b: self._gate(begin + 2 * a * row, to + a * row, b - a, ffn))
        return out

    def turns(self, positions: Tensor) -> Tensor:
        return positions

    def place(self, heads: Tensor, layer: Layer, turns: Tensor, memory: Memory | None) -> Tensor:
        shape, size = self._shape, self._shape.head_dim
        kv_heads = 0
        where: list[int | None] = [None, None, None]
        if memory is not None:
            kept = memory.write, memory.cache.keys[memory.layer], memory.cache.values[memory.layer]
            kv_heads, where = shape.kv_heads, [tensor.data_ptr() for tensor in kept]
        each = heads.view(len(heads), -1, size)
        n_queries = each.shape[1] - 2 * kv_heads
        norms = (None if weight is None else weight.data_ptr() for weight in (layer.q_norm, layer.k_norm))
        given = _Placed(
            heads.data_ptr(), self._table.data_ptr(), turns.data_ptr(), *where, *norms,
            heads.stride(0), n_queries, kv_heads, size, shape.rms_eps,
        )  # fmt: skip
        at = ctypes.addressof(given)
        over_rows(self._helpers, heads.shape, lambda a, b: self._place(at, a, b))
        return each[:, :n_queries]


def over_rows(helpers: Helpers, cells: Sequence[int], call: Callable[[int, int], object]) -> None:
    """`call(begin, end)` for all rows of (rows, width) `cells`, by as many threads as torch has here and they are worth."""
    rows, width = cells
    threads = max(min(torch.get_num_threads(), rows, rows * width // CELLS_A_THREAD), 1)
    cuts = [rows * part // threads for part in range(threads + 1)]
    others = [helpers.of(threads - 1).submit(call, *part) for part in pairwise(cuts[1:])]
    call(cuts[0], cuts[1])
    for other in others:
        other.result()
