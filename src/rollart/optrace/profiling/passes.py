"""Passes over memory as calls of torch: elementwise kernels, norms, softmax, look-ups, optimizer updates.

Owns the table of kernels by name. Invariant: what a call reads and writes is what the operator says it moves; the second
operand of a binary kernel is as large as the first only if the bytes say so. Why: on a CPU a cosine and an addition of
equal bytes differ tenfold, so a pass is measured by what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rollart.optrace.ops import Op
from rollart.optrace.profiling.operands import DTYPES, Ready, dtype_of, nbytes
from rollart.perf.device_profile import base_name

WHOLE_SECOND = 2.5
"""Streams of memory, in operands of the largest shape, from which on the second operand is one too."""
ONLY_WRITTEN = 1.5
"""Streams below which the first operand is a repeated column (the gradient of a mean)."""
EPS = 1e-5
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Of:
    """A pass's operands, as its record describes them."""

    op: Op
    device: torch.device
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.op.shape or (1,)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.dtype.itemsize

    @property
    def streams(self) -> float:
        """Bytes moved, in operands of the largest shape."""
        return self.op.moved_bytes / (self.elements * self.width)

    def full(self, *shape: int) -> torch.Tensor:
        return torch.rand(*(shape or self.shape), device=self.device, dtype=self.dtype)

    def first(self) -> torch.Tensor:
        """An operand of the whole shape; a column that is repeated where not even one is read."""
        if self.streams < ONLY_WRITTEN and len(self.shape) > 1:
            return self.full(*self.shape[:-1], 1).expand(self.shape)
        return self.full()

    @property
    def written(self) -> float:
        return float(self.elements * self.width)

    def places(self, count: float, below: int) -> torch.Tensor:
        return torch.randint(0, below, (max(1, int(count)),), device=self.device)


Build = Callable[[_Of], Ready]


def _made(run: Callable[[], object], first: torch.Tensor, *others: torch.Tensor, out: float = 0.0) -> Ready:
    held = nbytes(first, *others) + (out or nbytes(first))
    return Ready(
        run=run, first=first if first.is_contiguous() else None, held_bytes=held
    )  # a repeated column is not written


def _unary(call: Callable[[torch.Tensor], object]) -> Build:
    def build(of: _Of) -> Ready:
        x = of.first()
        return _made(lambda: call(x), x, out=of.written)

    return build


def _binary(call: Callable[[torch.Tensor, Any], object]) -> Build:
    """The second operand is as large as the first, a number, or repeated over some dimensions: by the bytes that are moved."""

    def build(of: _Of) -> Ready:
        x = of.first()
        if of.streams >= WHOLE_SECOND:
            y = of.full()
            return _made(lambda: call(x, y), x, y)
        more = of.op.moved_bytes / of.width - 2.0 * of.elements
        if more < 1.0:
            return _made(lambda: call(x, 1.0), x, out=of.written)
        shapes = [(*[1] * (len(of.shape) - kept), *of.shape[len(of.shape) - kept :]) for kept in (1, 2)]
        shapes.append((*of.shape[:-1], 1))
        repeated = of.full(*min(shapes, key=lambda shape: abs(math.prod(shape) - more)))
        return _made(lambda: call(x, repeated), x, repeated)

    return build


def _gradient(call: Callable[[torch.Tensor, torch.Tensor], object]) -> Build:
    def build(of: _Of) -> Ready:
        gradient, saved = of.full(), of.full()
        return _made(lambda: call(gradient, saved), gradient, saved)

    return build


def _reduction(call: Callable[..., object]) -> Build:
    """Over the last dimension, the leading ones, or all: by what is written."""

    def build(of: _Of) -> Ready:
        x, last = of.full(), of.shape[-1]
        written = of.op.moved_bytes / of.width - of.elements
        choices = {"last": of.elements / last, "leading": float(last), "all": 1.0}
        over = min(choices, key=lambda name: abs(choices[name] - written))
        if over == "all" or len(of.shape) == 1:
            return _made(lambda: call(x), x)
        dims = [-1] if over == "last" else list(range(len(of.shape) - 1))
        return _made(lambda: call(x, dim=dims), x)

    return build


