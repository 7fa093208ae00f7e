"""What is to be captured: a public model, a transformers config, a GPT by its numbers, or a user's own module.

Owns the way from the user's word to a transformers config of the matching family. Invariant: a source holds no tensor and
imports neither torch nor transformers; a model whose blocks no family here has is refused by name, and every size or habit
that the family does not share with the model is a note. Why: a prediction for the wrong architecture looks like any other,
and only here is it known what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rollart.core.errors import ConfigError
from rollart.perf.configs import shape_from_config
from rollart.perf.shapes import ModelShape, gpt_shape, model_shape

BUILT_LAYERS = 2
"""Layers of each kind that are really built: the first may differ from those that follow, which are alike."""
GPT_NUMBERS = ("layers", "hidden", "heads", "vocab")
GPT_OPTIONS = ("ffn", "kv_heads", "positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model to capture. `config` is a transformers config as a mapping; `target` a user's `module:function`."""

    name: str
    kind: Literal["causal_lm", "module"]
    shape: ModelShape | None = None
    """None for a user's module, whose sizes only its trace knows."""
    config: Mapping[str, Any] | None = None
    target: str = ""
    built_layers: int = BUILT_LAYERS
    """Layers of each kind that are built, the others stand for them; 0 builds all."""
    own_dtype: bool = False
    """A user's module stays in the dtype that it was built in, and the plan takes that; else it is cast to the plan's."""
    notes: tuple[str, ...] = ()


def resolve(
    name_or_module: str, *, gpt: Mapping[str, int] | None = None, max_layers: int | None = None, captured: bool = True
) -> Source:
    """The source that the user's word means.

    `llama3-70b` and its like: a public model; a path of a transformers `config.json`, or its folder;
    `gpt:layers=96,hidden=12288,heads=96,vocab=51200` (or the numbers in `gpt`); `module:function`: a function without
    arguments that returns an `nn.Module`, or a pair of it and its inputs. `max_layers`: how many layers of each kind are
    really built, 0 for all; `captured`: the model will be built, so a family must have its blocks. Raises `ConfigError`.
    """
    built = BUILT_LAYERS if max_layers is None else max_layers
    if built < 0:
        raise ConfigError(f"max_layers is {max_layers}; give 0 for all layers, or 1 or more of each kind")
    return replace(_resolved(name_or_module.strip(), gpt, captured), built_layers=built)


def _resolved(word: str, gpt: Mapping[str, int] | None, captured: bool) -> Source:
    if gpt is not None or word.lower().startswith("gpt:"):
        numbers = dict(gpt) if gpt is not None else _numbers(word)
        return _from_shape(_gpt(numbers, "" if word.lower().startswith("gpt:") else word), captured)
    path = Path(word)
    if word.endswith(".json") or (path / "config.json").is_file():
        return _from_file(path if word.endswith(".json") else path / "config.json")
    module, colon, function = word.partition(":")
    if colon:
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ConfigError(f"{word!r} is no module:function; give for instance my_package.my_module:build_model")
        return Source(name=word, kind="module", target=word)
    return _from_shape(model_shape(word), captured)


