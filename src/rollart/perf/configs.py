"""A model's shape from its transformers config, as a mapping (the parsed `config.json`).

Owns: the spellings of the same size in the configs of different model families. Invariant: a config without the sizes that
a shape needs is refused by the name of the missing key, never completed by a guess. Why: users have a `config.json`, not a
shape, and every family names its experts differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.core.errors import ConfigError
from rollart.perf.shapes import ModelShape, model_shape

PLAIN_FFN = frozenset({
    "gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "nemotron",
    "nemotron_h", "stablelm_alpha", "codegen", "xglm",
})  # fmt: skip
"""Families whose feed-forward block has two matrices; all others are gated."""
TIED_BY_DEFAULT = frozenset(
    {"gpt2", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere"}
)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _need(config: Mapping[str, Any], *keys: str) -> int:
    value = _first(config, *keys)
    if value is None:
        raise ConfigError(
            f"config of a {config.get('model_type', 'model')!r} has none of {', '.join(keys)}; give one of them"
        )
    return int(value)


def _count(config: Mapping[str, Any], *keys: str) -> int:
    return int(_first(config, *keys) or 0)


def shape_from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a transformers config describes; the text part of a multimodal one.

    Raises `ConfigError` naming the key that is missing.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) and "hidden_size" in text else config
    kind = str(inner.get("model_type", ""))
    hidden = _need(inner, "hidden_size", "n_embd", "d_model")
    layers = _need(inner, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _need(inner, "num_attention_heads", "n_head", "n_heads")
    fields: dict[str, Any] = {
        "name": name or str(_first(config, "_name_or_path") or kind or "model"),
        "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": _kv_heads(inner, heads), "head_dim": _count(inner, "head_dim"),
        "vocab": _need(inner, "vocab_size"), "gated": kind not in PLAIN_FFN,
        "tied": bool(_first(config, "tie_word_embeddings")
                     if "tie_word_embeddings" in config else inner.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        "ffn": _count(inner, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), "source": "transformers config",
    }  # fmt: skip
    if not fields["ffn"]:
        fields["ffn"] = 4 * hidden
    fields |= _latent_attention(inner) | _experts(inner, kind, layers) | _windows(inner, layers) | _hybrid(inner)
    return ModelShape(**fields)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query"):
        return _count(config, "num_kv_heads", "n_head_kv") if config.get("new_decoder_architecture") else 1
    return _count(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _latent_attention(config: Mapping[str, Any]) -> dict[str, int]:
    if not config.get("kv_lora_rank"):
        return {}
    return {
        "q_rank": _count(config, "q_lora_rank"), "kv_rank": _need(config, "kv_lora_rank"),
        "head_dim": _need(config, "qk_nope_head_dim"), "rope_dim": _need(config, "qk_rope_head_dim"),
        "v_dim": _need(config, "v_head_dim"),
    }  # fmt: skip


def _experts(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, int]:
    experts = _count(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts <= 1:
        return {}
    found = {
        "experts": experts,
        "top_k": _need(config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"),
        "moe_ffn": _need(config, "moe_intermediate_size", "intermediate_size"),
        "shared_experts": _count(config, "n_shared_experts", "num_shared_experts"),
        "moe_latent": _count(config, "moe_latent_size"),
    }
    shared = _count(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if shared:
        found |= {"shared_experts": 1, "shared_ffn": shared}
    dense = _count(config, "first_k_dense_replace")
    step = _count(config, "decoder_sparse_step", "moe_layer_freq") or 1
    if isinstance(config.get("mlp_only_layers"), Sequence):
        dense = max(dense, len(config["mlp_only_layers"]))
    if kind.startswith("llama4"):
        every = _count(config, "interleave_moe_layer_step") or 1
        found |= {"shared_experts": 1, "shared_ffn": _need(config, "intermediate_size"),
                  "moe_ffn": _need(config, "intermediate_size"), "ffn": _count(config, "intermediate_size_mlp")}  # fmt: skip
        dense = layers - layers // every
    elif step > 1:
        dense = max(dense, layers - layers // step)
    return found | {"dense_layers": dense}


def _windows(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    window = _count(config, "sliding_window", "attention_chunk_size")
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        seen = sum(1 for kind in kinds if kind in ("sliding_attention", "chunked_attention"))
        return {"window": window, "windowed_layers": seen} if window and seen else {}
    if not window or config.get("use_sliding_window") is False:
        return {}
    pattern = _count(config, "sliding_window_pattern")
    if pattern:
        return {"window": window, "windowed_layers": layers - layers // pattern}
    return {"window": window, "windowed_layers": layers}


def _hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    pattern = _first(config, "hybrid_override_pattern", "hybrid_layer_pattern")
    if not isinstance(pattern, str):
        return {}
    return {
        "attention_layers": pattern.count("*"), "dense_layers": pattern.count("-"), "moe_layers": pattern.count("E"),
        "mamba_layers": pattern.count("M"), "mamba_heads": _need(config, "mamba_num_heads"),
        "mamba_head_dim": _need(config, "mamba_head_dim"), "mamba_state": _need(config, "ssm_state_size", "mamba_state_dim"),
        "mamba_groups": _need(config, "n_groups", "mamba_num_groups"),
    }  # fmt: skip


def shape_from(source: str | Mapping[str, Any]) -> ModelShape:
    """The shape of a public model by its name, or of a transformers config."""
    return model_shape(source) if isinstance(source, str) else shape_from_config(source)
