"""The real model of a source with fake weights: shapes and types of everything, bytes of nothing.

Owns the building of transformers models and users' modules, and their inputs and loss. Invariant: no weight takes memory at
any time; modules are those of transformers or of the user, unchanged but for their dtype and for the
attention function that a GPU would run. Why: what is traced has to be what trains. Imports torch and transformers: import this
module inside functions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rollart.core.errors import ConfigError
from rollart.optrace.live_attention import FUSED, register_attention
from rollart.optrace.reads import line_of
from rollart.optrace.sources import Source, built_config, layer_kinds
from rollart.perf.train_plan import Framework, TrainingPlan

DROPOUT = 0.1
"""Of frameworks that train with dropout (Megatron-LM's default)."""
TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
PLAN_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A built model: its layers in order, and what of the whole model each of them is."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    built_at: tuple[int, ...]
    kinds: tuple[str, ...]
    """Of all layers of the model."""
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    targets: torch.Tensor | None
    notes: tuple[str, ...] = ()
    dtype: str = ""
    """In a plan's words; empty: the plan's."""


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """Type of activations and gradients; narrow linear layers are derived from 16 bits later."""
    return TORCH_DTYPES.get(plan.dtype, torch.bfloat16)


def build(source: Source, plan: TrainingPlan, framework: Framework, fake: FakeTensorMode) -> Live:
    """The model with its inputs for one micro-batch; weights are fake, master weights in fp32 where they will be sharded."""
    if source.kind == "module":
        return _users(source, plan, fake)
    return _causal_lm(source, plan, framework, fake)


def _causal_lm(source: Source, plan: TrainingPlan, framework: Framework, fake: FakeTensorMode) -> Live:
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    assert source.config is not None
    assert source.shape is not None
    layers = source.shape.layers
    kinds = layer_kinds(source.config, layers)
    values, built_at = built_config(source.config, layers, source.built_layers)
    if any("moe" in kind for kind in kinds) and compute_dtype(plan) is not torch.bfloat16:
        raise ConfigError(
            f"{source.name}: torch multiplies by experts in bf16 only, got dtype {plan.dtype}; give bf16 or fp8"
        )
    values, notes = _fitted(values, plan, framework)
    config = AutoConfig.for_model(**values)
    config.use_cache = False
    scores = framework.attention == "scores"
    dtype = torch.float32 if plan.shards == 3 and plan.dp * plan.cp > 1 else compute_dtype(plan)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="eager" if scores else FUSED
        )
    model.train()
    with fake:
        _make_fake(model)
        ids = torch.empty((plan.micro_batch, plan.sequence), dtype=torch.int64)
        positions = torch.empty((1, plan.sequence), dtype=torch.int64)
        keywords: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        if scores:
            shape = (1, 1, plan.sequence, plan.sequence)
            keywords["attention_mask"] = torch.empty(shape, dtype=compute_dtype(plan))
        targets = torch.empty((plan.micro_batch, plan.sequence), dtype=torch.int64)
    return Live(
        model=model, layers=tuple(layer_list(model, len(built_at))), built_at=built_at, kinds=kinds, inputs=(),
        keywords=keywords, targets=targets, notes=notes,
    )  # fmt: skip


def _fitted(
    values: Mapping[str, Any], plan: TrainingPlan, framework: Framework
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config for this plan: enough positions, a vocabulary and key heads that the ranks can share, the dropout."""
    fitted, notes = dict(values), []
    positions = "n_positions" if "n_positions" in values else "max_position_embeddings"
    fitted[positions] = max(int(values.get(positions) or 0), plan.sequence)
    tp = plan.tp
    vocab = int(values["vocab_size"])
    if vocab % tp:
        fitted["vocab_size"] = -(-vocab // tp) * tp
        notes.append(f"the vocabulary of {vocab} is padded to {fitted['vocab_size']}, a multiple of tp {tp}")
    heads = int(values.get("num_attention_heads") or values.get("n_head") or 0)
    if heads % tp:
        fit = [degree for degree in range(1, tp + 1) if heads % degree == 0]
        raise ConfigError(f"tp {tp} does not divide the {heads} heads; the nearest that does is {fit[-1]}")
    keys = int(values.get("num_key_value_heads") or heads)
    if keys % tp:
        if tp % keys:
            raise ConfigError(f"tp {tp} and the {keys} key heads do not divide each other; give a tp that does")
        fitted["num_key_value_heads"] = tp
        notes.append(f"each rank keeps one of {keys} key heads, which {tp // keys} ranks share")
    if framework.dropout:
        for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
            if key in values or key == "attention_dropout":
                fitted[key] = DROPOUT
    return fitted, tuple(notes)


def _make_fake(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace every parameter and buffer by a fake one on the CPU; what is tied stays tied. `dtype`: of floating-point ones."""
    made: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=wanted)
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = cast("nn.Parameter", twin(tensor))


