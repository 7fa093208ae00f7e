"""The fitted constants of the training model, as frozen in `tables/training_calibration.json`.

Owns reading that file and the rule for what it does not hold. Invariant: one law for all devices and at most one
constant per framework and chip; nothing is refitted when the model is used. Why: a prediction for an unseen job must
come from what was known before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from rollart.core.errors import ConfigError
from rollart.perf.devices import device
from rollart.perf.links import fabric
from rollart.perf.shapes import ModelShape
from rollart.perf.train_layers import TrainingLaw
from rollart.perf.train_plan import TrainingPlan, framework
from rollart.perf.training import StepTime, step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A law and the constants by `framework|chip`, both lower case as measured."""

    law: TrainingLaw
    scales: Mapping[str, float]

    @staticmethod
    def of(table: Mapping[str, Any]) -> Calibration:
        """The calibration that a table (or one fold of it) writes down."""
        return Calibration(law=law_from(table["law"]), scales=table["scales"])

    def scale(self, framework: str, chip: str) -> tuple[float, str]:
        """The constant and where it comes from: its own, else the median (of logs) of the framework's other chips, of
        the chip's other frameworks, or of all.
        """
        key = scale_key(framework, chip)
        if key in self.scales:
            return self.scales[key], "measured"
        named, where = key.split("|")
        near = [value for other, value in self.scales.items() if other.split("|")[0] == named]
        near = near or [value for other, value in self.scales.items() if other.split("|")[1] == where]
        near = near or list(self.scales.values()) or [1.0]
        return math.exp(median(math.log(value) for value in near)), "analytic"


def scale_key(framework: str, chip: str) -> str:
    """The name of the constant of a framework on a chip."""
    return f"{' '.join(framework.lower().split())}|{chip.lower()}"


def flat_law(law: Any, prefix: str = "") -> dict[str, float]:
    """A law's numbers by dotted name."""
    found: dict[str, float] = {}
    for field in fields(law):
        value = getattr(law, field.name)
        if is_dataclass(value):
            found |= flat_law(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = float(value)
    return found


def law_from(numbers: Mapping[str, float], law: TrainingLaw | None = None) -> TrainingLaw:
    """The law with `numbers` (dotted names) in place of its own; an unknown name or a number that is not finite and
    positive is an error.
    """
    base = law or TrainingLaw()
    known = flat_law(base)
    for name, value in numbers.items():
        if name not in known or not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"training law: {name} = {value}; known names are {sorted(known)}, values finite and at least 0"
            )

    def rebuilt(part: Any, prefix: str) -> Any:
        changes: dict[str, Any] = {}
        for field in fields(part):
            value, name = getattr(part, field.name), f"{prefix}{field.name}"
            if is_dataclass(value):
                changes[field.name] = rebuilt(value, f"{name}.")
            elif name in numbers:
                changes[field.name] = float(numbers[name])
        return replace(part, **changes)

    built: TrainingLaw = rebuilt(base, "")
    return built


@cache
def calibration() -> tuple[Calibration, Mapping[str, Any]]:
    """The packaged calibration, and the whole table that it comes from (folds, provenance, what it was fitted on)."""
    loaded: dict[str, Any] = json.loads(
        (files("rollart.perf") / "tables" / "training_calibration.json").read_text(encoding="utf-8")
    )
    return Calibration.of(loaded), loaded


def predict_step(
    model: ModelShape, plan: TrainingPlan, device_name: str, framework_name: str, interconnect: str = ""
) -> StepTime:
    """The step of `plan` on the named device under the named framework, with the packaged constants.

    `interconnect` is free text that `links.fabric` reads. Raises `ConfigError` for a device that no table knows.
    """
    known, _ = calibration()
    chip = device(device_name)
    links = fabric(device_name, interconnect)
    scale, _ = known.scale(framework_name, links.chip)
    return step_time(model, plan, chip, links, framework(framework_name), known.law, scale)
