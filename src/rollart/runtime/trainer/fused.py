"""The halves of a layer with the kernels between their products, and their gradients.

Owns the order of products and passes. Invariant: it computes what `blocks` computes with torch alone, to rounding. Projections
of the same rows are one product: fewer and larger ones, and their gradients are added within it. Parameters are read where
they are, in both passes: sharded training frees them in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollart.runtime.trainer.kernels import Heads, Kernels, Looking
from rollart.runtime.trainer.products import product

Gradients = tuple[Tensor | None, ...]


class Call(NamedTuple):
    """What is not a tensor to take a gradient of."""

    kernels: Kernels
    how: Looking
    eps: float
    asking: Tensor | None
    """(Q,) tokens that ask; None: all."""


def attention_half(layer: Any, hidden: Tensor, call: Call) -> Tensor:
    """hidden + attention of its norm: (P, H) -> (Q, H); for layers without norms of single heads."""
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    out: Tensor = _AttentionHalf.apply(  # type: ignore[no-untyped-call]
        hidden, layer.input_layernorm.weight, *(part.weight for part in parts), *(part.bias for part in parts), call
    )
    return out


def gated_half(layer: Any, hidden: Tensor, kernels: Kernels) -> Tensor:
    """hidden + gated MLP of its norm: (Q, H) -> (Q, H)."""
    norm, parts = layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    weights, biases = (part.weight for part in parts), (part.bias for part in parts)
    apply = _GatedHalf.apply
    out: Tensor = apply(hidden, norm.weight, *weights, *biases, kernels, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def attend(heads: Heads, kernels: Kernels, how: Looking) -> Tensor:
    """Attention alone: (Q, heads * D)."""
    out: Tensor = _Attend.apply(*heads, kernels, how)  # type: ignore[no-untyped-call]
    return out


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: Tensor, *rest: Any) -> Tensor:
        wq, wk, wv, wo, bq, bk, bv, bo, call = rest
        hidden = hidden.contiguous()
        normed, scale = call.kernels.norm(hidden, norm, call.eps)
        if call.asking is None:
            asks, past = normed, hidden
            joined = product(normed, torch.cat([wq, wk, wv]), _joined(bq, bk, bv))
            heads = Heads(*_columns(joined, wq, wk, wv))
        else:
            asks, past = normed[call.asking], hidden[call.asking]
            joined = product(normed, torch.cat([wk, wv]), _joined(bk, bv))
            heads = Heads(product(asks, wq, bq), *_columns(joined, wk, wv))
        attended, log_sums = call.kernels.attend(heads, call.how)
        ctx.save_for_backward(hidden, norm, scale, normed, asks, *heads, attended, log_sums, wq, wk, wv, wo)
        ctx.call = call
        return product(attended, wo, bo).add_(past)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        hidden, norm, scale, normed, asks, q, k, v, attended, log_sums, wq, wk, wv, wo = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad
        heads, grad = Heads(q, k, v), grad.contiguous()
        by_attended = product(grad, wo.T)
        if call.asking is None:
            joined = grad.new_empty(len(grad), q.shape[1] + k.shape[1] + v.shape[1])
            joined[:, q.shape[1] :].zero_()
            into = Heads(*_columns(joined, wq, wk, wv))
            call.kernels.attend_back(heads, call.how, attended, log_sums, by_attended, into)
            by_q, by_k, by_v = _split(joined.T @ normed, wq, wk, wv) if any(needs[2:5]) else (None,) * 3
            by_normed, past = product(joined, torch.cat([wq, wk, wv]).T), grad
        else:
            joined = grad.new_zeros(len(normed), k.shape[1] + v.shape[1])
            into = Heads(torch.empty_like(q), *_columns(joined, wk, wv))
            call.kernels.attend_back(heads, call.how, attended, log_sums, by_attended, into)
            by_q = into.queries.T @ asks if needs[2] else None
            by_k, by_v = _split(joined.T @ normed, wk, wv) if any(needs[3:5]) else (None,) * 2
            by_normed = product(joined, torch.cat([wk, wv]).T)
            by_normed.index_add_(0, call.asking, product(into.queries, wq.T))
            past = torch.zeros_like(hidden).index_copy_(0, call.asking, grad)
        by_hidden, by_norm = call.kernels.norm_back(by_normed, (hidden, norm, scale), past, needs[:2])
        return (
            by_hidden, by_norm, by_q, by_k, by_v,
            grad.T @ attended if needs[5] else None,
            *(part.sum(0) if need else None for part, need in zip((*into, grad), needs[6:10], strict=True)),
            None,
        )  # fmt: skip


class _GatedHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: Tensor, *rest: Any) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias, kernels, eps = rest
        hidden = hidden.contiguous()
        normed, scale = kernels.norm(hidden, norm, eps)
        both = product(normed, torch.cat([gate, up]), _joined(gate_bias, up_bias))
        gated = kernels.gate(both)
        ctx.save_for_backward(hidden, norm, scale, normed, both, gated, gate, up, down)
        ctx.kernels = kernels
        return product(gated, down, down_bias).add_(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        hidden, norm, scale, normed, both, gated, gate, up, down = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grad.contiguous()
        by_both = ctx.kernels.gate_back(both, product(grad, down.T))
        by_gate, by_up = _split(by_both.T @ normed, gate, up) if any(needs[2:4]) else (None, None)
        by_down = grad.T @ gated if needs[4] else None
        by_normed = product(by_both, torch.cat([gate, up]).T)
        by_hidden, by_norm = ctx.kernels.norm_back(by_normed, (hidden, norm, scale), grad, needs[:2])
        sums = _split(by_both.sum(0), gate, up) if any(needs[5:7]) else (None, None)
        return by_hidden, by_norm, by_gate, by_up, by_down, *sums, grad.sum(0) if needs[7] else None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, kernels: Kernels, how: Looking) -> Tensor:
        heads = Heads(queries.contiguous(), keys.contiguous(), values.contiguous())
        out, log_sums = kernels.attend(heads, how)
        ctx.save_for_backward(*heads, out, log_sums)
        ctx.kernels, ctx.how = kernels, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        q, k, v, out, log_sums = ctx.saved_tensors
        into = Heads(torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
        ctx.kernels.attend_back(Heads(q, k, v), ctx.how, out, log_sums, grad, into)
        return *into, None, None


def _joined(*biases: Tensor | None) -> Tensor | None:
    """Biases of projections that are one product: all have one, or none."""
    given = [bias for bias in biases if bias is not None]
    return torch.cat(given) if given else None


def _columns(joined: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """What the projections of `weights` gave, out of their one product."""
    parts: tuple[Tensor, ...] = torch.tensor_split(joined, _inner(weights), 1)
    return parts


def _split(rows: Tensor, *weights: Tensor) -> Gradients:
    parts: tuple[Tensor, ...] = torch.tensor_split(rows, _inner(weights))
    return parts


def _inner(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Where the rows of all but the first begin, one behind the other."""
    return tuple(accumulate(len(weight) for weight in weights[:-1]))
