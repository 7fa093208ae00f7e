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
from rollart.runtime.engine.passes import Memory, Passes, TorchPasses
from rollart.runtime.engine.shape import ModelShape

FEW_TOKENS = 256
"""Below, a product with the weights on the left is the faster one in bf16 on a CPU."""


class Decoder:
    """Stateless."""

    def __init__(self, shape: ModelShape, device: torch.device, kernel: DecodeKernel | None) -> None:
        self._shape, self._kernel = shape, kernel
        compiled = None if kernel is None else kernel.passes(shape)
        self._passes: Passes = compiled or TorchPasses(shape, device)

    def forward(self, weights: LiveWeights, cache: KVCache, batch: Batch) -> Tensor | None:
        """Write keys and values of all tokens; logits (complete rows, vocab), or None when no row is complete."""
        x = weights.embed.index_select(0, batch.ids)
        final, place, turns = len(weights.layers) - 1, self._passes.place, self._passes.turns(batch.positions)
        for index, layer in enumerate(weights.layers):
            h = self._passes.norm(x, layer.attn_norm)
            groups, memory = batch.groups, Memory(cache, index, batch.write)
            if index < final or (batch.last is None and batch.last_groups):
                queries = place(F.linear(h, layer.qkv, layer.qkv_bias), layer, turns, memory)
            else:
                place(self._part(layer, h, slice(self._query_rows, None)), layer, turns, memory)
                if batch.last is None:
                    return None
                groups = batch.last_groups
                heads = self._part(layer, h.index_select(0, batch.last), slice(0, self._query_rows))
                queries = place(heads, layer, turns.index_select(0, batch.last), None)
                x = x.index_select(0, batch.last)
            mixed = [self._attend(cache, index, queries[group.tokens], group) for group in groups]
            x = torch.addmm(x, mixed[0] if len(mixed) == 1 else torch.cat(mixed), layer.out.t())
            x = self._mlp(layer, x)
        return F.linear(self._passes.norm(x, weights.norm), weights.head)

    @property
    def _query_rows(self) -> int:
        return self._shape.heads * self._shape.head_dim

    @staticmethod
    def _part(layer: Layer, h: Tensor, rows: slice) -> Tensor:
        """Some of the heads."""
        return F.linear(h, layer.qkv[rows], None if layer.qkv_bias is None else layer.qkv_bias[rows])

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        h, ffn = self._passes.norm(x, layer.mlp_norm), self._shape.ffn
        if x.dtype == torch.bfloat16 and len(x) <= FEW_TOKENS and not x.is_cuda:
            # The second factor is what oneDNN packs at each call: here that is the tokens, not the larger weights.
            turned = torch.mm(layer.gate_up, h.t())
            return x + torch.mm(layer.down, F.silu(turned[:ffn]).mul_(turned[ffn:])).t()
        return torch.addmm(x, self._passes.gate(F.linear(h, layer.gate_up)), layer.down.t())

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
