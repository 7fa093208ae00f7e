"""What a user asks to have predicted, from options and a plan file, refused where it cannot be.

Owns `Job` and the one list of its options. Invariant: the command line and a plan file know the same names with the same
meanings, and every option ends in a field of the job. Why: a flag that is parsed and then forgotten is the field's commonest
fault, so there is one list and a test walks it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rollart.core.errors import ConfigError
from rollart.optrace.sources import BUILT_LAYERS
from rollart.perf.overlap import Level
from rollart.perf.pipeline import Schedule
from rollart.perf.train_plan import DEFAULT_FRAMEWORK, FRAMEWORKS, Recompute, TrainingPlan, framework

DEFAULT_DEVICE = "H100"
NAMED_FRAMEWORK, MODULE_FRAMEWORK = "Megatron-Core/Megatron-Bridge", "PyTorch"
"""Where none is given: public models are trained by what the simulated trainer uses too, a module of one's own as it is."""
PLAIN = "plain"
PLAIN_WORDS = frozenset({"pytorch", "torch", "fsdp", "fsdp2", "ddp", "deepspeed", "transformers", "accelerate"})
"""One of these in a name that the table of frameworks does not know: PyTorch's own operators, run as they are written."""
DTYPES = ("bf16", "fp16", "fp32", "fp8")
Takes = Literal["whole", "number", "text", "flag", "choice", "pairs", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: a flag of the command line, and a key of a plan file."""

    name: str
    takes: Takes
    default: Any
    says: str
    choices: tuple[str, ...] = ()


OPTIONS: tuple[Option, ...] = (
    Option(name="tp", takes="whole", default=1, says="tensor-parallel ranks"),
    Option(name="pp", takes="whole", default=1, says="pipeline stages"),
    Option(name="dp", takes="whole", default=1, says="data-parallel ranks"),
    Option(name="cp", takes="whole", default=1, says="context-parallel ranks: parts of a sequence"),
    Option(name="ep", takes="whole", default=1, says="ranks that experts are spread over, within the others"),
    Option(name="chunks", takes="whole", default=1, says="model chunks of a stage (schedule interleaved)"),
    Option(name="seq", takes="whole", default=4096, says="tokens of a sequence"),
    Option(name="micro_batch", takes="whole", default=1, says="sequences of one forward pass"),
    Option(name="global_batch", takes="whole", default=0, says="sequences of a step; 0: 8 micro-batches a stage and rank"),
    Option(name="shards", takes="whole", default=-1, says="ZeRO stage 0 to 3; -1: 1 with data parallelism, else 0"),
    Option(name="dtype", takes="choice", default="bf16", says="of the linear layers; default: a module's own", choices=DTYPES),
    Option(name="recompute", takes="choice", default="none", says="of activations", choices=get_args(Recompute)),
    Option(name="recompute_share", takes="number", default=1.0, says="share of the layers that are recomputed in full"),
    Option(
        name="schedule", takes="choice", default="", says="of the pipeline; default: interleaved with chunks, else 1f1b",
        choices=get_args(Schedule),
    ),
    Option(name="sequence_parallel", takes="flag", default=None, says="default: with tp, where the framework can"),
    Option(
        name="device", takes="text", default="",
        says=f"an accelerator by its usual name; default: the profile's, else {DEFAULT_DEVICE}",
    ),
    Option(name="interconnect", takes="text", default="", says="free text, as `NVLink 900GB/s; 400 Gb/s IB per GPU`"),
    Option(
        name="framework", takes="text", default="",
        says=f"its usual name, or {PLAIN}; default: {NAMED_FRAMEWORK}, and {MODULE_FRAMEWORK} for a module of your own",
    ),
    Option(name="profile", takes="text", default="", says="what `rollart profile-device` wrote on such a device"),
    Option(name="assume", takes="pairs", default={}, says="what a value that host code reads is taken to be (repeat)"),
    Option(
        name="straggler", takes="late", default={},
        says="a rank class that begins SECONDS later, or a rank that is FACTORx as slow or begins later (repeat)",
    ),
    Option(name="jitter", takes="number", default=0.0, says="standard deviation of the log of task times, drawn by --seed"),
    Option(name="seed", takes="whole", default=0, says="of what is drawn"),
    Option(
        name="overlap_level", takes="choice", default="", says="cost of overlap; default: the fitted", choices=("0", "1", "2")
    ),
    Option(name="clip", takes="flag", default=True, says="the norm of all gradients is clipped"),
    Option(name="built_layers", takes="whole", default=BUILT_LAYERS, says="layers of each kind that are really built; 0: all"),
    Option(
        name="capture", takes="flag", default=True,
        says="run the real model; no: write its operators down from its numbers, at once, without torch, for any public model",
    ),
)  # fmt: skip
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How a rank class or a rank lags."""

    delay_s: float = 0.0
    """It begins so much later."""
    factor: float = 1.0
    """Its computation takes so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job on devices of one kind."""

    model: str
    """A public name, a config.json, `gpt:layers=..,hidden=..,heads=..,vocab=..`, or `module:function`."""
    plan: TrainingPlan
    device: str = ""
    """Empty: the profile's, else `DEFAULT_DEVICE`."""
    interconnect: str = ""
    framework: str = NAMED_FRAMEWORK
    profile: Path | None = None
    assume: Mapping[str, str] = field(default_factory=dict)
    late: Mapping[str, Late] = field(default_factory=dict)
    """Rank class, or the number of a rank -> how it lags."""
    jitter: float = 0.0
    seed: int = 0
    overlap_level: Level | None = None
    clip: bool = True
    built_layers: int = BUILT_LAYERS
    capture: bool = True
    """The real model is run; else its operators are written down from the numbers of its shape."""
    own_dtype: bool = False
    """No dtype was given for a module of one's own: its own is the plan's."""


def job_from(model: str, given: Mapping[str, Any]) -> Job:
    """The job that options ask for; those that are not given (or None) have their defaults. Raises ConfigError."""
    values = {option.name: option.default for option in OPTIONS}
    for name, value in given.items():
        if value is not None:
            values[_known(name)] = _taken(BY_NAME[_known(name)], value)
    _check_counts(values)
    if not values["capture"]:
        _check_uncaptured(values, model)
    named = _framework_name(values["framework"], model)
    level: dict[str, Level] = {"0": 0, "1": 1, "2": 2}
    return Job(
        model=model, plan=_plan(values, named), device=values["device"], interconnect=values["interconnect"],
        framework=named, profile=Path(values["profile"]).expanduser() if values["profile"] else None,
        assume=values["assume"], late=values["straggler"], jitter=values["jitter"], seed=values["seed"],
        overlap_level=level.get(values["overlap_level"]),
        clip=values["clip"], built_layers=values["built_layers"], capture=values["capture"],
        own_dtype=is_module(model) and given.get("dtype") is None,
    )  # fmt: skip


def is_module(model: str) -> bool:
    """Whether the name is that of a function in a module: `package.module:function`."""
    head, colon, tail = model.partition(":")
    return bool(colon) and tail.isidentifier() and all(part.isidentifier() for part in head.split("."))


def _framework_name(said: str, model: str) -> str:
    """The framework that is meant: the usual one where none is said. Raises ConfigError for one of which nothing is known."""
    if not said:
        return MODULE_FRAMEWORK if is_module(model) else NAMED_FRAMEWORK
    said_words = set(re.findall(r"[a-z0-9]+", said.lower()))
    if PLAIN in said_words:
        return MODULE_FRAMEWORK
    if framework(said) != DEFAULT_FRAMEWORK or said_words & PLAIN_WORDS:
        return said
    known = [name for name, _ in FRAMEWORKS]
    near = difflib.get_close_matches(said.lower(), known, n=1)
    meant = f" did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"framework={said}: what it does is not known;{meant} Known: {', '.join(known)}; {PLAIN} is PyTorch as it stands"
    )


