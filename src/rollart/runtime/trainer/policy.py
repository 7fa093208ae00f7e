"""The policy as the trainer sees it: log-probabilities of the trained tokens, and nothing else that would cost.

Owns the forward pass. Invariant: it computes what `transformers` computes for the same ids, to rounding. What no trained
token depends on is left out: padding, prompts that were computed for another row already, logits of positions that predict
no trained token, and in the last layer, where few tokens are trained, everything but keys and values of the others
(`packing`). The layers' arithmetic is in `blocks`; of the transformers model itself only parameters and rotations are used.
Models that `blocks` do not compute go through their own definition (`general`), which leaves nothing out.
The logits are never kept: they are made chunk by chunk and made again in the backward pass, so the largest tensor of big
vocabularies does not exist, and the entropy of a chunk can be read off at no peak memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollart.core.errors import TrainerError
from rollart.runtime.compiled import Wanted
from rollart.runtime.models import beyond_blocks
from rollart.runtime.trainer import general
from rollart.runtime.trainer.blocks import Block, norm, turns_of
from rollart.runtime.trainer.kernels import Kernels, kernels_for
from rollart.runtime.trainer.packing import pack
from rollart.runtime.trainer.rows import Rows

LOGIT_CHUNK_BYTES = 16 << 20
"""fp32 logits alive at one time. Below the last-level cache of one core's share, and far below what a layer keeps."""


class Policy(nn.Module):
    """A causal language model of transformers, called for the log-probabilities of given tokens."""

    def __init__(self, model: PreTrainedModel, native: Wanted = "auto") -> None:
        """`native`: whether layers are computed by the kernels of `kernels`. Raises TrainerError where they are required and
        cannot be had, and for a model whose definition is no causal one."""
        super().__init__()
        weight = next(model.parameters())
        beyond = beyond_blocks(model.config)
        self.found = general.no_kernels(beyond) if beyond else kernels_for(weight.dtype, weight.device, native)
        if native == "required" and self.found.kernel is None:
            raise TrainerError(f"trainer.native=required, but {self.found.why}; mend that, or use trainer.native=auto")
        self.hf = model
        layers = [] if beyond else model.model.layers
        self.blocks = nn.ModuleList(Block(layer, self.found.kernel) for layer in layers)
        """None where the model goes through its definition."""
        if beyond:
            general.check_causal(model)
        self.computed_tokens = 0
        """Of the last pass."""

    def forward(self, rows: Rows, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` (N,) of `rows.targets` at the sampling temperature, with gradient; and the summed entropy, without."""
        if not len(self.blocks):
            self.computed_tokens = rows.ids.numel()
            return general.logprobs(self.hf, rows, temperature, with_entropy)
        base = self.hf.model
        weight = base.embed_tokens.weight
        by_kernels = self.found.kernel is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"
        packed = pack(rows, by_runs=by_kernels)
        self.computed_tokens = len(packed.ids)
        hidden = base.embed_tokens(packed.ids)
        turns = turns_of(base.rotary_emb, hidden, packed)
        *blocks, last = self.blocks
        for block in blocks:
            hidden = block(hidden, turns, packed.whole)
        hidden = norm(base.norm, last(hidden, turns, packed.last))
        trained = functional.embedding(packed.trained, hidden)
        kernels = self.found.kernel if by_kernels else None
        return token_logprobs(trained, self.hf.lm_head.weight, rows.targets, temperature, with_entropy, kernels=kernels)

    @property
    def sharded_layers(self) -> list[nn.Module]:
        """Layers that are gathered one at a time. The last one is not among them: its backward pass follows its forward pass
        so closely that freeing it in between would only cost."""
        return list(self.blocks)[:-1]


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    chunk_bytes: int = LOGIT_CHUNK_BYTES,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of `hidden @ head.T / temperature` at `targets`: (N, H), (V, H), (N,) -> (N,), and the summed entropy."""
    rows = max(1, chunk_bytes // (head.element_size() * len(head)))
    apply = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, head, targets, temperature, with_entropy, rows, kernels)  # type: ignore[no-untyped-call]
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
        kernels: Kernels | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, log_norms = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        summed = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in _chunks(len(hidden), chunk_rows):
            logits = hidden[part] @ head.T
            if kernels is not None:
                logprobs[part], log_norms[part], entropy = kernels.target(logits, targets[part], temperature)
                summed += entropy if with_entropy else 0.0
                continue
            logits.div_(temperature)
            log_norm = logits.logsumexp(1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_norm
            log_norms[part] = log_norm
            if with_entropy:
                summed += _entropy_in_place(logits.sub_(log_norm[:, None]))
        ctx.save_for_backward(hidden, head, targets, log_norms)
        ctx.temperature, ctx.chunk_rows, ctx.kernels = temperature, chunk_rows, kernels
        ctx.mark_non_differentiable(summed)
        return logprobs, summed

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None, None]:
        hidden, head, targets, log_norms = ctx.saved_tensors
        for_hidden, for_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_head = torch.zeros_like(head) if for_head else None
        for part in _chunks(len(hidden), ctx.chunk_rows):
            grad_logits = hidden[part] @ head.T
            if ctx.kernels is not None:
                ctx.kernels.target_back(grad_logits, targets[part], log_norms[part], ctx.temperature, grad[part])
            else:
                scaled = grad[part, None] / ctx.temperature
                # d logprob / d logit is (1 at the target) - probability
                grad_logits.div_(ctx.temperature).sub_(log_norms[part, None]).exp_().mul_(-scaled)
                grad_logits.scatter_add_(1, targets[part, None], scaled)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.T @ hidden[part]
        return grad_hidden, grad_head, None, None, None, None, None


def _entropy_in_place(log_probs: torch.Tensor) -> torch.Tensor:
    """Sum over rows of -sum p log p, with one more tensor of the chunk's size: as many as the log-norm needed before."""
    probs = log_probs.exp()
    return -log_probs.mul_(probs).sum(1).sum(dtype=torch.float64)


def _chunks(n_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, n_rows, chunk_rows)]
