"""The fitted numbers of the inference model: read, never made, here; and engines by name, ready to be asked.

Owns: reading `tables/inference_calibration.json` and the fall-back for pairs that it does not know. Invariant: besides the
efficiencies, which all devices and engines share, there is at most one constant per (engine, device), and a pair without one
takes its engine's usual constant, an engine without one takes 1. Why: a constant is worth having where a measurement
stood behind it and must not be invented where none did.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from rollart.core.resources import DEFAULT_DEGREES, Degrees
from rollart.perf.devices import GIB, Device
from rollart.perf.engines import EngineFacts, engine_facts, engine_family
from rollart.perf.inference import EngineCost
from rollart.perf.rooflines import WEIGHT_BYTES, Efficiency
from rollart.perf.shapes import ModelShape


def pair_key(engine: str, device: str) -> str:
    """Under which the constant of an (engine, device) is kept; `device` is a name of the table."""
    return f"{engine_family(engine)} | {device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Efficiencies and the constants per (engine, device)."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    constants: Mapping[str, float] = field(default_factory=dict)

    def factor(self, engine: str, device: str) -> float:
        """The constant of the pair; else the geometric mean of its engine's constants; else 1."""
        key = pair_key(engine, device)
        if key in self.constants:
            return self.constants[key]
        family = pair_key(engine, "")
        kin = [math.log(value) for name, value in self.constants.items() if name.startswith(family)]
        return math.exp(sum(kin) / len(kin)) if kin else 1.0


def read_calibration(loaded: Mapping[str, Any]) -> Calibration:
    return Calibration(efficiency=Efficiency(**loaded["efficiency"]), constants=dict(loaded["constants"]))


def cache_dtype(facts: EngineFacts, precision: str) -> str:
    """The dtype in which an engine keeps the KV cache unless it is told."""
    return "fp8" if facts.kv_follows_weights and WEIGHT_BYTES[precision] < 2.0 else "bf16"


def engine_cost(
    device: Device, shape: ModelShape, degrees: Degrees = DEFAULT_DEGREES, *, precision: str = "bf16", kv_dtype: str = "",
    engine: str = "vLLM", version: str = "", step_tokens: float = 0.0, calibration: Calibration | None = None,
) -> EngineCost:  # fmt: skip
    """The cost of an engine by its name, with its defaults and the calibration of the package, or the given one."""
    facts = engine_facts(engine, version)
    used = calibration or inference_calibration()
    return EngineCost(
        device=device, shape=shape, degrees=degrees, precision=precision, kv_dtype=kv_dtype or cache_dtype(facts, precision),
        efficiency=used.efficiency, factor=used.factor(engine, device.name), memory_fraction=facts.memory_fraction,
        of_free=facts.of_free, runtime_bytes=facts.runtime_gib * GIB, step_tokens=step_tokens or facts.max_step_tokens,
    )  # fmt: skip


@cache
def inference_calibration() -> Calibration:
    """The calibration that the package carries."""
    text = files("rollart.perf").joinpath("tables/inference_calibration.json").read_text(encoding="utf-8")
    return read_calibration(json.loads(text))