def _known(name: str) -> str:
    asked = name.replace("-", "_")
    if asked in BY_NAME:
        return asked
    near = difflib.get_close_matches(asked, BY_NAME, n=1, cutoff=0.0)[0]
    raise ConfigError(f"{name}: there is no such option of a plan; did you mean {near}? Known: {', '.join(BY_NAME)}")


def _taken(option: Option, value: Any) -> Any:
    """The value in the option's kind, from a word of a command line or a value of a file."""
    try:
        if option.takes == "whole":
            if isinstance(value, bool) or float(value) != int(value):
                raise ValueError
            return int(value)
        if option.takes == "number":
            return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{option.name}={value}: it takes a {option.takes} number") from None
    if option.takes == "flag":
        if not isinstance(value, bool):
            raise ConfigError(f"{option.name}={value}: it takes true or false")
        return value
    if option.takes in ("pairs", "late"):
        return _pairs(option, value)
    if option.takes == "choice" and str(value) not in option.choices:
        near = difflib.get_close_matches(str(value), option.choices, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{option.name}={value}: it takes {', '.join(option.choices)}; did you mean {near}?")
    return str(value)


def _pairs(option: Option, value: Any) -> dict[str, Any]:
    """`{name: value}`, from a map or from words `name=value`."""
    if isinstance(value, Mapping):
        found = {str(name): str(said) for name, said in value.items()}
    else:
        found = {}
        for word in value if isinstance(value, list | tuple) else [value]:
            name, equals, said = str(word).partition("=")
            if not (equals and name):
                raise ConfigError(f"{option.name} {word}: give NAME=VALUE")
            found[name] = said
    return {name: _late(name, said) for name, said in found.items()} if option.takes == "late" else dict(found)


def _late(name: str, said: str) -> Late:
    """`0.5`: so many seconds later; `1.2x`: so many times as slow, of one rank."""
    slower = said.endswith("x")
    try:
        value = float(said.removesuffix("x"))
    except ValueError:
        raise ConfigError(f"straggler {name}={said}: give CLASS=SECONDS, RANK=SECONDS or RANK=FACTORx") from None
    if not (1.0 if slower else 0.0) <= value < math.inf:
        raise ConfigError(f"straggler {name}={said}: give seconds of at least 0, or a factor of at least 1")
    if slower and not name.isdigit():
        raise ConfigError(f"straggler {name}={said}: a factor is of one rank; give its number, e.g. 0={said}")
    return Late(factor=value) if slower else Late(delay_s=value)


def _check_counts(values: Mapping[str, Any]) -> None:
    for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "seq", "micro_batch"):
        if values[name] < 1:
            raise ConfigError(f"{name}={values[name]}: it is 1 or more")
    if min(values["global_batch"], values["built_layers"]) < 0 or not 0.0 <= values["jitter"] < math.inf:
        raise ConfigError(
            f"global_batch={values['global_batch']}, built_layers={values['built_layers']}, jitter={values['jitter']}: they "
            "are 0 or more"
        )
    if values["jitter"] >= 1.0:
        raise ConfigError(f"jitter={values['jitter']}: it is the standard deviation of a log, below 1; use jitter=0.1")
    if not -1 <= values["shards"] <= 3:
        raise ConfigError(
            f"shards={values['shards']}: it is a ZeRO stage, 0 to 3; use {min(3, max(0, values['shards']))}"
        )
    if not 0.0 < values["recompute_share"] <= 1.0:
        raise ConfigError(f"recompute_share={values['recompute_share']}: it is above 0 and at most 1")


