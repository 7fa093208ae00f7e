"""Models from configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.core.errors import ConfigError
from rollart.runtime.definition import attention_of
from rollart.runtime.models import build_model, hf_config, named_weights, weights_folder
from rollart.runtime.trainer.policy import Policy
from rollart.runtime.trainer.rows import Row, pad

SMALL = ScratchModel(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24)


def family_of(family: Any, **changes: object) -> ScratchModel:
    return SMALL.model_copy(update={"family": family, **changes})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equal_configuration_and_seed_give_bitwise_equal_weights_and_leave_the_generator_alone(family: str) -> None:
    config = hf_config(family_of(family), 31)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = named_weights(build_model(config, seed=3))
    assert torch.equal(torch.rand(3), expected)
    torch.rand(100)
    same, other = (named_weights(build_model(config, seed=seed)) for seed in (3, 4))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_state_dict_with_tied_embeddings_once(family: str, tied: bool) -> None:
    model = build_model(hf_config(family_of(family, tie_embeddings=tied), 31), seed=0)
    weights = named_weights(model)
    assert set(model.state_dict()) - set(weights) == ({"lm_head.weight"} if tied else set())
    assert weights["model.embed_tokens.weight"].shape == (31, 16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert ("model.layers.0.self_attn.q_proj.bias" in weights) is (family == "qwen2")
    assert ("model.layers.0.self_attn.q_norm.weight" in weights) is (family == "qwen3")
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_a_pretrained_model_comes_from_its_folder(tmp_path: Path) -> None:
    original = build_model(hf_config(family_of("qwen3"), 31), seed=5)
    original.save_pretrained(tmp_path)
    spec = PretrainedModel(kind="pretrained", path=str(tmp_path))
    loaded = build_model(hf_config(spec, 29), seed=0, weights=weights_folder(spec))
    expected = named_weights(original)
    found = named_weights(loaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert weights_folder(SMALL) is None


def test_folders_that_cannot_be_trained_are_refused_with_the_reason(tmp_path: Path) -> None:
    spec = PretrainedModel(kind="pretrained", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no config.json there"):
        hf_config(spec, 8)
    for family, near in (("gpt_neo_x", "gpt_neox"), ("t5", "llama"), (None, "llama")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(ConfigError, match=f"'{family}' is no causal language model .*; use for instance '{near}'"):
            hf_config(spec, 8)
    hf_config(SMALL, 31).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the model has 31 token ids, the tokenizer 32"):
        hf_config(spec, 32)


SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **more}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            LlamaConfig(**SIZES, rope_parameters=rope("dynamic")),
            "rope_type=dynamic .*; use a model with default, linear, llama3, yarn",
        ),
        (
            Gemma3TextConfig(
                **SIZES, rope_parameters={"full_attention": rope("dynamic"), "sliding_attention": rope("default")}
            ),
            "rope_type=dynamic .*; use a model with default, linear, llama3, yarn",
        ),
    ],
)
def test_what_the_trainer_would_compute_otherwise_is_refused_when_the_model_is_read(
    config: PretrainedConfig, told: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    spec = PretrainedModel(kind="pretrained", path=str(tmp_path))
    with pytest.raises(ConfigError, match=f"{told}$"):
        hf_config(spec, 31)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ConfigError, match=r"quantization_config=set .*; use a model with plain weights"):
        hf_config(PretrainedModel(kind="pretrained", path=str(tmp_path)), 31)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
        LlamaConfig(**SIZES, rope_parameters=rope("linear"), pretraining_tp=2, attention_dropout=0.5),
        LlamaConfig(
            **SIZES,
            rope_parameters=rope(
                "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        ),
        LlamaConfig(**SIZES, rope_parameters=rope("yarn", original_max_position_embeddings=16)),
        Qwen3Config(**SIZES, head_dim=8, attention_bias=True),
        Qwen3Config(**SIZES, hidden_act="relu"),
        Qwen2Config(**SIZES, **SLIDING),
        GPTNeoXConfig(**SIZES),
    ],
    ids=[
        "biases",
        "linear",
        "llama3",
        "yarn",
        "qwen3 biases",
        "another activation",
        "sliding layers",
        "another family",
    ],
)
def test_what_is_not_refused_is_trained_as_its_definition_says(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    model = build_model(hf_config(PretrainedModel(kind="pretrained", path=str(tmp_path)), 31), seed=0)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # new ones are 0
                weight.normal_(generator=draws)
    rng = np.random.default_rng(0)
    ids, positions = rng.integers(0, 31, 40), np.arange(20, 39)
    row = Row(ids=ids[:-1], positions=positions - 1, targets=ids[positions], behaviour=np.zeros(19, np.float32))
    found, _ = Policy(model)(pad([row]), 1.0, False)
    table = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
    expected = table[positions - 1, ids[positions]]
    assert torch.allclose(found, expected, atol=1e-5)
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()) + 1e-7)


def test_scores_that_are_capped_or_without_sdpa_are_computed_by_the_plain_attention() -> None:
    made = [
        LlamaConfig(**SIZES),
        Gemma2Config(**SIZES),
        Gemma2Config(**SIZES, attn_logit_softcapping=None),
        GPTJConfig(),
    ]
    assert [attention_of(config) for config in made] == ["sdpa", "eager", "sdpa", "eager"]
