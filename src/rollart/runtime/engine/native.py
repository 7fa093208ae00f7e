"""What decoding does beside its matrix products as functions in C, compiled on first use by the machine's own compiler.

Owns the calls of the library (`runtime.compiled`). Invariants: the result is that of `scaled_dot_product_attention` over each
row's own length up to rounding; where there is no kernel, the engine uses torch alone and can say why. What it is for: torch's
kernel on CPUs reads every row to the length of the longest, and waits for memory.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollart.runtime.compiled import DECODING, Helpers, Native, Wanted, native
from rollart.runtime.engine.cache import Ints
from rollart.runtime.engine.passes import CompiledPasses, over_rows
from rollart.runtime.engine.reads import Reads
from rollart.runtime.engine.shape import ModelShape

NAMES = {torch.float32: "attend_f32", torch.bfloat16: "attend_bf16"}
MAX_HEAD_DIM = 256
DRAW_BLOCK = 64
"""Ids whose masses are summed together."""
Uniforms = NDArray[np.float64]


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "lead", "shared", "ends")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "sharing", "capacity", "query_stride", "out_stride")),
        ("scale", ctypes.c_float),
    )


class DecodeKernel:
    """The function for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self.dtype = library, dtype
        self._attend = getattr(library, NAMES[dtype])
        self._attend.argtypes = (*(ctypes.c_void_p,) * 5, *(ctypes.c_int64,) * 3)
        library.draw_tokens.argtypes = (*(ctypes.c_void_p,) * 6, *(ctypes.c_int64,) * 3)
        self._helpers = Helpers()

    def passes(self, shape: ModelShape) -> CompiledPasses | None:
        """What the same library computes between matrix products, where that is this dtype's."""
        return CompiledPasses(self._library, shape) if self.dtype == torch.float32 else None

    def draw(self, logits: Tensor, uniform: Uniforms) -> tuple[Ints, NDArray[np.float32]]:
        """Ids and log-probabilities of one token for each row of (n, vocab) float32 logits, at `uniform` (n,)."""
        logits, uniform, (n, vocab) = logits.contiguous(), np.ascontiguousarray(uniform), logits.shape
        ids, logprobs = np.empty(n, np.int64), np.empty(n, np.float32)

        def part(begin: int, end: int) -> None:
            rows, masses, sums = slice(begin, end), np.empty(vocab, np.float32), np.empty(-(-vocab // DRAW_BLOCK))
            arrays = (uniform[rows], ids[rows], logprobs[rows], masses, sums)
            at = logits[rows].data_ptr(), *(array.ctypes.data for array in arrays)
            self._library.draw_tokens(*at, DRAW_BLOCK, end - begin, vocab)

        over_rows(self._helpers, logits.shape, part)
        return ids, logprobs

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> Tensor:
        """(n, heads, head_dim) for queries of that shape; keys and values are a layer's (slots, kv_heads, capacity, head_dim).

        Uses as many threads as torch does here.
        """
        n, heads, size = queries.shape
        _, kv_heads, capacity, _ = keys.shape
        if queries.stride()[1:] != (size, 1):
            queries = queries.contiguous()
        out = queries.new_empty(n, heads, size)
        arrays = (reads.slots, reads.lead, reads.shared, reads.ends)
        rows = _Rows(
            *(array.ctypes.data for array in arrays),
            kv_heads, heads // kv_heads, capacity, queries.stride(0), heads * size, size**-0.5,
        )  # fmt: skip
        tensors = (queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), ctypes.addressof(rows))
        threads = torch.get_num_threads()
        if min(threads, n) == 1:
            failed = self._attend(*tensors, 0, n, size)
        else:
            first, *rest = even_parts(reads.ends, min(threads, n))
            parts = [functools.partial(self._attend, *tensors, *part, size) for part in rest]
            others = [self._helpers.of(threads - 1).submit(part) for part in parts]
            failed = self._attend(*tensors, *first, size) + sum(other.result() for other in others)
        if failed:
            raise MemoryError("attention over decoding rows found no memory for its scores")
        return out


def even_parts(lengths: Ints, parts: int) -> list[tuple[int, int]]:
    """Rows (n,) of these lengths cut into at most `parts` runs (begin, end), none empty, that are as long as each other within
    the longest row."""
    total = lengths.cumsum()
    inner = np.searchsorted(total - lengths / 2, total[-1] * np.arange(1, parts) / parts)
    cuts = [0, *inner.tolist(), len(lengths)]
    return [(begin, end) for begin, end in pairwise(cuts) if begin < end]


def decode_kernel(
    dtype: torch.dtype, device: torch.device, head_dim: int, wanted: Wanted = "auto"
) -> Native[DecodeKernel]:
    """The kernel for decoding rows, or why there is none for this dtype, device or machine."""
    unfit = ""
    if wanted == "off":
        unfit = "engine.native=off"
    elif device.type != "cpu":
        unfit = f"the kernel is for CPUs, not for {device.type}"
    elif dtype not in NAMES:
        unfit = f"there is no kernel for {str(dtype).removeprefix('torch.')}"
    elif head_dim > MAX_HEAD_DIM:
        unfit = f"heads of {head_dim} are wider than the {MAX_HEAD_DIM} that the kernel takes"
    return native(DECODING, lambda library: DecodeKernel(library, dtype), unfit=unfit)