def _numbers(word: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in word.split(":", 1)[1].replace(" ", "").split(","):
        key, _, value = item.partition("=")
        if not value.isdigit():
            raise ConfigError(f"{item!r} in {word!r} is no key=number; give {_gpt_example()}")
        found[key] = int(value)
    return found


def _gpt_example() -> str:
    return "gpt:layers=96,hidden=12288,heads=96,vocab=51200 (and " + ", ".join(GPT_OPTIONS) + " if they differ)"


def _gpt(numbers: Mapping[str, int], name: str) -> ModelShape:
    unknown = sorted(set(numbers) - {*GPT_NUMBERS, *GPT_OPTIONS})
    missing = [key for key in GPT_NUMBERS if numbers.get(key, 0) <= 0]
    if unknown or missing:
        wrong = f"unknown {', '.join(unknown)}" if unknown else f"{', '.join(missing)} not given or not above 0"
        raise ConfigError(f"a GPT by its numbers: {wrong}; give {_gpt_example()}")
    if numbers["hidden"] % numbers["heads"]:
        nearest = max(1, round(numbers["hidden"] / numbers["heads"])) * numbers["heads"]
        raise ConfigError(
            f"hidden {numbers['hidden']} is no multiple of heads {numbers['heads']}; the nearest is {nearest}"
        )
    base = gpt_shape(
        name=name, ffn=numbers.get("ffn", 0), layers=numbers["layers"], hidden=numbers["hidden"], heads=numbers["heads"],
        vocab=numbers["vocab"],
    )  # fmt: skip
    return replace(base, kv_heads=numbers.get("kv_heads", base.heads), positions=numbers.get("positions", 0))


def _from_file(path: Path) -> Source:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(
            f"cannot read the config {path}: {problem.strerror}; give a transformers config.json"
        ) from problem
    except ValueError as problem:
        raise ConfigError(f"{path} is no JSON ({problem}); give a transformers config.json") from problem
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{path} has no model_type; give a transformers config.json")
    shape = shape_from_config(config, path.parent.name or path.stem)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) and "hidden_size" in inner else config
    notes = () if text is config else (f"of the {config['model_type']} only the text part is captured",)
    return Source(name=shape.name, kind="causal_lm", shape=shape, config=text, notes=notes)


def _from_shape(shape: ModelShape, captured: bool) -> Source:
    if not captured:
        return Source(name=shape.name, kind="causal_lm", shape=shape)
    config, notes = family_config(shape)
    taken = f"{shape.name}: taken as a transformers {config['model_type']} model of its sizes"
    return Source(name=shape.name, kind="causal_lm", shape=shape, config=config, notes=(taken, *notes))


