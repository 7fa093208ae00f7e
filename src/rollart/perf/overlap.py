"""How much longer a kernel takes while a collective runs beside it, in three levels.

Owns: the slowdown s of a kernel and the law T = T0 (1 + s r), where T0 is the time alone and r the share of it that is
overlapped. Level 0 knows no cost. Level 1 is physical: the collective holds some of the device's SMs, so what is left
works SMs / (SMs - held) as long. Level 2 is fitted per kernel: measured slowdowns of a kernel by its full name, shrunk
towards those of its short name, shrunk towards level 1, with a step where the kernel's own time says that another size or
another clock is at work; a kernel that nobody measured gets level 1.

Invariant: r = 0 gives T0 exactly, a slowdown is never below `LEAST_SLOWDOWN`, and nothing of a prediction depends on other
kernels of the run. Why: overlap is the largest cost that a sum of solo times leaves out, and it differs twentyfold between
kernels, so one factor for all is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from math import isfinite
from typing import Any, Literal

from rollart.core.errors import ConfigError

Level = Literal[0, 1, 2]
LEAST_SLOWDOWN = -0.05
"""A kernel that ran faster beside a collective than alone ran at another clock: noise beyond this is cut and counted."""
DEFAULT_SMS = 108
"""SMs of an A100, on which level 1 was fitted, where a device's are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel as the profiler names it. `full_name` tells variants of one template apart and may be empty."""

    name: str
    full_name: str = ""
    solo_s: float
    sms: int = DEFAULT_SMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Slowdown as a step function of the kernel's time alone: `values` has one entry more than `edges_s`."""

    edges_s: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, solo_s: float) -> float:
        """The value of the interval that `solo_s` falls into; an edge belongs to the interval below it."""
        return self.values[sum(solo_s > edge for edge in self.edges_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapModel:
    """What was fitted (`overlap_fit`), or read from the package's table."""

    held_sms: float
    """SMs that a collective takes from the kernel beside it."""
    names: Mapping[str, Step] = field(default_factory=dict)
    """Level 2 by short name."""
    full_names: Mapping[str, Step] = field(default_factory=dict)
    """Level 2 by full name; goes before the short one."""
    default_level: Level = 2
    """The level with the least error on rows held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A duration under overlap and what it rests on: `none`, `physical`, `kernel name` or `kernel full name`."""

    seconds: float
    slowdown: float
    basis: str


def slowdown(kernel: Kernel, model: OverlapModel, level: Level | None = None) -> tuple[float, str]:
    """s of T = T0 (1 + s r) and its basis; `level` None takes the model's default."""
    level = model.default_level if level is None else level
    if level == 0:
        return 0.0, "none"
    if level == 2:
        for basis, table, key in (
            ("kernel full name", model.full_names, kernel.full_name),
            ("kernel name", model.names, kernel.name),
        ):
            if key in table:
                return max(LEAST_SLOWDOWN, table[key].at(kernel.solo_s)), basis
    if kernel.sms <= model.held_sms:
        raise ConfigError(
            f"kernel {kernel.name!r}: a device of {kernel.sms} SMs cannot lend {model.held_sms:g} to a collective"
        )
    return model.held_sms / (kernel.sms - model.held_sms), "physical"


def overlapped(
    kernel: Kernel, overlap_ratio: float, model: OverlapModel | None = None, level: Level | None = None
) -> Overlapped:
    """Seconds of `kernel` when `overlap_ratio` (0 to 1) of its time a collective runs beside it.

    Raises `ConfigError` for a ratio outside [0, 1] or a solo time that is no time.
    """
    if not 0.0 <= overlap_ratio <= 1.0:
        raise ConfigError(f"kernel {kernel.name!r}: overlap ratio {overlap_ratio} is not within 0..1")
    if not isfinite(kernel.solo_s) or kernel.solo_s < 0:
        raise ConfigError(f"kernel {kernel.name!r}: time alone is {kernel.solo_s} s, need 0 or more")
    model = packaged() if model is None else model
    extra, basis = slowdown(kernel, model, level) if overlap_ratio > 0 else (0.0, "none")
    return Overlapped(seconds=kernel.solo_s * (1 + extra * overlap_ratio), slowdown=extra, basis=basis)


# ---- the table


@lru_cache(maxsize=1)
def packaged() -> OverlapModel:
    """The model frozen in the package."""
    return model_from(json.loads((files("rollart.perf") / "tables" / "overlap.json").read_text(encoding="utf-8")))


def model_from(table: Mapping[str, Any]) -> OverlapModel:
    """A model from a table in the format of `tables/overlap.json` (as `as_table` writes it)."""
    level = table["default_level"]
    if level not in {0, 1, 2}:
        raise ConfigError(f"overlap table: default_level {level!r} is none of 0, 1, 2")
    return OverlapModel(
        held_sms=float(table["held_sms"]),
        names={name: _step(entry) for name, entry in table["names"].items()},
        full_names={name: _step(entry) for name, entry in table["full_names"].items()},
        default_level=level,
    )


def as_table(model: OverlapModel) -> dict[str, Any]:
    """`model` as plain values, microseconds to the nanosecond."""
    return {
        "default_level": model.default_level,
        "held_sms": round(model.held_sms, 3),
        "names": {name: _entry(step) for name, step in sorted(model.names.items())},
        "full_names": {name: _entry(step) for name, step in sorted(model.full_names.items())},
    }


def _step(entry: Mapping[str, Any]) -> Step:
    edges, values = tuple(entry["edges_us"]), tuple(entry["slowdown"])
    if len(values) != len(edges) + 1 or list(edges) != sorted(edges):
        raise ConfigError(
            f"overlap table: {len(values)} slowdowns for edges {list(edges)}: need rising edges and one value more"
        )
    return Step(edges_s=tuple(edge * 1e-6 for edge in edges), values=values)


def _entry(step: Step) -> dict[str, Any]:
    return {
        "edges_us": [round(edge * 1e6, 3) for edge in step.edges_s],
        "slowdown": [round(value, 4) for value in step.values],
    }
