"""What a prediction says: step time with an interval, use of the devices, memory and time by rank class, and what it rests on.

Owns the record and its JSON. Invariant: shares of provenance sum to 1, the interval holds the step time, and a step without
any work or with nothing but bubble is no prediction. Why a record of plain numbers: the text, the file and a comparison are
all made of it, and none of them needs the tracer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollart.core.errors import InvariantBroken
from rollart.perf.memory import StageMemory
from rollart.perf.train_plan import TrainingPlan

NORMAL_95 = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """One rank class: ranks that run the same operators at the same time. Seconds of one step."""

    name: str
    ranks: int
    busy_s: float
    """Of the compute stream, the optimizer left out."""
    optimizer_s: float
    host_s: float
    """Waiting for the host to launch."""
    exposed_s: Mapping[str, float]
    """Communication that nothing hides, by axis (tp, cp, ep, dp, pp)."""
    comm_s: Mapping[str, float]
    """All of it, hidden or not."""
    bubble_s: float
    """Neither computation nor communication: waiting for other stages."""
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step of a job."""

    model: str
    parameters: float
    plan: TrainingPlan
    device: str
    device_memory_bytes: float
    interconnect: str
    framework: str
    scale: float
    """Constant of the framework on the device, which is in the seconds."""
    scale_basis: str
    """measured: of this pair; analytic: of its kin."""
    step_s: float
    log_std: float
    """Standard deviation of the log of the step's seconds."""
    model_flops: float
    """Of a step on all devices, without recomputation."""
    hardware_flops: float
    """With it, as the operators count."""
    peak_flops: float
    """Of one device, in the dtype that the linear layers compute in."""
    host_s: float
    jitter_s: float
    classes: tuple[ClassFigures, ...]
    provenance: Mapping[str, float]
    """Share of the busiest class's work by what its seconds rest on."""
    sources: Mapping[str, float]
    """The same by table, profile or law."""
    overlap_level: int
    """The one asked for; which one an operator has depends on what was measured."""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    overlap_basis: Mapping[str, float] = field(default_factory=dict)
    """Shares of the busiest class's computation beside communication, by what its slowdown rests on: `physical` is level 1,
    `kernel name` level 2. Empty: none runs beside."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s) and self.step_s > 0 and self.log_std > 0):
            raise InvariantBroken(f"predicted step of {self.step_s} s with log_std {self.log_std}; both are above 0")
        if abs(sum(self.provenance.values()) - 1.0) > ROUNDING:
            raise InvariantBroken(f"provenance {dict(self.provenance)} does not sum to 1")
        for one in self.classes:
            if one.busy_s <= 0 or one.bubble_s >= self.step_s:
                raise InvariantBroken(
                    f"{one.name}: computes {one.busy_s} s and waits {one.bubble_s} s of a {self.step_s} s step"
                )

    @property
    def low_s(self) -> float:
        """Lower end of the 95 % interval."""
        return self.step_s * math.exp(-NORMAL_95 * self.log_std)

    @property
    def high_s(self) -> float:
        """Upper end of the 95 % interval."""
        return self.step_s * math.exp(NORMAL_95 * self.log_std)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.model_flops / (self.step_s * self.plan.devices * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputation counted."""
        return self.hardware_flops / (self.step_s * self.plan.devices * self.peak_flops)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        return self.plan.global_batch * self.plan.sequence / self.step_s

    @property
    def bubble_share(self) -> float:
        """Of a step, mean over ranks."""
        return self._mean({one.name: one.bubble_s for one in self.classes}) / self.step_s

    @property
    def exposed_s(self) -> Mapping[str, float]:
        """Seconds of a step that ranks wait for communication, by axis, mean over ranks."""
        axes = dict.fromkeys(axis for one in self.classes for axis in one.exposed_s)
        return {axis: self._mean({one.name: one.exposed_s.get(axis, 0.0) for one in self.classes}) for axis in axes}

    @property
    def peak_memory_bytes(self) -> float:
        """Of the class that needs most."""
        return max(one.memory.total for one in self.classes)

    @property
    def fits(self) -> bool:
        """Whether every class fits its device."""
        return self.peak_memory_bytes <= self.device_memory_bytes

    def _mean(self, values: Mapping[str, float]) -> float:
        ranks = {one.name: one.ranks for one in self.classes}
        return sum(values[name] * count for name, count in ranks.items()) / sum(ranks.values())

    def as_json(self) -> dict[str, Any]:
        """All figures as plain values; every one is estimated, none measured on the job itself."""
        plain = {
            name: getattr(self, name)
            for name in (
                "model", "parameters", "device", "device_memory_bytes", "interconnect", "framework", "scale", "scale_basis",
                "step_s", "low_s", "high_s", "log_std", "mfu", "hfu", "model_flops", "hardware_flops", "peak_flops",
                "tokens_per_s", "bubble_share", "host_s", "jitter_s", "peak_memory_bytes", "fits", "overlap_level",
            )
        }  # fmt: skip
        return {
            "figures": "estimated",
            **plain,
            "exposed_s": dict(self.exposed_s),
            "plan": asdict(self.plan),
            "classes": [
                {**asdict(one), "memory": {**asdict(one.memory), "total": one.memory.total}} for one in self.classes
            ],
            "provenance": dict(self.provenance),
            "sources": dict(self.sources),
            "overlap_basis": dict(self.overlap_basis),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }
