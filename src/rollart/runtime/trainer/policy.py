"""The policy as the trainer sees it: log-probabilities of the trained tokens, and nothing else that would cost.

Owns the forward pass. Invariant: it computes what `transformers` computes for the same ids, to rounding. Three things are
left out because no trained token depends on them: logits of positions that predict no trained token; in the last layer
everything but keys and values at those positions (two layers of width 64 with a tenth of the tokens trained: 0.16 s in
place of 0.26 s for 64 x 200 tokens on one core); and masks for padding, which lies to the right of all that is trained.
The logits are never kept: they are made chunk by chunk and made again in the backward pass, so the largest tensor of big
vocabularies does not exist, and the entropy of a chunk can be read off at no peak memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from rollart.runtime.trainer.rows import Rows

LOGIT_CHUNK_BYTES = 16 << 20
"""fp32 logits alive at one time. Below the last-level cache of one core's share, and far below what a layer keeps."""
PRUNED_SHARE = 0.5
"""Largest share of a row's tokens that may be trained for the pruned last layer to be used; above it, the causal kernel
over all positions is the faster one."""
PRUNED_MASK_CELLS = 16 << 20
"""Largest boolean mask (rows x trained x tokens) of the pruned last layer; long contexts take the causal kernel."""


class Policy(nn.Module):
    """A transformers model of the Llama family, called for the log-probabilities of given tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.hf = model

    def forward(self, rows: Rows, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` (N,) of `rows.targets` at the sampling temperature, with gradient; and the summed entropy, without."""
        base = self.hf.model
        hidden = base.embed_tokens(rows.ids)
        cos, sin = base.rotary_emb(hidden, position_ids=torch.arange(rows.ids.shape[1], device=hidden.device)[None])
        *layers, last = base.layers
        for layer in layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=(cos, sin))
        if _prunes(rows):
            hidden = _last_layer(last, hidden, cos[0], sin[0], rows.positions)
        else:
            hidden = _take(last(hidden, attention_mask=None, position_embeddings=(cos, sin)), rows.positions)
        trained = base.norm(hidden[rows.valid])
        return token_logprobs(trained, self.hf.lm_head.weight, rows.targets, temperature, with_entropy)

    @property
    def sharded_layers(self) -> list[nn.Module]:
        """Layers that are gathered one at a time. The last one is not among them: its parts are called one by one, and its
        backward pass follows its forward pass so closely that freeing it in between would only cost."""
        return list(self.hf.model.layers)[:-1]


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    chunk_bytes: int = LOGIT_CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of `hidden @ head.T / temperature` at `targets`: (N, H), (V, H), (N,) -> (N,), and the summed entropy."""
    rows = max(1, chunk_bytes // (head.element_size() * len(head)))
    apply = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, head, targets, temperature, with_entropy, rows)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Keeps hidden states and one number per token; logits exist for one chunk at a time, in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, log_norms = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        summed = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in _chunks(len(hidden), chunk_rows):
            logits = (hidden[part] @ head.T).div_(temperature)
            log_norm = logits.logsumexp(1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_norm
            log_norms[part] = log_norm
            if with_entropy:
                summed += _entropy_in_place(logits.sub_(log_norm[:, None]))
        ctx.save_for_backward(hidden, head, targets, log_norms)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.mark_non_differentiable(summed)
        return logprobs, summed

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        hidden, head, targets, log_norms = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        for part in _chunks(len(hidden), ctx.chunk_rows):
            logits = (hidden[part] @ head.T).div_(ctx.temperature)
            scaled = grad[part, None] / ctx.temperature
            # d logprob / d logit is (1 at the target) - probability
            grad_logits = logits.sub_(log_norms[part, None]).exp_().mul_(-scaled)
            grad_logits.scatter_add_(1, targets[part, None], scaled)
            grad_hidden[part] = grad_logits @ head
            grad_head += grad_logits.T @ hidden[part]
        return grad_hidden, grad_head, None, None, None, None


def _entropy_in_place(log_probs: torch.Tensor) -> torch.Tensor:
    """Sum over rows of -sum p log p, with one more tensor of the chunk's size: as many as the log-norm needed before."""
    probs = log_probs.exp()
    return -log_probs.mul_(probs).sum(1).sum(dtype=torch.float64)


def _chunks(n_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, n_rows, chunk_rows)]


def _prunes(rows: Rows) -> bool:
    (n_rows, n_tokens), n_trained = rows.ids.shape, rows.positions.shape[1]
    return n_trained <= PRUNED_SHARE * n_tokens and n_rows * n_trained * n_tokens <= PRUNED_MASK_CELLS


def _take(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(B, T, H) at (B, S) -> (B, S, H)."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[2]))


def _last_layer(
    layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The layer's output at `positions` only: keys and values everywhere, the rest where it is asked for.

    (B, T, H), (T, D), (T, D), (B, S) -> (B, S, H). Only the row's own earlier tokens are attended to.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    keys = _rotate(_heads(attention, "k", normed), cos, sin)
    values = _heads(attention, "v", normed)
    queries = _rotate(
        _heads(attention, "q", _take(normed, positions)), cos[positions][:, None], sin[positions][:, None]
    )
    groups = attention.num_key_value_groups
    attended = functional.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(groups, 1) if groups > 1 else keys,
        values.repeat_interleave(groups, 1) if groups > 1 else values,
        attn_mask=(torch.arange(hidden.shape[1], device=hidden.device) <= positions[..., None])[:, None],
        scale=attention.scaling,
    )
    taken = _take(hidden, positions) + attention.o_proj(attended.transpose(1, 2).flatten(2))
    out: torch.Tensor = taken + layer.mlp(layer.post_attention_layernorm(taken))
    return out


def _heads(attention: Any, which: str, normed: torch.Tensor) -> torch.Tensor:
    """(B, T, H) -> (B, heads, T, D), with Qwen3's norm per head where the family has one."""
    heads = getattr(attention, f"{which}_proj")(normed).unflatten(2, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)
    out: torch.Tensor = (heads if norm is None else norm(heads)).transpose(1, 2)
    return out


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = heads * cos + rotate_half(heads) * sin  # type: ignore[no-untyped-call]
    return out
