"""What a layer computes between its matrix products, as functions in C (`passes.c`, `attention_passes.c`).

Owns the calls of the library (`runtime.compiled`). Invariants: the results are those of the torch path in `blocks` to
rounding, and the same for the same input and number of threads; memory is torch's, and what a call needs beside it is freed
at its end; where there is no library, the trainer uses torch alone and can say why. For float32 on CPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollart.runtime.compiled import GATE_FORWARD, NORM_FORWARD, TRAINING, Helpers, Native, Wanted, native
from rollart.runtime.trainer.packing import Runs

NORM_BACKWARD = (*(ctypes.c_void_p,) * 8, *(ctypes.c_int64,) * 2)
GATE_BACKWARD = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 2)
TARGET = (*(ctypes.c_void_p,) * 4, ctypes.c_float, *(ctypes.c_int64,) * 2)
ATTEND = (ctypes.c_void_p, *(ctypes.c_int64,) * 3)


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "cos", "sin", "out", "log_sums")),
        *((name, ctypes.c_void_p) for name in ("grad_out", "grad_queries", "grad_keys", "grad_values")),
        *((name, ctypes.c_void_p) for name in ("lead", "shared", "own", "begins", "asked", "places")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        ("scale", ctypes.c_float),
    )


class Heads(NamedTuple):
    """Queries, keys and values of all heads: (Q, heads * D), (P, kv_heads * D) twice; rows in one piece, any distance apart."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Looking(NamedTuple):
    """How heads attend."""

    runs: Runs
    cos: Tensor
    """(P, D), both halves alike; `sin` too."""
    sin: Tensor
    scale: float


