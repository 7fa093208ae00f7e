"""From a traced operator to a call of torch that does the same work: matrix products and attention.

Owns `ready`. Invariant: a call does the FLOPs and moves the bytes that the operator states, on operands of
its shape and dtype; where the name says nothing that is known, a copy of as many bytes stands in and `exact` is False.
Why: a time is that of an operator only if the same kernel ran.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op
from rollart.optrace.profiling.operands import Ready, dtype_of, nbytes
from rollart.optrace.profiling.passes import pass_ready
from rollart.perf.device_profile import base_name
from rollart.perf.operators import FLASH_BACKWARD_FLOPS

CAUSAL = 0.75
"""Below this share of all pairs, attention is masked (half of them); above it, it is not."""


def ready(op: Op, device: torch.device, number: int) -> Ready:
    """The operator on operands of its own; `number` counts the sets, of which products alternate the layout of weights."""
    if op.stream == "comm":
        raise ConfigError(f"{op.name} communicates: measure it with profiling.groups, between processes")
    if op.kind == "gemm":
        return _scaled_product(op, device) if op.dtype == "fp8" else _product(op, device, number)
    if op.kind == "attention":
        return _attention(op, device)
    return _attention_backward(op, device) if op.kind == "attention_backward" else pass_ready(op, device)


def _product(op: Op, device: torch.device, number: int) -> Ready:
    rows, columns, inner, batch = op.shape
    of: Any = {"device": device, "dtype": dtype_of(op)}
    lead = (batch,) if batch > 1 else ()
    if op.weight_gradient:
        left = torch.rand(*lead, inner, rows, **of)
        right = torch.rand(*lead, inner, columns, **of)
        product: tuple[torch.Tensor, torch.Tensor] = (left.mT, right)
    else:
        left = torch.rand(*lead, rows, inner, **of)
        # a linear layer multiplies by its weight transposed forward, and by the weight itself backward
        right = (
            torch.rand(*lead, columns, inner, **of).mT if number % 2 == 0 else torch.rand(*lead, inner, columns, **of)
        )
        product = (left, right)
    held = nbytes(left, right) + float(rows) * columns * batch * left.element_size()
    if base_name(op.name) == "addmm" and batch == 1:
        bias = torch.rand(columns, **of)
        return Ready(run=lambda: torch.addmm(bias, *product), first=left, held_bytes=held)
    return Ready(run=lambda: torch.matmul(*product), first=left, held_bytes=held)


def _scaled_product(op: Op, device: torch.device) -> Ready:
    """8-bit operands with one scale each; torch has no batched form, so experts run one after the other."""
    rows, columns, inner, batch = op.shape
    pairs = [
        (torch.rand(rows, inner, device=device).to(torch.float8_e4m3fn),
         torch.rand(columns, inner, device=device).to(torch.float8_e4m3fn).mT)
        for _ in range(batch)
    ]  # fmt: skip
    one = torch.ones((), device=device)

    def run() -> object:
        return [torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16) for a, b in pairs]

    return Ready(run=run, first=None, held_bytes=op.moved_bytes)


def _heads(op: Op, device: torch.device) -> tuple[list[torch.Tensor], bool]:
    """Queries, keys and values, (1, heads, tokens, dimension), and whether they are masked."""
    queries, keys, heads, dims = op.shape
    of: Any = {"device": device, "dtype": dtype_of(op)}
    tensors = [torch.rand(1, heads, tokens, dims // 2, **of) for tokens in (queries, keys, keys)]
    whole = 2.0 * queries * keys * heads * dims * (FLASH_BACKWARD_FLOPS if op.kind == "attention_backward" else 1.0)
    return tensors, queries > 1 and op.flops < CAUSAL * whole


def _attention(op: Op, device: torch.device) -> Ready:
    (q, k, v), causal = _heads(op, device)
    held = nbytes(q, k, v, q)
    if device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Ready(run=lambda: kernel(q, k, v, 0.0, causal), first=q, held_bytes=held)
    return Ready(run=lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), first=q, held_bytes=held)


def _attention_backward(op: Op, device: torch.device) -> Ready:
    (q, k, v), causal = _heads(op, device)
    grad = torch.rand_like(q)
    held = nbytes(q, k, v, grad, q, q, k, v)
    if device.type == "cpu":
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, log_sums = forward(q, k, v, 0.0, causal)
        return Ready(
            run=lambda: backward(grad, q, k, v, out, log_sums, 0.0, causal), first=grad, held_bytes=held
        )  # fmt: skip
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        kept = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
    return Ready(
        run=lambda: torch.autograd.grad(kept, leaves, grad, retain_graph=True), first=grad, held_bytes=held
    )  # fmt: skip
