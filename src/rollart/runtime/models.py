"""Models: from configuration to a transformers model, the same in the trainer and in the engines.

Owns which models are taken (new ones of the families Llama, Qwen2 and Qwen3; from a folder any causal language model of
transformers), which of them the trainer's own layers compute, and initial weights. Invariant: equal configuration and seed
give bitwise equal weights in every process, so that a trainer and an engine that start alone agree.
Weights are fp32; names are those of the Hugging Face `state_dict`, tied embeddings once.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollart.config.schema import PretrainedModel as PretrainedSpec
from rollart.config.schema import ScratchModel
from rollart.core.errors import ConfigError
from rollart.runtime.definition import attention_of
from rollart.runtime.pretrained import checked_folder, local_folder

FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
INIT_STD = 0.02
"""Least deviation of initial weights, as these families have it. Below a width of 2500 it is 1 / sqrt(width): with a fixed
0.02 a 64-wide model learned the largest of three digits to 0.19, 0.28 and 0.33 held back in 100 steps (three seeds), with
1 / 8 to 0.94, 0.91 and 0.51."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotations that depend on a token's place alone. Others depend on how long the longest sequence of a pass is, so what a token
is given would change with the company it is trained in."""


def hf_config(model: ScratchModel | PretrainedSpec, vocab_size: int) -> PretrainedConfig:
    """The transformers configuration of a model for a tokenizer of `vocab_size` ids.

    Raises ConfigError for a folder without a readable model, a family that is no causal language model of transformers, a
    vocabulary that is too small, and what would make a token's log-probability depend on its company.
    """
    if isinstance(model, ScratchModel):
        return FAMILIES[model.family](
            vocab_size=vocab_size,
            hidden_size=model.hidden,
            intermediate_size=model.ffn,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.hidden // model.heads,
            max_position_embeddings=model.max_positions,
            tie_word_embeddings=model.tie_embeddings,
            initializer_range=max(INIT_STD, model.hidden**-0.5),
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    return _from_folder(model.path, vocab_size)


def build_model(config: PretrainedConfig, *, seed: int, weights: str | None = None) -> PreTrainedModel:
    """A causal language model in fp32 with `attention_of` and without dropout: the policy that is trained is the one
    that sampled.

    `weights`: the local folder to read them from; None: drawn from `seed`, without touching torch's global generator.
    Raises ConfigError for a model that its definition cannot make.
    """
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention_of(config)}
    try:
        if weights is not None:
            model = AutoModelForCausalLM.from_pretrained(weights, config=config, local_files_only=True, **how)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, **how)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"a model of the family {config.model_type!r} cannot be made: {error}") from error
    made: PreTrainedModel = model
    made.train(mode=False)
    return made


def weights_folder(model: ScratchModel | PretrainedSpec) -> str | None:
    """Where `build_model` reads weights from; None for a new model."""
    return str(checked_folder(model.path)) if isinstance(model, PretrainedSpec) else None


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Live parameters by their `state_dict` name, tied ones once under the name of the input embedding."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _from_folder(path: str, vocab_size: int) -> PretrainedConfig:
    folder = local_folder(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path={path}: no config.json there; give a local folder in the Hugging Face layout")
    family = str(json.loads((folder / "config.json").read_text()).get("model_type"))
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1) or sorted(FAMILIES)
        raise ConfigError(
            f"model.path={path}: family {family!r} is no causal language model of transformers; use for instance {near[0]!r}"
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if not isinstance(ids := getattr(config, "vocab_size", None), int):
        raise ConfigError(f"model.path={path}: its config.json says no vocab_size; use a model of text alone")
    if ids < vocab_size:
        raise ConfigError(
            f"model.path={path}: the model has {ids} token ids, the tokenizer {vocab_size}; they do not belong together"
        )
    _refuse_unknown(path, config)
    return config


def beyond_blocks(config: PretrainedConfig) -> str:
    """What of a model `trainer.blocks` would compute otherwise than the family's own definition; empty: nothing.

    Biases (`attention_bias`, `mlp_bias`) are read where they are; `attention_dropout` is of a training mode that no policy
    is ever in; `pretraining_tp` says how products were cut, not what they are.
    """
    if config.model_type not in FAMILIES:
        return f"model_type={config.model_type}"
    rope = getattr(config, "rope_parameters", None) or {}
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    found = {
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"partial_rotary_factor={rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"layer_types={', '.join(layers)}": bool(layers),
    }
    return ", ".join(name for name, present in found.items() if present)


def _refuse_unknown(path: str, config: PretrainedConfig) -> None:
    """Raise ConfigError for what neither the trainer's layers nor a forward pass by the definition would get right."""
    rope = getattr(config, "rope_parameters", None) or {}
    # one rotation, or one for each kind of layer
    kinds = {one.get("rope_type", "default") for one in [rope, *rope.values()] if isinstance(one, dict)}
    unknown = sorted(kinds - set(ROPE_TYPES))
    rules = (
        ("rope_type", ", ".join(unknown), not unknown, ", ".join(ROPE_TYPES)),
        ("quantization_config", "set", getattr(config, "quantization_config", None) is None, "plain weights, without it"),
    )  # fmt: skip
    for name, value, known, supported in rules:
        if not known:
            raise ConfigError(
                f"model.path={path}: {name}={value} in its config.json is not supported, since the trainer would train another "
                f"model; use a model with {supported}"
            )
