"""The weights that are served: a few fused matrices, seen as the tensors of a Hugging Face `state_dict`.

Owns the memory of one set of weights of the fast path.

Queries, keys and values are one matrix, gate and up another: one product each instead of three and two. Inside a head the
two halves that the rotation pairs, i and i + head_dim/2, lie next to each other, so that a pair is one complex number
and the rotation one product; queries and keys are permuted alike, which leaves every score as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.runtime.engine.named_weights import NamedWeights
from rollart.runtime.engine.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Matrices are (out, in) as in `torch.nn.Linear`."""

    attn_norm: Tensor
    qkv: Tensor
    """Rows: heads x head_dim queries, kv_heads x head_dim keys, kv_heads x head_dim values."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LiveWeights(NamedWeights):
    """One set of weights of `shape`, uninitialised until every name has been put."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def new(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        super().__init__(shape.family, dtype)
        self._shape = shape
        self._turned = dtype == torch.float32 and device.type == "cpu"
        """Matrices lie in memory as (in, out): products with few tokens, as decoding has them, are up to four times as fast so
        in MKL; with thousands it makes no difference."""
        self.embed = self._name("model.embed_tokens.weight", new(shape.vocab, shape.hidden))
        self.layers = [self._layer(f"model.layers.{index}.", new) for index in range(shape.layers)]
        self.norm = self._name("model.norm.weight", new(shape.hidden))
        self.head = self.embed if shape.tied else self._name("lm_head.weight", new(shape.vocab, shape.hidden))
        self.aliases = {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
        self.missing = set(self.named)

    def _paired(self, name: str, rows: Tensor, heads: int) -> None:
        """Name rows that are stored pair by pair and travel half by half."""
        rest = tuple(rows.shape[1:])
        halves = rows.view(heads, self._shape.head_dim // 2, 2, *rest).transpose(1, 2)
        self._name(name, halves, tuple(rows.shape))

    def _layer(self, prefix: str, new: Callable[..., Tensor]) -> Layer:
        def matrix(out: int, n: int) -> Tensor:
            return new(n, out).t() if self._turned else new(out, n)

        shape, attn, mlp = self._shape, f"{prefix}self_attn.", f"{prefix}mlp."
        q_rows, k_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = matrix(q_rows + 2 * k_rows, shape.hidden)
        bias = new(q_rows + 2 * k_rows) if shape.qkv_bias else None
        for kind, part in (("weight", qkv), ("bias", bias)):
            if part is not None:
                self._paired(f"{attn}q_proj.{kind}", part[:q_rows], shape.heads)
                self._paired(f"{attn}k_proj.{kind}", part[q_rows : q_rows + k_rows], shape.kv_heads)
                self._name(f"{attn}v_proj.{kind}", part[q_rows + k_rows :])
        q_norm = new(shape.head_dim) if shape.qk_norm else None
        k_norm = new(shape.head_dim) if shape.qk_norm else None
        if q_norm is not None and k_norm is not None:
            self._paired(f"{attn}q_norm.weight", q_norm, 1)
            self._paired(f"{attn}k_norm.weight", k_norm, 1)
        gate_up = matrix(2 * shape.ffn, shape.hidden)
        self._name(f"{mlp}gate_proj.weight", gate_up[: shape.ffn])
        self._name(f"{mlp}up_proj.weight", gate_up[shape.ffn :])
        return Layer(
            attn_norm=self._name(f"{prefix}input_layernorm.weight", new(shape.hidden)),
            qkv=qkv,
            qkv_bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._name(f"{attn}o_proj.weight", matrix(shape.hidden, q_rows)),
            mlp_norm=self._name(f"{prefix}post_attention_layernorm.weight", new(shape.hidden)),
            gate_up=gate_up,
            down=self._name(f"{mlp}down_proj.weight", matrix(shape.hidden, shape.ffn)),
        )
