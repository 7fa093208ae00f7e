"""How a model's definition in transformers is called: the same in the trainer and in the engines.

Owns the choice of the attention. It imports nothing of rollart, so that an engine's core can do without the configuration.
"""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig


def attention_of(config: PretrainedConfig) -> str:
    """The attention of transformers that computes the model as it is defined: sdpa, but not where the family has none, or
    where scores are capped, which sdpa leaves out."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(family, "_supports_sdpa", True) and not capped else "eager"
