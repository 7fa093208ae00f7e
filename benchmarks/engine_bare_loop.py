"""A bare decode loop of a Llama: preallocated keys and values, per-row positions, a mask, and nothing else.

What a continuous-batching engine cannot do without, written as plainly as it goes: no scheduler, no requests, no ends of turns,
no cache book. `benchmarks/engine.py` measures the engine's core against it. Run alone it prints its own tokens/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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
            qkv = torch.cat([part[f"self_attn.{which}_proj.weight"] for which in "qkv"])
            gate_up = torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]])
            norms = part["input_layernorm.weight"], part["post_attention_layernorm.weight"]
            self.layers.append((*norms, qkv, part["self_attn.o_proj.weight"], gate_up, part["mlp.down_proj.weight"]))
        inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(reach)[:, None] * inverse
        self.cos, self.sin = (torch.cat([part, part], -1).to(self.embed.dtype) for part in (angles.cos(), angles.sin()))
        memory = (rows, self.kv_heads, reach, self.size)
        self.keys = [torch.zeros(memory, dtype=self.embed.dtype) for _ in self.layers]
        self.values = [torch.zeros(memory, dtype=self.embed.dtype) for _ in self.layers]
        self.all_rows = torch.arange(rows)

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (rows, n, vocab) of `ids` (rows, n) at `positions` (rows, n)."""
        rows, n = ids.shape
        x, reach = self.embed[ids], int(positions.max()) + 1
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        hidden = (torch.arange(reach) > positions[:, :, None])[:, None]
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, float("-inf"))
        for index, (attn_norm, mlp_norm, qkv, out, gate_up, down) in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[-1:], attn_norm, self.eps)
            heads = F.linear(h, qkv).view(rows, n, -1, self.size)
            both, v = heads[:, :, : self.heads + self.kv_heads], heads[:, :, self.heads + self.kv_heads :]
            first, second = both.chunk(2, -1)
            both = both * cos + torch.cat([-second, first], -1) * sin
            self.keys[index][self.all_rows[:, None], :, positions] = both[:, :, self.heads :]
            self.values[index][self.all_rows[:, None], :, positions] = v
            mixed = F.scaled_dot_product_attention(
                both[:, :, : self.heads].transpose(1, 2), self.keys[index][:, :, :reach], self.values[index][:, :, :reach],
                attn_mask=mask, enable_gqa=self.heads != self.kv_heads,
            )  # fmt: skip
            x = x + F.linear(mixed.transpose(1, 2).reshape(rows, n, -1), out)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], mlp_norm, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.head)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Sample `new` tokens after `prompts` (rows, n) at temperature 1: ids and log-probabilities (rows, new).

        start: position of the first prompt token; what lies before it was computed by earlier calls.
        """
        rows, n = prompts.shape
        tokens, logprobs = torch.empty(rows, new, dtype=torch.int64), torch.empty(rows, new)
        scores = self.step(prompts, torch.arange(start, start + n).expand(rows, n))[:, -1]
        for at in range(new):
            tokens[:, at], logprobs[:, at] = draw(scores)
            if at + 1 < new:
                scores = self.step(tokens[:, at : at + 1], torch.full((rows, 1), start + n + at))[:, -1]
        return tokens, logprobs


def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability, by the inverse of the distribution function in float64."""
    logprobs = logits.float().log_softmax(-1)
    below = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64)
    tokens = torch.searchsorted(below, uniform * below[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def main() -> None:
    from rollart.config.schema import ScratchModel
    from rollart.runtime.models import build_model, hf_config, named_weights

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = hf_config(ScratchModel(layers=4, hidden=128, heads=4, kv_heads=4, ffn=344, max_positions=512), 512)
    loop = BareLoop(config, named_weights(build_model(config, seed=0)), given.rows, given.prompt + given.new)
    prompts = torch.randint(0, 512, (given.rows, given.prompt))
    for _ in range(4):
        started = time.perf_counter()
        loop.generate(prompts, given.new)
        print(round(given.rows * given.new / (time.perf_counter() - started)), "tokens/s")  # noqa: T201


if __name__ == "__main__":
    main()
