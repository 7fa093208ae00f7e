"""What was measured of a real run, as laws: what `rollart calibrate` writes and what a replay reads.

Owns the file's format. Invariants: every law says what it was fitted to and how well (`Fit`), every file says which run,
engine, versions and machine it is of; CPU seconds are those of one core that a process has for itself, so that a machine on
which many share the cores is the model's affair and not the law's. Reading what was written gives an equal value.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rollart.core.errors import ConfigError

FORMAT = 3
WOKEN_CALLS = 1.0
"""A call that has waited for something costs its host so many calls more: its thread is woken, and finds the interpreter taken
and the caches cold. An estimate for environments that compute next to nothing; for others it is a little too much."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a law came about."""

    windows: int = 0
    """Stretches of the record that it was fitted to."""
    error: float = 0.0
    """Median relative error of the law over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the figures come from."""

    kind: str = "measured"
    run: str = ""
    git: str = ""
    engine: str = "native"
    versions: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    cores: int = 1
    steps: int = 0
    """Training steps that the run had."""
    others: float = 0.0
    """Cores that strangers to the run kept busy meanwhile, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaw:
    """CPU seconds of an engine: a step = step_s + row_s x rows + token_s x tokens computed + context_s x tokens attended to."""

    step_s: float
    row_s: float
    token_s: float
    context_s: float
    batch_s: float
    """Taking in one batch of commands."""
    answer_s: float
    """Sending one answer."""
    turn_s: float
    """Of either, for each turn."""
    fit: Fit = Fit()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLaw:
    """CPU seconds of a training step = step_s + pass_s x micro-batches + token_s x tokens computed."""

    step_s: float
    pass_s: float
    token_s: float
    fit: Fit = Fit()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLaw:
    """CPU seconds: of the trainer for a publish, of an engine for a prefetch and for an apply."""

    publish_s: float
    prefetch_s: float
    apply_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaw:
    """CPU seconds of an environment host."""

    batch_s: float
    answer_s: float
    call_s: float
    """One call of a session, latencies aside."""
    fit: Fit = Fit()

    @property
    def woken_s(self) -> float:
        """More, of a call that has waited for something."""
        return WOKEN_CALLS * self.call_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLaw:
    """CPU seconds of the control process."""

    batch_s: float
    """Sending one batch of commands."""
    answer_s: float
    """Taking one answer."""
    turn_s: float
    """One turn of a trajectory, its step of the environment included."""
    trajectory_s: float
    """The rest of a trajectory: start, opening, end, record."""
    step_s: float
    """One training step."""
    idle: float
    """Share of a core that goes with time alone."""
    fit: Fit = Fit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One trajectory as it was played."""

    reward: float
    prompt: int
    """Tokens of the first observation."""
    sampled: tuple[int, ...]
    """Tokens of each turn."""
    observed: tuple[int, ...]
    """Tokens of the observation after each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLaw:
    """A task, by examples: what a trajectory is like, and how long its environment takes beside computing."""

    played: tuple[Played, ...]
    """In the order of the run."""
    step_latency_s: tuple[float, ...] = ()
    """Quantiles of what a step of the environment waits, evenly spaced; empty: it does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A run and its machine as laws."""

    origin: Origin
    engine: EngineLaw
    trainer: TrainerLaw
    weights: WeightsLaw
    host: HostLaw
    control: ControlLaw
    tasks: Mapping[str, TaskLaw]
    ray: float = 0.0
    """Cores that Ray's own processes keep busy."""
    wire_s: float = 0.0003
    """One way between two processes, beside what they compute."""
    together: float = 1.0
    """Speed of a core while all cores are busy over what the laws say; see `sim.tuning`."""
    step_s: float = 0.0
    """Mean time between two steps of that run."""

    def save(self, path: Path) -> None:
        """Write JSON. Raises ConfigError when the file cannot be written."""
        text = json.dumps({"format": FORMAT, **_plain(self)}, indent=1) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error


def load(path: Path) -> Calibrated:
    """Read what `Calibrated.save` wrote. Raises ConfigError with the file and the field for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}; write one with `rollart calibrate RUN`") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; write it anew with `rollart calibrate RUN`") from error
    form = found.pop("format", None) if isinstance(found, dict) else None
    if form != FORMAT:
        raise ConfigError(
            f"{path} has format {form}, this version reads {FORMAT}; write it anew with `rollart calibrate RUN`"
        )
    try:
        return _made(Calibrated, found, "")
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: {error}; write it anew with `rollart calibrate RUN`") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _made(cls: type[T], found: Any, at: str) -> T:
    """A dataclass from plain values; unknown, missing and non-finite ones are errors that name their place."""
    if not isinstance(found, dict):
        raise ValueError(f"{at or 'the file'} is {type(found).__name__}, not a map")
    hints = get_type_hints(cls)
    unknown = found.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{at}{min(unknown)} is not known")
    return cls(**{name: _value(hints[name], one, f"{at}{name}") for name, one in found.items()})


def _value(kind: Any, found: Any, at: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _made(kind, found, f"{at}.")
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(_value(inner[0], one, f"{at}[{index}]") for index, one in enumerate(found))
    if origin is not None and not isinstance(kind, UnionType):
        return {name: _value(inner[1], one, f"{at}.{name}") for name, one in found.items()}
    if kind is float and not (isinstance(found, int | float) and math.isfinite(found)):
        raise ValueError(f"{at}={found!r} is not a finite number")
    if kind is float and found < 0 and not at.endswith("reward"):
        raise ValueError(f"{at}={found!r} is below 0")
    return float(found) if kind is float else found
