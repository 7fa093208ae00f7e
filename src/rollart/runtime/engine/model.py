"""The forward pass of the Llama family over packed tokens and a slotted cache.

Owns the mathematics. Invariant: logits equal those of transformers' own model on the whole sequence up to rounding, wherever a
sequence is cut into chunks and whatever else is in the batch. The last layer computes queries, attention and
MLP only for tokens whose logits are wanted; keys and values for all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rollart.runtime.engine.batch import Batch, Group
from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.live_weights import Layer, LiveWeights
from rollart.runtime.engine.native import DecodeKernel
from rollart.runtime.engine.shape import ModelShape

FEW_TOKENS = 256
"""Below, a product with the weights on the left is the faster one in bf16 on a CPU."""


class Decoder:
    """Stateless but for the table of rotations, complex64 (max_positions, head_dim / 2)."""

    def __init__(self, shape: ModelShape, device: torch.device, kernel: DecodeKernel | None) -> None:
        self._shape, self._kernel = shape, kernel
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(shape.max_positions, dtype=torch.float32)[:, None] / shape.rope_theta**exponents
        self._rotations = torch.complex(angles.cos(), angles.sin()).to(device)

    def forward(self, weights: LiveWeights, cache: KVCache, batch: Batch) -> Tensor | None:
        """Write keys and values of all tokens; logits (complete rows, vocab), or None when no row is complete."""
        x = weights.embed.index_select(0, batch.ids)
        turn = self._rotations.index_select(0, batch.positions)[:, None]
        final = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            h = self._norm(x, layer.attn_norm)
            groups = batch.groups
            if index < final or (batch.last is None and batch.last_groups):
                queries, keys, values = self._qkv(layer, h, turn)
            else:
                keys, values = self._kv(layer, h, turn)
                if batch.last is None:
                    cache.write(index, batch.write, keys, values)
                    return None
                groups = batch.last_groups
                queries = self._q(layer, h.index_select(0, batch.last), turn.index_select(0, batch.last))
                x = x.index_select(0, batch.last)
            cache.write(index, batch.write, keys, values)
            mixed = [self._attend(cache, index, queries[group.tokens], group) for group in groups]
            x = torch.addmm(x, mixed[0] if len(mixed) == 1 else torch.cat(mixed), layer.out.t())
            x = self._mlp(layer, x)
        return F.linear(self._norm(x, weights.norm), weights.head)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        h, ffn = self._norm(x, layer.mlp_norm), self._shape.ffn
        if x.dtype == torch.bfloat16 and len(x) <= FEW_TOKENS and not x.is_cuda:
            # The second factor is what oneDNN packs at each call: here that is the tokens, not the larger weights.
            turned = torch.mm(layer.gate_up, h.t())
            return x + torch.mm(layer.down, F.silu(turned[:ffn]).mul_(turned[ffn:])).t()
        both = F.linear(h, layer.gate_up)
        return torch.addmm(x, F.silu(both[:, :ffn]).mul_(both[:, ffn:]), layer.down.t())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), weight, self._shape.rms_eps)
        # Elsewhere that is no kernel of its own but several, each over all tokens in memory.
        wide = x.float()
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norms.square_().mul_(1 / x.shape[-1]).add_(self._shape.rms_eps).rsqrt_()
        normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
        return normed

    def _qkv(self, layer: Layer, h: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each (tokens, heads of its kind, head_dim), rotated."""
        shape, n = self._shape, len(h)
        heads = F.linear(h, layer.qkv, layer.qkv_bias).view(n, -1, shape.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = _rotated(self._norm(heads[:, : shape.heads], layer.q_norm), turn)
            keys = _rotated(self._norm(heads[:, shape.heads : -shape.kv_heads], layer.k_norm), turn)
        else:
            both = _rotated(heads[:, : -shape.kv_heads], turn)
            queries, keys = both[:, : shape.heads], both[:, shape.heads :]
        return queries, keys, heads[:, -shape.kv_heads :]

    def _q(self, layer: Layer, h: Tensor, turn: Tensor) -> Tensor:
        shape, rows = self._shape, self._shape.heads * self._shape.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:rows]
        queries = F.linear(h, layer.qkv[:rows], bias).view(len(h), shape.heads, shape.head_dim)
        return _rotated(queries if layer.q_norm is None else self._norm(queries, layer.q_norm), turn)

    def _kv(self, layer: Layer, h: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        shape, rows = self._shape, self._shape.heads * self._shape.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[rows:]
        heads = F.linear(h, layer.qkv[rows:], bias).view(len(h), 2 * shape.kv_heads, shape.head_dim)
        keys = heads[:, : shape.kv_heads]
        return _rotated(keys if layer.k_norm is None else self._norm(keys, layer.k_norm), turn), heads[
            :, shape.kv_heads :
        ]

    def _attend(self, cache: KVCache, layer: int, queries: Tensor, group: Group) -> Tensor:
        """(tokens, heads * head_dim) of one group. Query heads that share a key head are rows of one product."""
        shape = self._shape
        if group.reads is not None and self._kernel is not None:
            return self._kernel(queries, cache.keys[layer], cache.values[layer], group.reads).view(len(queries), -1)
        kv_heads, shared = shape.kv_heads, shape.heads // shape.kv_heads
        if group.spread is not None:
            queries = queries.index_select(0, group.spread)
        keys, values = cache.read(layer, group.memory, group.reach)
        mask = group.mask
        if group.width == 1:
            queries = queries.view(group.rows, kv_heads, shared, shape.head_dim)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        else:
            # (rows, width, kv head, sharing, size) -> (rows, kv head, sharing x width, size)
            queries = queries.reshape(group.rows, group.width, kv_heads, shared, shape.head_dim).permute(0, 2, 3, 1, 4)
            queries = queries.reshape(group.rows, kv_heads, shared * group.width, shape.head_dim)
            if mask is not None and shared > 1:
                mask = mask.repeat(1, 1, shared, 1)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            mixed = mixed.view(group.rows, kv_heads, shared, group.width, shape.head_dim).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(group.rows * group.width, shape.heads * shape.head_dim)
        return mixed if group.collect is None else mixed.index_select(0, group.collect)


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim) whose pairs lie side by side, by (tokens, 1, head_dim / 2)."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2))
    turned = torch.view_as_real(pairs * turn).view(heads.shape)
    return turned if heads.dtype == torch.float32 else turned.to(heads.dtype)