def _check_uncaptured(values: Mapping[str, Any], model: str) -> None:
    """Refuse what only a captured step can have."""
    if is_module(model):
        raise ConfigError(f"{model}: a module of your own has no numbers to write its operators from; leave capture on")
    if values["assume"]:
        raise ConfigError(
            f"assume={values['assume']}: without capture no code runs that could read a value; leave one out"
        )
    if not values["clip"] or values["built_layers"] != BUILT_LAYERS:
        raise ConfigError(
            f"clip={values['clip']}, built_layers={values['built_layers']}: without capture no layer is built, and an update's "
            f"bytes have the clip's in them; leave them out, or leave capture on"
        )


def _plan(values: Mapping[str, Any], named: str) -> TrainingPlan:
    tp, pp, dp, cp, chunks = (values[name] for name in ("tp", "pp", "dp", "cp", "chunks"))
    rank_batch = dp * values["micro_batch"]
    spread = values["sequence_parallel"]
    return TrainingPlan(
        devices=tp * pp * dp * cp, micro_batch=values["micro_batch"],
        global_batch=values["global_batch"] or rank_batch * 8 * pp, sequence=values["seq"], dp=dp, tp=tp, pp=pp,
        chunks=chunks, cp=cp, ep=values["ep"],
        shards=values["shards"] if values["shards"] >= 0 else int(dp * cp > 1), dtype=values["dtype"],
        recompute=values["recompute"], recompute_share=values["recompute_share"],
        sequence_parallel=spread if spread is not None else tp > 1 and framework(named).sequence_parallel,
        schedule=values["schedule"] or ("interleaved" if chunks > 1 else "1f1b"),
    )  # fmt: skip