class Kernels:
    """The functions of the library. Tensors are float32 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = _typed(library.norm_forward, NORM_FORWARD)
        self._norm_back = _typed(library.norm_backward, NORM_BACKWARD)
        self._gate = _typed(library.gate_forward, GATE_FORWARD)
        self._gate_back = _typed(library.gate_backward, GATE_BACKWARD)
        library.target_forward.restype = ctypes.c_double
        self._target = _typed(library.target_forward, TARGET)
        self._target_back = _typed(library.target_backward, TARGET)
        self._attend = _typed(library.attend_forward, ATTEND)
        self._attend_back = _typed(library.attend_backward, ATTEND)
        self._helpers = Helpers()

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(N, H) normed and weighted, and 1 / rms of each row, (N,)."""
        hidden, weight = hidden.contiguous(), weight.contiguous()
        out, scale = torch.empty_like(hidden), hidden.new_empty(len(hidden))
        self._norm(*map(Tensor.data_ptr, (hidden, weight, out, scale)), eps, *hidden.shape)
        return out, scale

    def norm_back(
        self,
        grad: Tensor,
        of: tuple[Tensor, Tensor, Tensor],
        past: Tensor | None,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden (N, H) and weight (H,), as wanted; `of`: hidden, weight, scale; `past`: a gradient of hidden that
        is added."""
        hidden, weight, scale = of[0].contiguous(), of[1].contiguous(), of[2]
        grad, past = grad.contiguous(), None if past is None else past.contiguous()
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_weight = torch.zeros_like(weight) if wanted[1] else None
        sums = torch.empty_like(weight)
        given = (grad, hidden, weight, scale, past, by_hidden, by_weight, sums)
        self._norm_back(*map(_address, given), *hidden.shape)
        return by_hidden, by_weight

    def gate(self, both: Tensor) -> Tensor:
        """silu(gate) * up: (N, 2 F), gates before ups -> (N, F)."""
        rows, width = len(both), both.shape[1] // 2
        out = both.new_empty(rows, width)
        self._gate(both.data_ptr(), out.data_ptr(), rows, width)
        return out

    def gate_back(self, both: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `both`."""
        out, grad = torch.empty_like(both), grad.contiguous()
        self._gate_back(both.data_ptr(), grad.data_ptr(), out.data_ptr(), *grad.shape)
        return out

    def target(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, float]:
        """Of (N, V) logits: log-probabilities of the targets (N,) at a temperature, the logarithms that normalise each row, and
        the summed entropy."""
        logits, targets = logits.contiguous(), targets.contiguous()
        logprobs, log_norms = logits.new_empty(len(logits)), logits.new_empty(len(logits))
        given = map(Tensor.data_ptr, (logits, targets, logprobs, log_norms))
        return logprobs, log_norms, float(self._target(*given, 1.0 / temperature, *logits.shape))

    def target_back(self, logits: Tensor, targets: Tensor, log_norms: Tensor, temperature: float, grad: Tensor) -> None:
        """Make of logits their gradient, in their place; `grad` (N,) is that of the log-probabilities."""
        targets, grad = targets.contiguous(), grad.contiguous()
        given = map(Tensor.data_ptr, (logits, targets, grad, log_norms))
        self._target_back(*given, 1.0 / temperature, *logits.shape)

    def attend(self, heads: Heads, how: Looking) -> tuple[Tensor, Tensor]:
        """(Q, heads * D), and the logarithms of the sums of exponentials, (Q, heads). Queries and keys are rotated here."""
        n, size = len(heads.queries), how.cos.shape[1]
        out = heads.queries.new_empty(n, heads.queries.shape[1])
        log_sums = heads.queries.new_empty(n, heads.queries.shape[1] // size)
        self._run(self._attend, _structure(heads, how, out, log_sums), how.runs)
        return out, log_sums

    def attend_back(self, heads: Heads, how: Looking, out: Tensor, log_sums: Tensor, grad: Tensor, into: Heads) -> None:
        """Write the gradient of queries; add those of keys and values. `into` lies as `heads` does."""
        grad = grad.contiguous()
        given = _structure(heads, how, out, log_sums)
        given.grad_out = grad.data_ptr()
        given.grad_queries, given.grad_keys, given.grad_values = map(Tensor.data_ptr, into)
        self._run(self._attend_back, given, how.runs)

    def _run(self, call: Callable[..., int], given: _Attention, runs: Runs) -> None:
        """Heads are shared among as many threads as torch has here."""
        n, at = given.kv_heads, ctypes.addressof(given)
        threads = min(torch.get_num_threads(), n)
        cuts = [n * part // threads for part in range(threads + 1)]
        others = [self._helpers.of(threads - 1).submit(call, at, runs.longest, *part) for part in pairwise(cuts[1:])]
        failed = call(at, runs.longest, cuts[0], cuts[1]) + sum(other.result() for other in others)
        if failed:
            raise MemoryError("attention in training found no memory for its scores")


def _typed(function: Any, types: tuple[type, ...]) -> Callable[..., Any]:
    function.argtypes = types
    typed: Callable[..., Any] = function
    return typed


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _structure(heads: Heads, how: Looking, out: Tensor, log_sums: Tensor) -> _Attention:
    runs, size = how.runs, how.cos.shape[1]
    tensors = (*heads, how.cos, how.sin, out, log_sums)
    return _Attention(
        *map(Tensor.data_ptr, tensors),
        *(None,) * 4,
        *(array.ctypes.data for array in (runs.lead, runs.shared, runs.own, runs.begins, runs.asked, runs.places)),
        len(runs.lead), heads.queries.shape[1] // size, heads.keys.shape[1] // size, size,
        heads.queries.stride(0), heads.keys.stride(0), heads.values.stride(0), how.scale,
    )  # fmt: skip


def kernels_for(dtype: torch.dtype, device: torch.device, wanted: Wanted = "auto") -> Native[Kernels]:
    """The kernels for layers, or why there are none for this dtype, device or machine."""
    unfit = ""
    if wanted == "off":
        unfit = "trainer.native=off"
    elif device.type != "cpu":
        unfit = f"the kernels are for CPUs, not for {device.type}"
    elif dtype != torch.float32:
        unfit = f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    return native(TRAINING, Kernels, unfit=unfit)
