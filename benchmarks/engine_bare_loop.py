"""A bare decode loop of a Llama: preallocated keys and values, per-row positions, a mask, and nothing else.

What a continuous-batching engine cannot do without, written as plainly as it goes: no scheduler, no requests, no ends of turns,
no cache book. `benchmarks/engine.py` measures the engine's core against it, `engine_feasibility.py` the loop against what such
loops did elsewhere.

It is a yardstick, so it is to be fast. Of a decoding step most is reading keys and values: 25 MB at 64 rows and 96 positions of
the 0.92 M model. They lie in blocks of `BLOCK` positions, a block of all rows and heads in one piece, and whole blocks are
read; slices of a longer piece, with a gap after every head, take two to three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
"""Positions of a block: a row reads half of this too much on average, and a step makes few products."""
PREFILL_TOKENS = 1024
"""About as many of a prompt's tokens go through the layers at once: what lies between two products stays in the cache."""


class BareLoop:
    """`rows` sequences of at most `reach` tokens, decoded in lockstep. Weights are those of a `LlamaForCausalLM`."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], rows: int, reach: int) -> None:
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.eps = config.head_dim, config.rms_norm_eps
        self.embed, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.layers = []
        for index in range(config.num_hidden_layers):
            part = {
                name.removeprefix(f"model.layers.{index}."): w for name, w in weights.items() if f".{index}." in name
            }
            q, k, v = (part[f"self_attn.{which}_proj.weight"] for which in "qkv")
            gate_up = torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]])
            norms = part["input_layernorm.weight"], part["post_attention_layernorm.weight"]
            qkv = torch.cat([q * self.size**-0.5, k, v])
            self.layers.append((*norms, qkv, part["self_attn.o_proj.weight"], gate_up, part["mlp.down_proj.weight"]))
        inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(reach)[:, None] * inverse
        self.cos, self.sin = (torch.cat([part, part], -1).to(self.embed.dtype) for part in (angles.cos(), angles.sin()))
        memory = (-(-reach // BLOCK), rows, self.kv_heads, BLOCK, self.size)
        # written once here: memory that is touched for the first time costs a page fault each 4 KiB
        self.keys = [torch.empty(memory, dtype=self.embed.dtype).zero_() for _ in self.layers]
        self.values = [torch.empty(memory, dtype=self.embed.dtype).zero_() for _ in self.layers]

    def step(self, ids: Tensor, positions: Tensor, first_row: int = 0) -> Tensor:
        """Logits (rows, vocab) after the last of `ids` (rows, n) at `positions` (rows, n); of the rows from `first_row` on."""
        rows, n = ids.shape
        these, at = torch.arange(first_row, first_row + rows)[:, None], (positions // BLOCK, positions % BLOCK)
        n_blocks = int(positions.max()) // BLOCK + 1
        x, cos, sin = self.embed[ids], self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        hidden = torch.arange(n_blocks * BLOCK) > positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
        for (attn_norm, mlp_norm, qkv, out, gate_up, down), keys, values in zip(
            self.layers, self.keys, self.values, strict=True
        ):
            heads = F.linear(F.rms_norm(x, x.shape[-1:], attn_norm, self.eps), qkv).view(rows, n, -1, self.size)
            both, v = heads[:, :, : self.heads + self.kv_heads], heads[:, :, self.heads + self.kv_heads :]
            left, right = both.chunk(2, -1)
            both = both * cos + torch.cat([-right, left], -1) * sin
            keys[at[0], these, :, at[1]] = both[:, :, self.heads :]
            values[at[0], these, :, at[1]] = v
            here = slice(first_row, first_row + rows)
            mixed = self._attend(both[:, :, : self.heads], keys[:n_blocks, here], values[:n_blocks, here], mask)
            x = x + F.linear(mixed, out)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], mlp_norm, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], self.norm, self.eps), self.head)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """(rows, n, heads * size) of queries (rows, n, heads, size), already scaled, over blocks of keys and values."""
        rows, n = q.shape[:2]
        q = q.transpose(1, 2).reshape(rows, self.kv_heads, -1, self.size)  # heads that share keys lie beside each other
        scores = torch.cat([q @ block.transpose(-1, -2) for block in keys], -1)
        shares = (scores.view(rows, self.kv_heads, -1, n, scores.shape[-1]) + mask).softmax(-1).view_as(scores)
        parts = [part @ block for part, block in zip(torch.split(shares, BLOCK, -1), values, strict=True)]
        mixed: Tensor = reduce(torch.add, parts)
        return mixed.view(rows, self.heads, n, self.size).transpose(1, 2).reshape(rows, n, -1)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Sample `new` tokens after `prompts` (rows, n) at temperature 1: ids and log-probabilities (rows, new).

        start: position of the first prompt token; what lies before it was computed by earlier calls.
        """
        rows, n = prompts.shape
        tokens, logprobs = torch.empty(rows, new, dtype=torch.int64), torch.empty(rows, new)
        few = -(-rows // -(-rows * n // PREFILL_TOKENS))
        at = torch.arange(start, start + n)
        parts = zip(range(0, rows, few), torch.split(prompts, few), strict=True)
        scores = torch.cat([self.step(part, at.expand(len(part), n), row) for row, part in parts])
        for index in range(new):
            tokens[:, index], logprobs[:, index] = draw(scores)
            if index + 1 < new:
                scores = self.step(tokens[:, index : index + 1], torch.full((rows, 1), start + n + index))
        return tokens, logprobs


def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability, by the inverse of the distribution function in float64."""
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)
    below = logits.exp().cumsum(-1, dtype=torch.float64)
    total = below[:, -1:]
    uniform = torch.rand(len(logits), 1, dtype=torch.float64)
    tokens = torch.searchsorted(below, uniform * total, right=True).clamp_(max=logits.shape[1] - 1)
    return tokens[:, 0], (logits.gather(1, tokens) - total.log().float())[:, 0]
