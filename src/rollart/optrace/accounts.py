"""Sums over a composed step: FLOPs and parameters of the whole job, what the seconds rest on, and how far off they may be.

Owns these sums. Invariants: shares of provenance sum to 1; hardware FLOPs are those of all ranks and never below the model's.

The interval. All that one law prices is wrong alike: errors of the roofline add, whatever the operators, and so does what
tracing errs beside the law (`TRACED_LOG_STD`). Errors of measured
operators are alike within a kind, those of collectives within an axis; between groups they are independent, so their squares
add. Communication counts with what of it is exposed, and a step that waits waits for work of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rollart.optrace.classes import stage_parts
from rollart.optrace.ops import Trace
from rollart.optrace.step_timeline import ClassTime, StepTimeline, Usage
from rollart.perf.train_plan import TrainingPlan

PRODUCTS = frozenset({"gemm", "attention", "attention_backward"})
"""What model FLOPs count; passes are bound by memory."""
TRACED_LOG_STD = 0.056
"""What a traced step errs beside its law, whose own error was found on the closed form: the root mean square of log(traced /
closed form) over the 20 published steps that `benchmarks/echo.py --only EC-1` traces, a bias of 4 % included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of a step on all devices."""

    model: float
    hardware: float


def hardware_flops(trace: Trace, plan: TrainingPlan, timeline: StepTimeline) -> Flops:
    """FLOPs of products as the operators count them, without and with what is computed again."""
    places = stage_parts(trace, plan, timeline.head_layers)
    once = dict.fromkeys(trace.parts, 0.0)
    again = dict.fromkeys(trace.parts, 0.0)
    for name, part in trace.parts.items():
        for op in (*part.forward, *part.backward):
            if op.kind in PRODUCTS:
                (again if op.recomputed else once)[name] += op.flops
    ranks = plan.devices // plan.pp * plan.micro_batches
    names = [name for place in places for name in place]
    model = ranks * math.fsum(once[name] for name in names)
    return Flops(model=model, hardware=model + ranks * math.fsum(again[name] for name in names))


def trained_parameters(trace: Trace) -> float:
    """Of the whole model, from the shards that one rank of each stage holds."""
    plan = trace.plan
    names = (trace.embedding, *trace.layers, trace.head)
    dense = math.fsum(trace.parts[name].parameters for name in names) * plan.tp
    return dense + math.fsum(trace.parts[name].expert_parameters for name in names) * plan.ep


def shares_of(one: ClassTime) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of a class's work, computation and exposed communication, by provenance and by source."""
    by_provenance = {"measured": 0.0, "interpolated": 0.0, "analytic": 0.0}
    by_source: dict[str, float] = {}
    for usage in one.usage:
        seconds = usage.seconds * _seen(one, usage)
        by_provenance[usage.provenance] += seconds
        by_source[usage.source] = by_source.get(usage.source, 0.0) + seconds
    whole = math.fsum(by_provenance.values())
    return _over(by_provenance, whole), _over(by_source, whole)


def overlap_shares(one: ClassTime) -> dict[str, float]:
    """Shares of a class's computation beside communication, by what its slowdown rests on; empty where none runs beside."""
    whole = math.fsum(one.overlapped_s.values())
    return _over(one.overlapped_s, whole) if whole > 0 else {}


def _over(values: Mapping[str, float], whole: float) -> dict[str, float]:
    return {name: value / whole for name, value in values.items()}


def _seen(one: ClassTime, usage: Usage) -> float:
    """Share of a usage that the step feels."""
    if not usage.axis:
        return 1.0
    whole = one.comm_s.get(usage.axis, 0.0)
    return min(1.0, one.exposed_s.get(usage.axis, 0.0) / whole) if whole > 0 else 0.0


def log_std_of(timeline: StepTimeline, *, of_step: float) -> float:
    """Standard deviation of the log of the step's seconds; `of_step`: of a step of which nothing was measured.

    Of the class that works most; the host and the jitter of many nodes err as the law of steps does.
    """
    busiest = max(timeline.classes, key=lambda one: one.busy_s + one.optimizer_s)
    groups: dict[tuple[str, ...], float] = {}
    whole = by_law = 0.0
    for usage in busiest.usage:
        seen = _seen(busiest, usage)
        whole += usage.seconds * seen
        alone = usage.provenance == "analytic" and not usage.axis
        key = ("law",) if alone else (usage.kind, usage.axis, usage.provenance)
        groups[key] = groups.get(key, 0.0) + usage.error_s * seen
        by_law += usage.seconds * seen if alone else 0.0
    groups["traced",] = TRACED_LOG_STD * by_law
    spread = math.sqrt(math.fsum((error / whole) ** 2 for error in groups.values()))
    beside = busiest.host_s / timeline.step_s
    return math.hypot(spread, beside * of_step) if spread > 0 else of_step
