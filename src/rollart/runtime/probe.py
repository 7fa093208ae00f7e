"""Whether an engine that lays its weights out anew computes with the weights that it was given.

Such an engine has no tensors to compare bit by bit. So a version's fingerprint has, beside the digest of the bytes handed over,
the log-probabilities of fixed prompts under the trainer's forward pass; the engine scores the same prompts after every apply.
Invariant: the prompts follow from the vocabulary alone, so both sides have the same ones. What this has found: vLLM on a CPU,
given a model with tied embeddings, goes on with the output embedding that it started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rollart.core.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

PROMPTS = 4
PROMPT_TOKENS = 24
"""Long enough that every layer's attention has something to attend to; 92 figures a version in all."""
MISMATCH: Mapping[Literal["fp32", "bf16"], float] = {"fp32": 2e-4, "bf16": 0.15}
"""Largest mean |difference| of a log-probability between vLLM and the trainer that is rounding. Measured by
`benchmarks/vllm_mismatch.py`: mean 1.1e-6 for 1.1 M parameters in fp32 and 0.014 in bf16; the rest is room for larger models.
In fp32 any one weight tensor scaled by 1.1 goes beyond it; in bf16 only coarser errors do, the bytes' digest finds the rest."""


def prompts(vocab_size: int) -> NDArray[np.int64]:
    """Token ids, shape (PROMPTS, PROMPT_TOKENS)."""
    drawn = np.random.default_rng(seed_of(0, "probe", vocab_size))
    return drawn.integers(0, vocab_size, (PROMPTS, PROMPT_TOKENS))


def model_scores(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    """What a model with these tensors, by their `state_dict` names, scores under its definition in transformers."""
    import torch

    from rollart.runtime.models import build_model

    model = build_model(config, seed=0)
    model.load_state_dict(dict(tensors), strict=False)
    asked = torch.from_numpy(prompts(config.vocab_size))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(asked).logits[:, :-1].double(), -1)
    return tuple(logprobs.gather(2, asked[:, 1:, None]).flatten().tolist())
