"""From one process's profile to the step times of two: the predicting side of `echo_gloo.py`.

Owns the way through `optrace`: capture, derivation, a `DeviceProfile` of what was measured, pricing, composition. Invariant:
nothing here has seen a step of two processes, and every number that it rests on is in the `Profile`. Why a profile for each
way: a tensor-parallel rank runs other shapes, and DTensor and DDP take host time of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from echo_gloo_collectives import factors, slowest
from echo_gloo_job import WORLD, Size, Way, framework, numbers, plan, write_config
from echo_gloo_ranks import ranks
from rollart.optrace.accounts import log_std_of
from rollart.optrace.assemble import compose_step
from rollart.optrace.capture import capture
from rollart.optrace.costs import Pricer
from rollart.optrace.measured_ops import work_of
from rollart.optrace.ops import Op, Trace
from rollart.optrace.slowdown import Factors
from rollart.optrace.sources import resolve
from rollart.optrace.step_timeline import ClassTime, StepTimeline
from rollart.optrace.transforms import derived
from rollart.perf.device_profile import CollectiveTime, DeviceProfile, HostTimes, OpTime, Origin, Signature
from rollart.perf.devices import GIB, Device
from rollart.perf.links import Fabric
from rollart.perf.train_layers import TrainingLaw

CHIP = "one core"
PASSES = ("forward_s", "backward_s", "update_s")
OF_STEP_LOG_STD = 0.05
"""Of what the host adds, which is the difference of two measurements."""
TWO_SIDED_95 = 1.96
PROFILED_FOR = 50
"""Times the seconds of a microbenchmark for the steps of one way: each of its operators has its share of them."""
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a prediction may know: traces without a clock, one process's seconds by way, gloo between idle processes."""

    size: Size
    traces: Mapping[Way, Trace]
    processes: Sequence[Mapping[str, Any]]
    """Of copies of one process that ran at once, each alone in its world."""
    gloo: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]


def profiled(size: Size, ways: Sequence[Way], scratch: Path, *, cores: Sequence[int], seconds: float) -> Profile:
    """Capture each way and measure what its operators and collectives ask for. `seconds`: of each microbenchmark."""
    traces = {way: traced(way, size, scratch) for way in ways}
    spec = {"size": numbers(size), "ways": list(ways), "seconds": PROFILED_FOR * seconds, "seed": SEED}
    processes = ranks("operators", spec, scratch, cores=cores)
    beside = {"all_reduce": sizes(traces["data"])["all_reduce"]} if "data" in traces else {}
    asked: dict[str, set[float]] = {}
    for trace in traces.values():
        for op, payloads in sizes(trace).items():
            asked.setdefault(op, set()).update(payloads)
    gloo = ranks(
        "collectives", {"sizes": {op: sorted(found) for op, found in asked.items()}, "beside": beside, "seconds": seconds},
        scratch, cores=cores,
    )  # fmt: skip
    used = ("torch", "transformers", "numpy")
    return Profile(
        size=size, traces=traces, processes=processes, gloo=gloo, versions={name: version(name) for name in used}
    )


def traced(way: Way, size: Size, folder: Path) -> Trace:
    """The trace of one rank, from the model's config alone."""
    asked, how = plan(way, size), framework()
    captured = capture(resolve(str(write_config(size, folder))), asked, clip=False, framework=how)
    return derived(captured, asked, how)


def sizes(trace: Trace) -> dict[str, list[float]]:
    """Payloads by operation that a composed step of this trace communicates."""
    found: dict[str, set[float]] = {}
    for part in trace.parts.values():
        for op in (*part.forward, *part.backward, *part.optimizer):
            if op.stream == "comm":
                found.setdefault(op.collective, set()).add(op.payload_bytes)
        if trace.plan.pp > 1 and part.boundary_bytes > 0:
            found.setdefault("send_recv", set()).add(part.boundary_bytes)
    return {op: sorted(payloads) for op, payloads in found.items()}


