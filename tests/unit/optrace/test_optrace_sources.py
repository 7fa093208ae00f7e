"""What a user's word means: public models, configs, numbers, modules; and which layers are built."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.optrace.sources import built_config, family_config, layer_kinds, resolve
from rollart.perf.configs import shape_from_config
from rollart.perf.shapes import ModelShape, known_models, model_shape


@pytest.mark.parametrize(
    ("word", "family"),
    [
        ("llama3-70b", "llama"),
        ("Qwen/Qwen2.5-14B", "qwen2"),
        ("qwen3-8b", "qwen3"),
        ("Qwen3-30B-A3B", "qwen3_moe"),
        ("mixtral-8x7b", "mixtral"),
        ("deepseek-v3", "deepseek_v3"),
        ("gpt-3-175b", "gpt2"),
        ("gpt:layers=4,hidden=64,heads=4,vocab=100", "gpt2"),
    ],
)
def test_families(word: str, family: str) -> None:
    source = resolve(word)
    assert source.config is not None
    assert source.config["model_type"] == family
    assert source.kind == "causal_lm"


def test_every_known_model_is_either_taken_with_its_sizes_or_refused_by_name() -> None:
    taken = 0
    for name in known_models():
        shape = model_shape(name)
        if shape.mamba_layers or shape.moe_latent or (not shape.gated and shape.kv_heads != shape.heads):
            with pytest.raises(ConfigError, match=re.escape(shape.name)):
                family_config(shape)
            continue
        config, _ = family_config(shape)
        taken += 1
        again = shape_from_config(config, shape.name)
        assert again.layers == shape.layers
        assert again.active_parameters == pytest.approx(shape.active_parameters, rel=0.01), name
        positions = shape.positions * shape.hidden  # which a config names, and the shape of a config leaves out
        assert again.parameters == pytest.approx(shape.parameters - positions, rel=0.01), name
    assert taken >= 0.85 * len(known_models())


def test_numbers_and_options() -> None:
    source = resolve("gpt:layers=96,hidden=12288,heads=96,vocab=51200,positions=2048")
    assert source.shape is not None
    assert (source.shape.layers, source.shape.positions, source.shape.ffn) == (96, 2048, 4 * 12288)
    assert resolve("tiny", gpt={"layers": 2, "hidden": 8, "heads": 2, "vocab": 9}).name == "tiny"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("gpt:layers=4,hidden=64,heads=4", "vocab not given"),
        ("gpt:layers=4,hidden=64,heads=4,vocab=x", "'vocab=x'"),
        ("gpt:layers=4,hidden=66,heads=4,vocab=9", "the nearest is 64"),
        ("gpt:layers=4,hidden=64,heads=4,vocab=9,ears=2", "unknown ears"),
        ("llama9-70b", "llama9-70b"),
        ("a b:c", "module:function"),
        ("nowhere/config.json", "cannot read"),
    ],
)
def test_bad_words_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + said.replace("'", ".")):
        resolve(word)


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 100}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert resolve(str(path)).config == resolve(str(tmp_path)).config == config
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no model_type"):
        resolve(str(path))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="no JSON"):
        resolve(str(path))


def test_a_module_is_named_not_imported() -> None:
    source = resolve("no.such.module:build")
    assert (source.kind, source.target, source.shape) == ("module", "no.such.module:build", None)
    with pytest.raises(ConfigError, match="max_layers is -1"):
        resolve("llama3-8b", max_layers=-1)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 12), dense=st.integers(0, 12), step=st.integers(1, 3), built=st.integers(0, 4),
    windowed=st.lists(st.booleans(), min_size=12, max_size=12),
)  # fmt: skip
def test_built_layers_are_of_every_kind(layers: int, dense: int, step: int, built: int, windowed: list[bool]) -> None:
    config = {
        "num_hidden_layers": layers, "num_experts": 8, "mlp_only_layers": list(range(min(dense, layers))),
        "decoder_sparse_step": step,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed[:layers]],
    }  # fmt: skip
    kinds = layer_kinds(config, layers)
    changed, chosen = built_config(config, layers, built)
    assert changed["num_hidden_layers"] == len(chosen)
    assert layer_kinds(changed, len(chosen)) == tuple(kinds[i] for i in chosen)
    wanted = layers if not built else sum(min(built, kinds.count(kind)) for kind in set(kinds))
    assert len(chosen) == wanted


def test_windows_keep_their_layers() -> None:
    config, notes = family_config(model_shape("Gemma-2-9B"))
    kinds = layer_kinds(config, 42)
    assert kinds.count("windowed dense") == model_shape("Gemma-2-9B").windowed_layers
    assert any("windowed" in note for note in notes)


def test_a_plain_block_with_few_key_heads_is_refused() -> None:
    shape = ModelShape(name="odd", layers=2, hidden=64, heads=4, kv_heads=1, ffn=256, vocab=10, gated=False)
    with pytest.raises(ConfigError, match="odd has feed-forward blocks of two matrices, 1 key heads for 4"):
        family_config(shape)