def family_config(shape: ModelShape) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The transformers config of the family whose blocks a shape has, and what of the model it does not have.

    Raises `ConfigError` for blocks that no family here has: state-space layers, experts in a latent space, feed-forward
    blocks of two matrices with fewer key heads.
    """
    if shape.mamba_layers or shape.moe_latent or shape.attention_layers != shape.layers:
        what = "state-space layers" if shape.mamba_layers else "experts in a latent space or layers of one block alone"
        raise ConfigError(
            f"{shape.name} has {what}, which no family here has; give the path of its config.json, or --no-capture"
        )
    base: dict[str, Any] = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "tie_word_embeddings": shape.tied,
        "head_dim": shape.head_dim, "intermediate_size": shape.ffn,
    }  # fmt: skip
    notes: tuple[str, ...] = ()
    if not shape.gated:
        found, notes = _plain(shape)
    elif shape.kv_rank:
        found = _latent(shape, base)
    elif shape.experts:
        found, notes = _experts(shape, base)
    else:
        found, notes = _dense(shape, base)
    return found, notes


def _plain(shape: ModelShape) -> tuple[dict[str, Any], tuple[str, ...]]:
    if shape.kv_heads != shape.heads or shape.experts or shape.head_dim * shape.heads > shape.hidden:
        raise ConfigError(
            f"{shape.name} has feed-forward blocks of two matrices, {shape.kv_heads} key heads for {shape.heads}, of "
            f"{shape.head_dim}, and {shape.experts} experts; the GPT family has as many key heads as heads, which make up the "
            "hidden size, and no experts: give the path of its config.json"
        )
    heads = min((n for n in range(1, shape.hidden + 1) if shape.hidden % n == 0), key=lambda n: abs(n - shape.heads))
    config = {
        "model_type": "gpt2", "vocab_size": shape.vocab, "n_embd": shape.hidden, "n_layer": shape.layers, "n_head": heads,
        "n_inner": shape.ffn, "n_positions": shape.positions, "tie_word_embeddings": shape.tied,
        "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    # the table of the GPT-3 paper has one whose heads do not divide its hidden size
    note = f"{shape.heads} heads do not divide {shape.hidden}: taken as {heads}"
    return config, () if heads == shape.heads else (note,)


def _latent(shape: ModelShape, base: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in base.items() if key != "head_dim"}
    return kept | {
        "model_type": "deepseek_v3", "num_key_value_heads": shape.heads, "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": shape.kv_rank, "qk_nope_head_dim": shape.head_dim, "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim, "n_routed_experts": shape.experts, "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.moe_ffn, "n_shared_experts": shape.shared_experts, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": shape.dense_layers, "num_mtp_layers": 0,
    }  # fmt: skip


def _experts(shape: ModelShape, base: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    routed = {"num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.moe_ffn}
    dense = list(range(shape.dense_layers))
    notes = _window_note(shape)
    if shape.shared_experts:
        width = shape.shared_experts * shape.shared_ffn
        extra = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": width, "mlp_only_layers": dense}
        return {**base, **routed, **extra}, notes
    if dense or "qwen3" in shape.name.lower():
        return {**base, **routed, "model_type": "qwen3_moe", "mlp_only_layers": dense}, notes
    mixtral = {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "intermediate_size": shape.moe_ffn,
    }
    return {**base, **mixtral, "model_type": "mixtral"}, notes


def _window_note(shape: ModelShape) -> tuple[str, ...]:
    if not shape.windowed_layers:
        return ()
    return (
        f"the window of {shape.window} tokens of {shape.windowed_layers} layers is left out: attention sees all tokens",
    )


def _dense(shape: ModelShape, base: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    name = shape.name.lower()
    if shape.windowed_layers:
        kinds = ["sliding_attention"] * shape.windowed_layers
        kinds += ["full_attention"] * (shape.layers - shape.windowed_layers)
        window = {
            "use_sliding_window": True,
            "sliding_window": shape.window,
            "layer_types": kinds,
            "max_window_layers": 0,
        }
        note = "" if shape.windowed_layers == shape.layers else "windowed layers are taken before the others"
        return {**base, **window, "model_type": "qwen3"}, (note,) if note else ()
    if "qwen3" in name:
        return {**base, "model_type": "qwen3"}, ()
    if "qwen" in name and shape.head_dim * shape.heads == shape.hidden:
        return {**base, "model_type": "qwen2"}, ()
    if shape.hidden % shape.heads:
        return {**base, "model_type": "qwen3"}, ()
    return {**base, "model_type": "llama"}, ()


def layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """A word for each layer; layers of one word are built alike: `dense`, `moe`, with `windowed` before it."""
    moe = _moe_layers(config, layers)
    types = config.get("layer_types")
    windowed = [str(kind).startswith(("sliding", "chunked")) for kind in types] if types else [False] * layers
    if len(windowed) != layers:
        raise ConfigError(f"layer_types names {len(windowed)} layers of {layers}; give one for each")
    return tuple(("windowed " if w else "") + ("moe" if m else "dense") for w, m in zip(windowed, moe, strict=True))


def _moe_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    count = max(int(config.get(key) or 0) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if count <= 1:
        return [False] * layers
    first = int(config.get("first_k_dense_replace") or 0)
    only = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return [index >= first and index not in only and (index + 1) % step == 0 for index in range(layers)]


def built_config(config: Mapping[str, Any], layers: int, built: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The config with the first `built` layers of each kind only (0: all), and which layers of the model those are."""
    kinds = layer_kinds(config, layers)
    chosen = [i for i, kind in enumerate(kinds) if not built or kinds[:i].count(kind) < built]
    changed = dict(config)
    changed["n_layer" if "n_layer" in config else "num_hidden_layers"] = len(chosen)
    if config.get("layer_types"):
        changed["layer_types"] = [config["layer_types"][i] for i in chosen]
    dense = [at for at, i in enumerate(chosen) if not kinds[i].endswith("moe")]
    if "first_k_dense_replace" in config:
        changed["first_k_dense_replace"] = len(dense)
    if "mlp_only_layers" in config or config.get("decoder_sparse_step"):
        changed |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return changed, tuple(chosen)