# ---- the profile as optrace reads it


def device_profile(profile: Profile, way: Way) -> DeviceProfile:
    """What one process says of a way: medians over steps and copies.

    Host seconds are what a forward and a backward pass take beyond their operators, by operator; operators that watching made
    longer than the whole are shortened to it. The update is its operators stretched to what it takes.
    """
    found = [process[way] for process in profile.processes]
    rows = op_times([row for one in found for row in one["rows"]])
    known = DeviceProfile(
        device=core_of(rows), origin=Origin(kind="cpu", versions=profile.versions), ops=rows,
        collectives=collective_times(profile.gloo),
    )  # fmt: skip
    trace = profile.traces[way]
    price = pricer_of(known, way, profile.size).price
    passes = {name: statistics.median(value for one in found for value in one[name]) for name in PASSES}
    sums = {name: math.fsum(price(op).seconds for op in _ops(trace, name) if op.stream == "compute") for name in PASSES}
    counts = {name: len(_ops(trace, name)) for name in PASSES}
    both = passes["forward_s"] + passes["backward_s"]
    shrink = min(1.0, both / (sums["forward_s"] + sums["backward_s"]))
    updating = {work_of(op).signature for op in _ops(trace, "update_s")}
    stretch = passes["update_s"] / sums["update_s"]
    ahead, back = (max(0.0, passes[name] - shrink * sums[name]) / counts[name] for name in ("forward_s", "backward_s"))
    return replace(
        known,
        ops=tuple(
            replace(row, seconds=row.seconds * (stretch if row.signature in updating else shrink)) for row in rows
        ),
        host=HostTimes(op_s=0.0, recorded_op_s=ahead, backward_op_s=back, serial=True),
    )  # fmt: skip


def _ops(trace: Trace, name: str) -> list[Op]:
    """All operators of one pass over the whole model."""
    parts = [trace.parts[part] for part in (trace.embedding, *trace.layers, trace.head)]
    of = {"forward_s": lambda part: part.forward, "backward_s": lambda part: part.backward}
    return [op for part in parts for op in of.get(name, lambda part: part.optimizer)(part)]


def pricer_of(known: DeviceProfile, way: Way, size: Size) -> Pricer:
    return Pricer(
        device=known.device, fabric=loopback(known.device), law=TrainingLaw(), framework=framework(),
        plan=plan(way, size), profile=known,
    )  # fmt: skip


def op_times(rows: Sequence[Mapping[str, Any]]) -> tuple[OpTime, ...]:
    """One row for each operator. A product is measured whatever transposes its operands, so it stands for both layouts."""
    merged: dict[Signature, list[float]] = {}
    first: dict[Signature, OpTime] = {}
    for row in rows:
        for layout in ("", "tn") if row["kind"] == "gemm" else ("",):
            work = {name: row[name] for name in ("kind", "name", "dtype", "flops", "moved_bytes")}
            one = OpTime(**work, shape=tuple(row["shape"]), layout=layout, seconds=1.0, log_std=0.0)
            first.setdefault(one.signature, one)
            merged.setdefault(one.signature, []).extend(row["seconds"])
    return tuple(_timed(first[key], seconds) for key, seconds in merged.items())


def _timed(one: OpTime, seconds: Sequence[float]) -> OpTime:
    return OpTime(
        kind=one.kind, name=one.name, dtype=one.dtype, shape=one.shape, flops=one.flops, moved_bytes=one.moved_bytes,
        layout=one.layout, seconds=statistics.median(seconds), log_std=log_std(seconds),
    )  # fmt: skip


def log_std(seconds: Sequence[float]) -> float:
    """Standard error of the log of their median, 0 for one."""
    if len(seconds) < 2:
        return 0.0
    return 1.25 * statistics.stdev(math.log(value) for value in seconds) / math.sqrt(len(seconds))


