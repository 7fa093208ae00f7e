"""Models from configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.core.errors import ConfigError
from rollart.runtime.models import build_model, hf_config, named_weights, weights_folder

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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"family 'gpt2' is not supported; use one of \['llama', 'qwen2', 'qwen3'\]"):
        hf_config(spec, 8)
    hf_config(SMALL, 31).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the model has 31 token ids, the tokenizer 32"):
        hf_config(spec, 32)
    Qwen2Config(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ConfigError, match="sliding-window attention is not supported"):
        hf_config(spec, 31)
