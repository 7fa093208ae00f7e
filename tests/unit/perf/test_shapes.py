"""Shapes: counts that are published, counts of the real modules, and closed forms of FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.perf.configs import shape_from, shape_from_config
from rollart.perf.shapes import gpt_shape, known_models, model_shape

PUBLISHED = {
    "Llama-2-7B": (6.74e9, None), "Llama-3.1-8B": (8.03e9, None), "Llama-3.1-70B": (70.6e9, None),
    "Llama-3.1-405B": (405.9e9, None), "Mixtral-8x7B": (46.7e9, 12.9e9), "Qwen2-7B": (7.62e9, None),
    "Qwen3-32B": (32.8e9, None), "Qwen3-30B-A3B": (30.5e9, 3.3e9), "Qwen3-235B-A22B": (235e9, 22e9),
    "DeepSeek-V2-Lite": (15.7e9, 2.4e9), "DeepSeek-V3": (671e9, 37e9), "Kimi-K2": (1.03e12, 32e9),
    "GPT-OSS-20B": (20.9e9, 3.6e9), "GPT-OSS-120B": (116.8e9, 5.1e9), "Llama-4-Scout": (108e9, 17e9),
    "Llama-4-Maverick": (400e9, 17e9), "Gemma-3-27B": (27.0e9, None), "Phi-4": (14.7e9, None), "GPT-J-6B": (6.05e9, None),
    "GPT-3-175B": (175e9, None), "Nemotron-3-Nano": (31.6e9, 3.2e9), "Nemotron-3-Super": (120.6e9, 12e9),
    "GPT 39.1B": (39.1e9, None), "GPT 1008.0B": (1008e9, None), "MPT-30B": (29.97e9, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = model_shape(name)
    assert shape.parameters == pytest.approx(total, rel=0.01)
    if active is not None:
        assert shape.active_parameters == pytest.approx(active, rel=0.09)  # some reports count embeddings, some do not


def test_every_model_of_the_table_is_found_by_its_own_name_and_says_where_it_is_from() -> None:
    for name in known_models():
        shape = model_shape(name)
        assert shape.name == name
        assert shape.source not in ("", "user")
        assert 0 < shape.active_parameters <= shape.parameters + shape.vocab * shape.hidden


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("Llama-3.1-70B-Instruct-FP8", "Llama-3.1-70B"),
        ("llama3-70b", "Llama-3-70B"),
        ("Llama-3 70B [LoRA]", "Llama-3-70B"),
        ("Llama-2-70b-chat-hf", "Llama-2-70B"),
        ("Llama-4-Scout-17B-16E", "Llama-4-Scout"),
        ("Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("DeepSeek-R1-0528", "DeepSeek-V3"),
        ("DeepSeek-V3 671B-A37B", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Llama-3.1-70B"),
        ("Qwen3-235B-A22B (tokendrop)", "Qwen3-235B-A22B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2-7B"),
        ("GPT-OSS 120B", "GPT-OSS-120B"),
        ("GPT 175B", "GPT-3-175B"),
        ("GPT 530B", "GPT 529.6B"),
        ("MPT 7b", "MPT-7B"),
        ("gpt2", "GPT-2"),
    ],
)
def test_a_written_name_finds_its_model(written: str, name: str) -> None:
    assert model_shape(written).name == name


@pytest.mark.parametrize("name", ["ResNet152", "Llama-9-70B", "DeepSeek"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown model .* nearest known"):
        model_shape(name)


def test_flops_are_the_closed_form_of_a_gpt() -> None:
    """arXiv:2104.04473 eq. 3 without recomputation: 72 B L s h^2 (1 + s/6h + V/12hL), a third of it forward."""
    layers, hidden, vocab, seq = 24, 2048, 51200, 1024
    shape = gpt_shape(layers=layers, hidden=hidden, heads=16, vocab=vocab)
    expected = 24 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert shape.flops_per_token(seq) == pytest.approx(expected, rel=1e-12)


def test_the_cache_of_a_token_is_counted_by_layer_head_and_window() -> None:
    assert model_shape("Llama-3.1-8B").kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2
    assert model_shape("DeepSeek-V3").kv_bytes_per_token(1) == 61 * (512 + 64)
    oss = model_shape("GPT-OSS-20B")
    assert oss.kv_bytes(1000, 2) == 12 * (1000 + 128) * 2 * 8 * 64 * 2
    assert oss.attention_flops(1000) == 2 * 64 * 128 * 12 * (1000 + 128)


TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 160},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "decoder_sparse_step": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "intermediate_size": 160, "moe_intermediate_size": 48, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
    },
    "gpt_oss": {
        "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gemma3_text": {"num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 32, "sliding_window": 16},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 32},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 64, "max_position_embeddings": 30},
}  # fmt: skip
POSITIONS = {"gpt2": 32, "opt": 32}
"""Rows of learned positions, which a config does not turn into a shape's matrices."""


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_from_a_config_are_those_of_the_real_modules(kind: str) -> None:
    """Of all matrices that transformers builds on `meta`; norms and biases are left out of a shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(TINY if kind != "gpt2" else {"vocab_size": 256}), **CONFIGS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    biases = ("bias", "correction", "sinks")
    counted = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and not name.endswith(biases))
    shape = shape_from_config(config.to_dict(), name=kind)
    assert shape.parameters + POSITIONS.get(kind, 0) * 64 == counted
    assert shape.gated == (kind not in ("gpt2", "opt"))


def test_configs_of_public_models_give_the_shapes_of_the_table() -> None:
    config: Mapping[str, Any] = {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False, "sliding_window": None,
    }  # fmt: skip
    assert shape_from(config).matrices() == shape_from("Qwen3-235B-A22B").matrices()


def test_windows_are_read_from_layer_types_or_a_pattern() -> None:
    base = {**TINY, "intermediate_size": 160, "sliding_window": 16}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert shape_from_config({**base, "model_type": "gpt_oss", "layer_types": kinds}).windowed_layers == 2
    assert shape_from_config({**base, "model_type": "gemma3_text", "sliding_window_pattern": 4}).windowed_layers == 3
    assert shape_from_config({**base, "model_type": "mistral"}).windowed_layers == 4
    assert shape_from_config({**base, "model_type": "qwen2", "use_sliding_window": False}).windowed_layers == 0


def test_a_config_without_a_size_is_refused_by_the_name_of_the_key() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shape_from_config({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 10})
    with pytest.raises(ConfigError, match="top_k is 9 of 8 experts"):
        shape_from_config(
            {**TINY, "num_local_experts": 8, "num_experts_per_tok": 9, "intermediate_size": 64, "model_type": "mixtral"}
        )
