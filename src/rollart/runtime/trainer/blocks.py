"""A layer of the Llama family over packed tokens, with the gradients of its parts written out.

Owns the layer's arithmetic in training. Invariant: it computes what the layer of `transformers` computes, to rounding; its
parameters are those of that layer, read where they are (sharded training gathers them around the call and frees them after
it, so nothing here may keep a copy of them); gradients that nobody wants are not computed. What is written out by hand is what
torch would do in many passes over memory, which on one core weigh as much as products do. Rotations are complex products: the
halves of a head are interleaved by permuting the rows of the projections, for queries and keys alike, which changes no inner
product of theirs. Where there are kernels (`kernels`), they take the place of all that is no product (`fused`). A
configuration that asks for other arithmetic is refused in `runtime.models`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from rollart.runtime.trainer import fused
from rollart.runtime.trainer.kernels import Heads, Kernels, Looking
from rollart.runtime.trainer.packing import Packed, Plan
from rollart.runtime.trainer.products import product


class Block(nn.Module):
    """Calls the parts of one layer of a transformers model; owns no parameter that the layer does not."""

    def __init__(self, layer: Any, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = kernels

    def forward(self, hidden: torch.Tensor, turns: Turns, plan: Plan) -> torch.Tensor:
        """(P, H) -> (Q, H), for the tokens that the plan asks for, by the kernels where the plan is for them."""
        layer, kernels = self.layer, None if plan.runs is None else self.kernels
        if kernels is None:
            return self._gated(self._attended(hidden, turns, plan))
        if getattr(layer.self_attn, "q_norm", None) is None:
            call = fused.Call(
                kernels, _looking(layer, turns, plan), layer.input_layernorm.variance_epsilon, plan.asking
            )
            return fused.gated_half(layer, fused.attention_half(layer, hidden, call), kernels)
        return fused.gated_half(layer, self._attended(hidden, turns, plan), kernels)

    def _attended(self, hidden: torch.Tensor, turns: Turns, plan: Plan) -> torch.Tensor:
        """hidden + attention of its norm; products and norms by torch, attention by the kernels where the plan is for them."""
        layer, attention = self.layer, self.layer.self_attn
        normed = norm(layer.input_layernorm, hidden)
        asking = normed if plan.asking is None else _rows(normed, plan.asking)
        residual = hidden if plan.asking is None else _rows(hidden, plan.asking)
        if self.kernels is not None and plan.runs is not None:
            queries, keys = (
                _normed_heads(attention, which, rows).flatten(1) for which, rows in (("q", asking), ("k", normed))
            )
            heads = Heads(queries, keys, _linear(attention.v_proj, normed))
            attended = fused.attend(heads, self.kernels, _looking(layer, turns, plan))
        else:
            keys = _turned(attention, "k", normed, turns)
            values = _linear(attention.v_proj, normed)
            queries = _turned(attention, "q", asking, turns if plan.asking is None else turns.at(plan.asking))
            attended = _attend(attention, queries, keys, values, plan)
        return residual + _linear(attention.o_proj, attended)

    def _gated(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden + gated MLP of its norm, by torch."""
        mlp, normed = self.layer.mlp, norm(self.layer.post_attention_layernorm, hidden)
        gated = _Gated.apply(_linear(mlp.gate_proj, normed), _linear(mlp.up_proj, normed))  # type: ignore[no-untyped-call]
        return hidden + _linear(mlp.down_proj, gated)