def _copy(of: _Of) -> Ready:
    """A copy of another layout: heads and tokens of four-dimensional operands are exchanged, as around attention."""
    if len(of.shape) == 4:
        batch, first, second, last = of.shape
        stored = of.full(batch, second, first, last)
        x = stored.transpose(1, 2)
        return _made(lambda: x.contiguous().clone() if x.is_contiguous() else x.contiguous(), stored)
    x = of.full()
    return _made(x.clone, x)


def _cast(of: _Of) -> Ready:
    if abs(of.streams - 2.0) < 0.1:
        return _copy(of)
    x = of.full()
    other = torch.bfloat16 if of.width == 4 else torch.float32
    return _made(lambda: x.to(other), x)


def _written(of: _Of) -> Ready:
    x = of.full()
    return Ready(run=lambda: torch.zeros_like(x), first=None, held_bytes=2 * nbytes(x))


def _filled(of: _Of) -> Ready:
    x = of.full()
    return Ready(run=lambda: x.fill_(0.5), first=None, held_bytes=nbytes(x))


def _copied_into(of: _Of) -> Ready:
    x, y = of.full(), of.full()
    return _made(lambda: y.copy_(x), x, y)


def _joined(of: _Of) -> Ready:
    last = max(1, of.shape[-1] // 2)
    halves = [of.full(*of.shape[:-1], size) for size in (last, max(1, of.shape[-1] - last))]
    return _made(lambda: torch.cat(halves, dim=-1), *halves, out=2 * nbytes(*halves))


def _selected(of: _Of) -> Ready:
    x, y, choice = of.full(), of.full(), of.full() > 0.5
    return _made(lambda: torch.where(choice, x, y), x, y, choice)


def _masked(of: _Of) -> Ready:
    x, choice = of.full(), of.full() > 0.5
    return _made(lambda: x.masked_fill(choice, 0.0), x, choice)


def _padded_gradient(of: _Of) -> Ready:
    """The gradient of a slice: zeros of the whole, and the part in its place."""
    half = max(1, of.shape[-1] // 2)
    gradient = of.full(*of.shape[:-1], half)
    sizes = list(of.shape)
    return _made(
        lambda: aten.slice_backward(gradient, sizes, len(sizes) - 1, 0, half, 1), gradient, out=of.op.moved_bytes
    )


def _softmax(call: Any) -> Build:
    return _unary(lambda x: call(x, -1, False))


def _softmax_gradient(call: Any) -> Build:
    return _gradient(lambda gradient, out: call(gradient, out, -1, gradient.dtype))


def _norm(of: _Of) -> Ready:
    x, weight, bias = of.full(), of.full(of.shape[-1]), of.full(of.shape[-1])
    return _made(lambda: aten.native_layer_norm(x, [of.shape[-1]], weight, bias, EPS), x)


def _norm_gradient(of: _Of) -> Ready:
    size = [of.shape[-1]]
    gradient, x, weight, bias = of.full(), of.full(), of.full(*size), of.full(*size)
    _, mean, spread = aten.native_layer_norm(x, size, weight, bias, EPS)
    every = [True, True, True]
    return _made(
        lambda: aten.native_layer_norm_backward(gradient, x, size, mean, spread, weight, bias, every), gradient, x
    )  # fmt: skip


def _rms_norm(of: _Of) -> Ready:
    x, weight = of.full(), of.full(of.shape[-1])
    return _made(lambda: F.rms_norm(x, (of.shape[-1],), weight, EPS), x)


def _embedding(of: _Of) -> Ready:
    """Of three dimensions the shape is what was looked up, of two the table's; the bytes say how many rows were."""
    hidden = of.shape[-1]
    rows = max(1, of.elements // hidden)
    table = of.full(rows, hidden)
    ids = of.places(of.op.moved_bytes / (2 * hidden * of.width), rows)
    return Ready(run=lambda: F.embedding(ids, table), first=None, held_bytes=nbytes(table) + of.op.moved_bytes / 2)


def _embedding_gradient(of: _Of) -> Ready:
    """The gradient is read and added, the table's written: of three dimensions the shape is the gradient's."""
    hidden = of.shape[-1]
    known = max(1, of.elements // hidden)
    all_rows = of.op.moved_bytes / of.width / hidden
    rows, looked_up = (all_rows - 2 * known, known) if len(of.shape) > 2 else (known, (all_rows - known) / 2)
    table_rows = max(1, int(rows))
    ids = of.places(looked_up, table_rows)
    gradient = of.full(ids.numel(), hidden)
    return _made(
        lambda: aten.embedding_dense_backward(gradient, ids, table_rows, -1, False), gradient,
        out=float(table_rows * hidden * of.width),
    )  # fmt: skip


def _likelihood(of: _Of) -> Ready:
    x = of.full(max(1, of.elements // of.shape[-1]), of.shape[-1])
    ids = of.places(x.shape[0], x.shape[1])
    return _made(lambda: F.nll_loss(x, ids), x)


def _likelihood_gradient(of: _Of) -> Ready:
    x = of.full(max(1, of.elements // of.shape[-1]), of.shape[-1])
    ids = of.places(x.shape[0], x.shape[1])
    _, weight = aten.nll_loss_forward(x, ids, None, 1, -100)
    one = torch.ones((), device=of.device, dtype=of.dtype)
    return Ready(
        run=lambda: aten.nll_loss_backward(one, x, ids, None, 1, -100, weight), first=None, held_bytes=2 * nbytes(x)
    )  # fmt: skip


def _lists(of: _Of, count: int, streams: float) -> list[list[torch.Tensor]]:
    """`count` lists of tensors of the largest shape, and one for the rest, that together move the bytes stated."""
    total = max(1, round(of.op.moved_bytes / (streams * of.width)))
    whole, rest = divmod(total, of.elements)
    return [
        [*[of.full() for _ in range(whole)], *([of.full(rest)] if rest else [])] for _ in range(count)
    ]  # fmt: skip


def _foreach(operands: int, streams: float, call: Callable[..., object]) -> Build:
    def build(of: _Of) -> Ready:
        lists = _lists(of, operands, streams)
        held = nbytes(*[tensor for one in lists for tensor in one])
        return Ready(run=lambda: call(*lists), first=None, held_bytes=held + nbytes(*lists[0]))

    return build


def _fused_adamw(of: _Of) -> Ready:
    weights, gradients, means, squares = _lists(of, 4, 7.0)
    steps = [torch.ones((), device=of.device) for _ in weights]

    def run() -> object:
        return torch._fused_adamw_(
            weights, gradients, means, squares, [], steps, lr=1e-6, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return Ready(run=run, first=None, held_bytes=nbytes(*weights, *gradients, *means, *squares))


def _stand_in(of: _Of) -> Ready:
    """As many bytes, read once and written once."""
    x = of.full(max(1, round(of.op.moved_bytes / (2 * of.width))))
    return Ready(run=x.clone, first=x, held_bytes=2 * nbytes(x), exact=False)


PASSES: Mapping[str, Build] = {
    **{name: _unary(getattr(torch, name)) for name in (
        "neg", "exp", "log", "cos", "sin", "rsqrt", "sqrt", "reciprocal", "sigmoid", "tanh", "relu", "abs", "square")},
    "silu": _unary(F.silu), "gelu": _unary(lambda x: F.gelu(x, approximate="tanh")), "pow": _unary(lambda x: x.pow(2)),
    **{name: _binary(getattr(torch, name)) for name in ("add", "sub", "mul", "div")},
    "maximum": _gradient(torch.maximum), "minimum": _gradient(torch.minimum),
    **{name: _binary(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "clamp": _unary(lambda x: x.clamp(0.0, 1.0)), "isfinite": _unary(torch.isfinite),
    "rsub": _binary(lambda x, y: y - x),
    **{f"{name}_": _binary(getattr(torch.Tensor, f"{name}_")) for name in ("add", "sub", "mul", "div")},
    "silu_backward": _gradient(aten.silu_backward),
    "gelu_backward": _gradient(lambda g, x: aten.gelu_backward(g, x, approximate="tanh")),
    "sigmoid_backward": _gradient(aten.sigmoid_backward), "tanh_backward": _gradient(aten.tanh_backward),
    "threshold_backward": _gradient(lambda g, x: aten.threshold_backward(g, x, 0.0)),
    "sum": _reduction(torch.sum), "mean": _reduction(torch.mean), "amax": _reduction(torch.amax),
    "linalg_vector_norm": _unary(torch.linalg.vector_norm),
    "clone": _copy, "contiguous": _copy, "_to_copy": _cast, "copy_": _copied_into, "copy": _copy,
    **{name: _written for name in ("zeros", "zeros_like", "new_zeros", "ones_like", "full", "full_like", "empty_like")},
    "zero_": _filled, "fill_": _filled, "cat": _joined, "stack": _joined, "where": _selected, "masked_fill": _masked,
    "slice_backward": _padded_gradient,
    "_softmax": _softmax(aten._softmax), "_log_softmax": _softmax(aten._log_softmax),
    "_softmax_backward_data": _softmax_gradient(aten._softmax_backward_data),
    "_log_softmax_backward_data": _softmax_gradient(aten._log_softmax_backward_data),
    "native_layer_norm": _norm, "native_layer_norm_backward": _norm_gradient,
    "_fused_rms_norm": _rms_norm, "rms_norm": _rms_norm,
    "embedding": _embedding, "embedding_dense_backward": _embedding_gradient,
    "nll_loss_forward": _likelihood, "nll_loss_backward": _likelihood_gradient,
    "_foreach_add_": _foreach(1, 2.0, lambda xs: torch._foreach_add_(xs, 1e-8)),
    "_foreach_mul_": _foreach(1, 2.0, lambda xs: torch._foreach_mul_(xs, 1.0)),
    "_foreach_div_": _foreach(1, 2.0, lambda xs: torch._foreach_div_(xs, 1.0)),
    "_foreach_sqrt": _foreach(1, 2.0, torch._foreach_sqrt),
    "_foreach_norm": _foreach(1, 1.0, torch._foreach_norm),
    "_foreach_lerp_": _foreach(2, 3.0, lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.1)),
    "_foreach_copy_": _foreach(2, 2.0, lambda xs, ys: torch._foreach_copy_(xs, ys)),
    "_foreach_addcmul_": _foreach(2, 4.0, lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, 1e-3)),
    "_foreach_addcdiv_": _foreach(3, 4.0, lambda xs, ys, zs: torch._foreach_addcdiv_(xs, ys, zs, 1e-6)),
    "_fused_adamw_": _fused_adamw,
}  # fmt: skip
"""By the name in torch's library. Of updates of many tensors, the number of operands and of streams stands beside them."""


def pass_ready(op: Op, device: torch.device) -> Ready:
    """The pass on operands of its own; a copy of as many bytes where its name is not known or its operands are no floats."""
    if op.dtype not in DTYPES:
        x = torch.zeros(max(1, round(op.moved_bytes / 2)), device=device, dtype=torch.uint8)
        return Ready(run=x.clone, first=None, held_bytes=2 * nbytes(x), exact=False)
    build = PASSES.get(base_name(op.name), _stand_in)
    return build(_Of(op=op, device=device, dtype=dtype_of(op)))
