"""Which models the engine can run, and their sizes, read from a transformers configuration.

Owns the list of supported families. Invariant: a configuration that `shape_of` accepts is computed exactly as transformers
computes it; every option that would change the mathematics and is not implemented is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rollart.core.errors import EngineError

FAMILIES = ("llama", "qwen2", "qwen3")


class Sizes(Protocol):
    """What the cache and the engine need to know of a model. Sizes are in elements, `max_positions` in tokens."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of a decoder of the Llama family. Sizes are in elements, `max_positions` in tokens."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float
    rms_eps: float
    tied: bool
    """The output matrix is the embedding."""
    qkv_bias: bool
    """Qwen2."""
    qk_norm: bool
    """Qwen3: RMSNorm over each head of queries and keys, before the rotation."""


def shape_of(config: Any) -> ModelShape:
    """The shape of a transformers `PretrainedConfig`. Raises EngineError for what the engine would compute wrongly."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise EngineError(f"model_type={family!r} is not supported by this engine; supported are {', '.join(FAMILIES)}")
    _refuse_unsupported(config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise EngineError(
            f"{heads} heads over {kv_heads} key/value heads of {head_dim}: heads must be a multiple, the size even"
        )
    return ModelShape(
        family=family,
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rope_theta=float(_rope(config)["rope_theta"]),
        rms_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _refuse_unsupported(config: Any) -> None:
    rope = _rope(config)
    layer_types = set(getattr(config, "layer_types", None) or ())
    refused = {
        f"rope_type={rope.get('rope_type')!r} (supported: 'default')": rope.get("rope_type", "default") != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "no rope_theta": "rope_theta" not in rope,
        f"hidden_act={config.hidden_act!r} (supported: 'silu')": config.hidden_act != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        f"layer_types {sorted(layer_types)} (supported: 'full_attention')": bool(layer_types - {"full_attention"}),
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise EngineError(f"{config.model_type} model with {'; '.join(found)}: not supported by this engine")