class Turns:
    """The rotations of P tokens, made once per pass."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """(P, D) each, both halves alike."""
        self.cos, self.sin = cos, sin
        self._by_heads: dict[int, torch.Tensor] = {}

    def complex(self, heads: int) -> torch.Tensor:
        """(P, heads * D / 2) complex, in one piece: products along it are one pass."""
        if heads not in self._by_heads:
            half = self.cos.shape[1] // 2
            self._by_heads[heads] = torch.complex(self.cos[:, :half], self.sin[:, :half]).repeat(1, heads)
        return self._by_heads[heads]

    def at(self, tokens: torch.Tensor) -> Turns:
        return Turns(self.cos[tokens], self.sin[tokens])


def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The module's RMS norm."""
    apply = _Normed.apply
    out: torch.Tensor = apply(hidden, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a table; its gradient adds up what rows that are taken several times get."""
    out: torch.Tensor = functional.embedding(index, table)
    return out


def _linear(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    apply = _Linear.apply
    out: torch.Tensor = apply(hidden, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return out


def _turned(attention: Any, which: str, normed: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Queries or keys of all heads, (P, heads * D), rotated to their places."""
    projection = getattr(attention, f"{which}_proj")
    if getattr(attention, f"{which}_norm", None) is None:
        n_heads = projection.weight.shape[0] // attention.head_dim
        apply = _TurnedLinear.apply
        out: torch.Tensor = apply(normed, projection.weight, projection.bias, turns.complex(n_heads), n_heads)  # type: ignore[no-untyped-call]
        return out
    heads = _normed_heads(attention, which, normed)
    turned: torch.Tensor = heads * turns.cos[:, None] + rotate_half(heads) * turns.sin[:, None]  # type: ignore[no-untyped-call]
    return turned.flatten(1)


def _normed_heads(attention: Any, which: str, normed: torch.Tensor) -> torch.Tensor:
    """Queries or keys of all heads, (P, heads, D), each with its norm."""
    heads = _linear(getattr(attention, f"{which}_proj"), normed).view(len(normed), -1, attention.head_dim)
    found: torch.Tensor = getattr(attention, f"{which}_norm")(heads)
    return found


def _looking(layer: Any, turns: Turns, plan: Plan) -> Looking:
    assert plan.runs is not None
    return Looking(plan.runs, turns.cos, turns.sin, layer.self_attn.scaling)


def _attend(
    attention: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """(Q, heads * D), (P, kv_heads * D) twice -> (Q, heads * D). Each asking token looks at its own sequence up to itself."""
    groups, dim = attention.num_key_value_groups, attention.head_dim
    results = []
    for block in plan.blocks:
        q, k, v = (
            _rows(flat, index).view(*index.shape, -1, dim).transpose(1, 2)
            for index, flat in ((block.queries, queries), (block.keys, keys), (block.keys, values))
        )
        out = functional.scaled_dot_product_attention(
            q,
            k.repeat_interleave(groups, 1) if groups > 1 else k,
            v.repeat_interleave(groups, 1) if groups > 1 else v,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=attention.scaling,
        )
        results.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
    assert plan.back is not None
    return _rows(results[0] if len(results) == 1 else torch.cat(results), plan.back)


class _Normed(torch.autograd.Function):
    """x / rms(x) * weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale: torch.Tensor = torch.linalg.vecdot(hidden, hidden)[:, None].div_(hidden.shape[1]).add_(eps).rsqrt_()
        unit = hidden * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        unit, scale, weight = ctx.saved_tensors
        by_weight = torch.linalg.vecdot(grad, unit, dim=0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, None
        grad_unit = grad * weight
        along = torch.linalg.vecdot(grad_unit, unit)[:, None].div_(-unit.shape[1])
        return grad_unit.addcmul_(unit, along).mul_(scale), by_weight, None


class _Linear(torch.autograd.Function):
    """A projection."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad
        return (
            product(grad, weight.T) if for_hidden else None,
            grad.T @ hidden if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


class _TurnedLinear(torch.autograd.Function):
    """A projection to heads and the rotation of each; the halves of a head come out interleaved."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, turns: torch.Tensor, heads: int
    ) -> torch.Tensor:
        out = product(hidden, _interleaved(weight, heads), None if bias is None else _interleaved(bias, heads))
        _as_complex(out).mul_(turns)
        ctx.save_for_backward(hidden, weight, turns)
        ctx.heads = heads
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, turns = ctx.saved_tensors
        for_hidden, for_weight, for_bias, _, _ = ctx.needs_input_grad
        straight = torch.view_as_real(_as_complex(grad) * turns.conj()).flatten(1)
        return (
            product(straight, _interleaved(weight, ctx.heads).T) if for_hidden else None,
            _in_halves(straight.T @ hidden, ctx.heads) if for_weight else None,
            _in_halves(straight.sum(0), ctx.heads) if for_bias else None,
            None,
            None,
        )


class _Gated(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        opened = functional.silu(gate)
        ctx.save_for_backward(gate, up, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        gate, up, opened = ctx.saved_tensors
        for_gate, for_up = ctx.needs_input_grad
        by_gate = torch.ops.aten.silu_backward(grad * up, gate) if for_gate else None
        return by_gate, grad * opened if for_up else None


def _as_complex(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(flat.view(len(flat), -1, 2))


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """First index (heads, halves, D / 2) -> (heads, D / 2, halves)."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `_interleaved`."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def turns_of(rotary: Any, hidden: torch.Tensor, packed: Packed) -> Turns:
    """The rotations of a model for packed tokens; `hidden` gives type and device."""
    cos, sin = rotary(hidden, position_ids=packed.places[None])
    return Turns(cos[0].contiguous(), sin[0].contiguous())