def layer_list(model: nn.Module, length: int | None = None) -> list[nn.Module]:
    """The repeated layers of a model: its longest list of modules of one class, the largest if two are as long.

    `length`: how many there must be; without it, at least 2.
    """
    best: list[nn.Module] = []
    most = (0, 0)
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module.children())
        if len(children) < 2 if length is None else len(children) != length:
            continue
        size = sum(p.numel() for p in module.parameters())
        if size and len({type(child).__qualname__ for child in children}) == 1 and (len(children), size) > most:
            best, most = children, (len(children), size)
    return best


def _users(source: Source, plan: TrainingPlan, fake: FakeTensorMode) -> Live:
    if plan.tp > 1 or plan.shards == 3:
        raise ConfigError(
            f"{source.target}: a module of your own is captured with tp 1 and shards below 3, got tp {plan.tp}, shards "
            f"{plan.shards}; its data parallelism is derived"
        )
    made = _made(source.target)
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source.target} returned {type(model).__name__}; return an nn.Module, or it and its inputs")
    model.train()
    own, share = own_dtype(model)
    dtype = own if source.own_dtype else compute_dtype(plan)
    named = PLAN_DTYPES.get(dtype)
    if named is None:
        raise ConfigError(f"{source.target}: its weights are {dtype}, which no plan is in; give a dtype to train it in")
    said = f"{PLAN_DTYPES.get(own, str(own))}" + ("" if share == 1.0 else f" to {share:.0%}")
    notes: list[str] = []
    if source.own_dtype:
        notes.append(f"taken as the module was built, in {said}: no dtype was given")
    elif own != dtype or share < 1.0:
        notes.append(f"weights and inputs, built in {said}, are cast to {named}")
    cast_to = None if source.own_dtype else dtype
    with fake:
        _make_fake(model, cast_to)
        tokens = torch.empty((plan.micro_batch, plan.sequence), dtype=torch.int64)
        if inputs is None:
            arguments, keywords = (tokens,), {}
            notes.append(f"inputs taken as token ids [{plan.micro_batch}, {plan.sequence}]")
        else:
            _check_sequences(source.target, inputs, plan)
            keywords = (
                {key: _fake_input(value, cast_to) for key, value in inputs.items()}
                if isinstance(inputs, Mapping)
                else {}
            )
            given = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
            arguments = tuple(_fake_input(value, cast_to) for value in given)
    layers = tuple(layer_list(model))
    return Live(
        model=model, layers=layers, built_at=tuple(range(len(layers))),
        kinds=tuple(type(layer).__name__ for layer in layers), inputs=arguments, keywords=keywords, targets=tokens,
        notes=tuple(notes), dtype=named,
    )  # fmt: skip


def _made(target: str) -> Any:
    """What the user's function returns, built without memory."""
    name, _, function = target.partition(":")
    try:
        maker = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"{target}: {problem}; give a module that can be imported and its function") from problem
    if not callable(maker):
        raise ConfigError(f"{target} is {type(maker).__name__}; give a function that returns an nn.Module")
    needed = _needed(maker)
    if needed:
        raise ConfigError(f"{target} takes {', '.join(needed)}; give a function that needs no arguments and sets them")
    try:
        with torch.device("meta"):
            return maker()
    except ConfigError:
        raise
    # boundary: the user's code, which may raise anything
    except Exception as problem:
        raise ConfigError(
            f"{target} raised {type(problem).__name__}: {problem} ({line_of(problem)}); it is called "
            f'under torch.device("meta"), where tensors have no values'
        ) from problem


def _needed(maker: Callable[..., Any]) -> list[str]:
    """Arguments without which it cannot be called."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in free]


def own_dtype(model: nn.Module) -> tuple[torch.dtype, float]:
    """The floating-point type of most of a module's parameters, and of what share; fp32 and 1 of one that has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        return torch.float32, 1.0
    most = max(counts, key=lambda dtype: counts[dtype])
    return most, counts[most] / sum(counts.values()) if counts[most] else 1.0


def _check_sequences(target: str, inputs: Any, plan: TrainingPlan) -> None:
    """Raise ConfigError where sequences are to be cut and no input has their length."""
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
    )
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if plan.cp > 1 and not any(plan.sequence in shape for shape in shapes):
        raise ConfigError(
            f"{target}: cp {plan.cp} cuts sequences of {plan.sequence} tokens, its inputs are {shapes}; give --seq as they "
            "have it, or cp 1"
        )


def _fake_input(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        made = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=made, requires_grad=value.requires_grad)
    return value


def loss_of(made: Any, targets: torch.Tensor | None) -> torch.Tensor:
    """The loss of a model's output: its own, else the cross entropy of its logits in fp32, else the mean of squares."""
    own = getattr(made, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    logits = getattr(made, "logits", made[0] if isinstance(made, tuple | list) else made)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(f"the model returned {type(made).__name__}; return a loss, logits or a tensor")
    if logits.dim() == 0:
        return logits
    if targets is not None and logits.dim() == 3 and logits.shape[:2] == targets.shape:
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return logits.float().square().mean()