def core_of(rows: Sequence[OpTime]) -> Device:
    """A device of which no sheet says anything: the best rates that were reached."""
    flops: dict[str, float] = {"fp32": 1.0}
    for row in rows:
        if row.dtype == "fp32":
            flops["fp32"] = max(flops["fp32"], row.flops / row.seconds)
    rate = max(row.moved_bytes / row.seconds for row in rows)
    return Device(
        name=CHIP, flops=flops, memory_bytes=4.0 * GIB, memory_bytes_per_s=rate, link_bytes_per_s=rate, link="pcie",
        source="measured",
    )  # fmt: skip


def collective_times(gloo: Sequence[Mapping[str, Any]]) -> tuple[CollectiveTime, ...]:
    return tuple(
        CollectiveTime(
            op=op, library="gloo", ranks=WORLD, domains=1, payload_bytes=payload, seconds=statistics.median(seconds),
            log_std=log_std(seconds),
        )
        for op, payloads in slowest(gloo).items()
        for payload, seconds in payloads.items()
    )  # fmt: skip


def loopback(device: Device) -> Fabric:
    """Both ranks in one domain; its rate is not used where a collective was measured."""
    rate = device.link_bytes_per_s
    return Fabric(
        chip=CHIP, kind="pcie", intra_bytes_per_s=rate, inter_bytes_per_s=rate, domain=WORLD, provenance="measured"
    )


# ---- the prediction


def prediction(profile: Profile) -> dict[str, Any]:
    """Seconds of each way with a 95 % interval, where they go, and what they rest on."""
    longer = factors(profile.gloo)
    ways: dict[str, Any] = {}
    for way in profile.traces:
        known = device_profile(profile, way)
        ways[way] = _said(composed(way, profile, known, longer), known, profile, way)
    return {"ways": ways, "beside": {name: round(value, 4) for name, value in longer.items()}}


def composed(way: Way, profile: Profile, known: DeviceProfile, longer: Mapping[str, float]) -> StepTimeline:
    """The step on the timeline; computation and communication of one core slow each other by two measured factors."""
    pricer = pricer_of(known, way, profile.size)
    beside = Factors(compute=longer["computation"] - 1, comm=longer["communication"] - 1)
    return compose_step(
        profile.traces[way], plan(way, profile.size), pricer.price, framework=framework(), hidden=pricer.hidden_share,
        host=pricer, overlap=beside, level=1,
    )  # fmt: skip


def _said(timeline: StepTimeline, known: DeviceProfile, profile: Profile, way: Way) -> dict[str, Any]:
    spread = log_std_of(timeline, of_step=OF_STEP_LOG_STD)
    low, high = (timeline.step_s * math.exp(sign * TWO_SIDED_95 * spread) for sign in (-1, 1))
    classes = {
        one.name: {
            "busy_s": one.busy_s, "optimizer_s": one.optimizer_s, "host_s": one.host_s, "bubble_s": one.bubble_s,
            "slowed_s": one.slowed_s, "exposed_s": dict(one.exposed_s), "comm_s": dict(one.comm_s),
            "provenance_s": _provenance(one),
        }
        for one in timeline.classes
    }  # fmt: skip
    alone = [process[way] for process in profile.processes]
    assert known.host is not None
    said = (*PASSES, "reference_s")
    return {
        "seconds": timeline.step_s, "log_std": spread, "interval_s": [low, high], "classes": classes,
        "one_process_s": {name: statistics.median(value for one in alone for value in one[name]) for name in said},
        "host_op_s": {"forward": known.host.recorded_op_s, "backward": known.host.backward_op_s},
        "notes": list(profile.traces[way].notes),
    }  # fmt: skip


def _provenance(one: ClassTime) -> dict[str, float]:
    found = {"measured": 0.0, "interpolated": 0.0, "analytic": 0.0}
    for usage in one.usage:
        found[usage.provenance] += usage.seconds
    return found
