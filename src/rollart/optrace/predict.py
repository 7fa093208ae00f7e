"""From a job to its prediction: capture, derive, price, compose, and what is to be said of the result.

Owns the order of the steps. Invariant: whatever cannot be is refused before the model is built; the constant of (framework,
device), the host's seconds and the jitter of many nodes are the closed form's, so that a traced prediction and
`perf.training.step_time` differ by what was traced and by nothing else; the same job gives the same prediction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollart.core.errors import ConfigError
from rollart.optrace.accounts import hardware_flops, log_std_of, overlap_shares, shares_of, trained_parameters
from rollart.optrace.analytic import analytic_trace
from rollart.optrace.assemble import compose_step
from rollart.optrace.classes import Straggler, check_called, classes_of, stage_parts
from rollart.optrace.costs import Pricer, check_profile, step_log_std
from rollart.optrace.data_parallel import gradient_bytes
from rollart.optrace.footprint import memory
from rollart.optrace.job import DEFAULT_DEVICE, Job
from rollart.optrace.ops import Trace
from rollart.optrace.plan_checks import check
from rollart.optrace.prediction import ClassFigures, Prediction
from rollart.optrace.sources import Source, resolve
from rollart.optrace.step_timeline import ClassTime, StepTimeline
from rollart.optrace.timeline import write_timeline
from rollart.optrace.transforms import derived
from rollart.perf.device_profile import DeviceProfile, overlap_model, read_profile
from rollart.perf.devices import GIB, Device, device
from rollart.perf.links import Fabric, fabric
from rollart.perf.overlap import DEFAULT_SMS, packaged
from rollart.perf.step_table import StepRow, StepTable, lengths_for, write_step_table
from rollart.perf.train_calibration import calibration
from rollart.perf.train_layers import CAST_BYTES, TrainingLaw
from rollart.perf.train_plan import DEFAULT_FRAMEWORK, Framework, TrainingPlan, framework
from rollart.perf.training import model_flops

TABLE_MICRO_BATCHES = (4, 8)
"""Micro-batches a stage in the rows of a table: enough that a bubble is a bubble, and two to tell it from the rest."""
OWN_INPUTS = (
    "a micro-batch is what the module's own inputs hold; seq and micro_batch only count the tokens of throughput"
)
TORCH_NATIVE = "torchtitan"
"""Beside the plain PyTorch that the table of frameworks has as its default."""
NODE = 8
"""Devices of a node, of which the slowest of many is waited for; a larger first tier counts the same."""
FULL_BYTES = 4
"""Of a number in 32 bits."""

Capture = Callable[[Source, Job], Trace]
"""(model, job) -> the trace of one rank, with what its `plan` says in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a job is priced with: read and checked once, whatever the number of steps."""

    job: Job
    source: Source
    device: Device
    fabric: Fabric
    framework: Framework
    scale: float
    scale_basis: str
    profile: DeviceProfile | None = None
    law: TrainingLaw = field(default_factory=lambda: calibration()[0].law)

    def pricer(self, plan: TrainingPlan) -> Pricer:
        """Prices operators of this job under `plan`."""
        return Pricer(
            device=self.device, fabric=self.fabric, law=self.law, framework=self.framework, plan=plan,
            profile=self.profile, scale=self.scale, scale_known=self.scale_basis == "measured",
            by_operators=self.source.kind == "module",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction and what it was made of."""

    prediction: Prediction
    timeline: StepTimeline
    trace: Trace
    took_s: Mapping[str, float] = field(default_factory=dict)


def by_numbers(source: Source, job: Job) -> Trace:
    """The trace that the numbers of a public model's shape say, without running it."""
    assert source.shape is not None
    return analytic_trace(source.shape, job.plan, framework(job.framework), calibration()[0].law)


def captured(source: Source, job: Job) -> Trace:
    """The real model's trace, or that of its numbers where the job says so. Imports torch and transformers to run a model.

    Sequence parallelism and full sharding are captured for frameworks that do them by torch's own libraries (DTensor, FSDP2)
    and derived for the others, which gather again what those keep, and for a module of one's own. Experts beside tensor
    parallelism run on shards of the tokens, which only a capture with sequence parallelism shows.
    """
    if not job.capture:
        return by_numbers(source, job)
    from rollart.optrace.capture import capture

    rules, plan = framework(job.framework), job.plan
    native = rules == DEFAULT_FRAMEWORK or TORCH_NATIVE in job.framework.lower()
    if source.kind == "module" or not native:
        experts = source.shape is not None and source.shape.experts > 0
        plan = replace(plan, sequence_parallel=plan.sequence_parallel and experts, shards=min(plan.shards, 2))
    return capture(source, plan, assume=job.assume, clip=job.clip, framework=rules)


def setting_of(job: Job) -> Setting:
    """What the job means, checked. Raises ConfigError before any model is built."""
    source = replace(resolve(job.model, max_layers=job.built_layers, captured=job.capture), own_dtype=job.own_dtype)
    check(job.plan, source.shape)
    profile = read_profile(job.profile) if job.profile is not None else None
    measured = {profile.device.name: profile.device} if profile is not None else {}
    name = job.device or next(iter(measured), DEFAULT_DEVICE)
    chip, links = device(name, measured), fabric(name, job.interconnect)
    _check_device(job, chip, profile)
    late = [name for name in job.late if not name.isdigit()]
    stragglers = _stragglers(job)
    if late:
        check_called(late, classes_of(job.plan, stragglers=stragglers, jitter=job.jitter, seed=job.seed))
    scale, basis = calibration()[0].scale(job.framework, links.chip)
    return Setting(
        job=job, source=source, device=chip, fabric=links, framework=framework(job.framework), scale=scale, scale_basis=basis,
        profile=profile,
    )  # fmt: skip


def _check_device(job: Job, chip: Device, profile: DeviceProfile | None) -> None:
    check_profile(profile, chip)
    dtype = job.plan.dtype
    if dtype in CAST_BYTES and chip.computes(dtype) != dtype:
        instead = chip.computes(dtype)
        raise ConfigError(
            f"dtype={dtype}: {chip.name} has no units for it and multiplies in {instead}; use dtype={instead}"
        )


def _stragglers(job: Job) -> tuple[Straggler, ...]:
    """The ranks that lag, each one of the job. Raises ConfigError."""
    found = {int(name): late for name, late in job.late.items() if name.isdigit()}
    beyond = [rank for rank in found if rank >= job.plan.devices]
    if beyond:
        raise ConfigError(f"straggler {beyond[0]}: ranks are 0 to {job.plan.devices - 1}; use {job.plan.devices - 1}")
    return tuple(Straggler(rank=rank, factor=late.factor, delay_s=late.delay_s) for rank, late in found.items())


def rank_trace(job: Job, *, capture: Capture = captured) -> Trace:
    """What one rank of a job runs, with all degrees of its plan. Raises ConfigError for what cannot be."""
    of = setting_of(job)
    return _derived(of, capture(of.source, job), job.plan)


def _derived(of: Setting, base: Trace, plan: TrainingPlan) -> Trace:
    plan = replace(plan, dtype=base.plan.dtype) if of.source.own_dtype else plan
    return derived(base, plan, of.framework)


def predict(job: Job, *, capture: Capture = captured) -> Prediction:
    """The prediction of a job. Raises ConfigError for what cannot be."""
    return predicted(setting_of(job), capture=capture).prediction


def predicted(of: Setting, *, capture: Capture = captured) -> Predicted:
    """A job's prediction, its timeline and its trace."""
    began = time.perf_counter()
    base = capture(of.source, of.job)
    return composed(of, base, of.job.plan, took_s={"capture": time.perf_counter() - began})


def composed(of: Setting, base: Trace, plan: TrainingPlan, *, took_s: Mapping[str, float] | None = None) -> Predicted:
    """The step of `plan` from the trace of one rank; only the micro-batches may differ from the plan it was captured for."""
    began = time.perf_counter()
    trace = _derived(of, base, plan)
    between = time.perf_counter()
    plan, job = trace.plan, of.job
    pricer = of.pricer(plan)
    timeline = compose_step(
        trace, plan, pricer.price, framework=of.framework, hidden=pricer.hidden_share, host=pricer, fabric=of.fabric,
        overlap=overlap_model(of.profile) if of.profile is not None else None, level=job.overlap_level,
        sms=of.device.sms or DEFAULT_SMS, jitter=job.jitter, seed=job.seed,
        delays={name: late.delay_s for name, late in job.late.items() if not name.isdigit()},
        stragglers=_stragglers(job),
    )  # fmt: skip
    prediction = _told(of, trace, plan, timeline, pricer)
    took = {**(took_s or {}), "derive": between - began, "compose": time.perf_counter() - between}
    return Predicted(prediction=prediction, timeline=timeline, trace=trace, took_s=took)


def _told(of: Setting, trace: Trace, plan: TrainingPlan, timeline: StepTimeline, pricer: Pricer) -> Prediction:
    law, shape = of.law, of.source.shape
    host_s = pricer.step_host_s
    nodes = plan.devices / min(NODE, of.fabric.domain)
    jitter_s = law.jitter * max(0.0, math.log2(max(1.0, nodes))) * (timeline.step_s + host_s)
    busiest = max(timeline.classes, key=lambda one: one.busy_s + one.optimizer_s)
    provenance, sources = shares_of(busiest)
    level = of.job.overlap_level if of.job.overlap_level is not None else packaged().default_level
    counted = hardware_flops(trace, plan, timeline)
    own = (OWN_INPUTS,) if of.source.kind == "module" else ()
    found = Prediction(
        model=of.source.name, parameters=float(shape.parameters) if shape else trained_parameters(trace), plan=plan,
        device=of.device.name, device_memory_bytes=of.device.memory_bytes, interconnect=of.job.interconnect,
        framework=of.job.framework, scale=of.scale, scale_basis=of.scale_basis,
        step_s=timeline.step_s + host_s + jitter_s,
        log_std=log_std_of(timeline, of_step=step_log_std(of.scale_basis == "measured")),
        model_flops=model_flops(shape, plan) if shape else counted.model, hardware_flops=counted.hardware,
        peak_flops=of.device.peak_flops(plan.dtype), host_s=host_s + busiest.host_s, jitter_s=jitter_s,
        classes=tuple(_class(trace, plan, of.framework, one, timeline) for one in timeline.classes),
        provenance=provenance, sources=sources, overlap_level=level, overlap_basis=overlap_shares(busiest),
        assumptions=tuple(f"{read.where}: {read.assumption}" for read in trace.reads),
        notes=tuple(dict.fromkeys((*of.source.notes, *own, *trace.notes, *_stated(of, plan)))),
    )  # fmt: skip
    return found if found.fits else replace(found, notes=(_does_not_fit(found), *found.notes))


def _stated(of: Setting, plan: TrainingPlan) -> Iterator[str]:
    """What is taken for granted of the framework and the device, and is in memory and seconds."""
    if of.scale_basis != "measured":
        yield (
            f"the constant of {of.job.framework} on {of.device.name} is its kin's: compare plans under it, and other "
            "frameworks or devices only where the intervals lie apart"
        )
    width = gradient_bytes(plan, of.framework)
    if width < FULL_BYTES:
        yield (
            f"gradients are held and reduced in {8 * width:.0f} bits (Megatron-Core: grad_reduce_in_fp32 off); in 32 bits they "
            "take twice the memory and twice the bytes"
        )
    else:
        yield f"gradients are held and reduced in {8 * width:.0f} bits"
    instead = of.device.computes(plan.dtype)
    if plan.dtype == "bf16" != instead:
        yield f"{of.device.name} has no units for bf16: products are priced as in {instead}"


def _class(
    trace: Trace, plan: TrainingPlan, rules: Framework, one: ClassTime, timeline: StepTimeline
) -> ClassFigures:  # fmt: skip
    places = stage_parts(trace, plan, timeline.head_layers)
    ends = (trace.embedding, trace.head)
    layers = [
        name for at, names in enumerate(places) if at % plan.pp == one.stage for name in names if name not in ends
    ]
    return ClassFigures(
        name=one.name, ranks=one.ranks, busy_s=one.busy_s, optimizer_s=one.optimizer_s, host_s=one.host_s,
        exposed_s=dict(one.exposed_s), comm_s=dict(one.comm_s), bubble_s=one.bubble_s,
        memory=memory(trace, plan, rules, one.stage, layers=layers),
    )  # fmt: skip


def _does_not_fit(found: Prediction) -> str:
    fullest = max(found.classes, key=lambda one: one.memory.total)
    parts = {name: getattr(fullest.memory, name) for name in ("weights", "gradients", "optimizer", "activations")}
    largest = max(parts, key=lambda name: parts[name])
    ways = {
        "activations": "more recomputation (--recompute), --cp or a smaller --micro-batch",
        "weights": "more --tp, --pp or --shards 3", "gradients": "more --tp, --pp or --shards 2",
        "optimizer": "more --dp with --shards 1, or more --tp or --pp",
    }  # fmt: skip
    return (
        f"{fullest.name} needs {fullest.memory.total / GIB:.1f} GiB of {found.device_memory_bytes / GIB:.1f} GiB, "
        f"{parts[largest] / GIB:.1f} of them for {largest}: this plan cannot run; use {ways[largest]}"
    )


# ---- what the command does


def run(
    job: Job, *, timeline: Path | None = None, table: Path | None = None, lengths: Sequence[int] = (),
    capture: Capture = captured,
) -> Prediction:  # fmt: skip
    """Predict, and write a timeline and a table of step times where paths are given."""
    of = setting_of(job)
    asked = [_at_length(job, length) for length in _table_lengths(job, lengths)] if table is not None else []
    for one in asked:
        check(one.plan, of.source.shape)
    found = predicted(of, capture=capture)
    if timeline is not None:
        slices, composed_s = found.timeline.slices("ops"), found.timeline.step_s
        write_timeline(timeline, found.prediction, slices, composed_s=composed_s)
    if table is not None:
        write_step_table(table, step_table(of, found.prediction, asked, capture=capture))
    return found.prediction


def _table_lengths(job: Job, lengths: Sequence[int]) -> tuple[int, ...]:
    plan = job.plan
    ways = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    uneven = [length for length in lengths if length % ways]
    if uneven:
        near = max(1, round(uneven[0] / ways)) * ways
        raise ConfigError(f"table length {uneven[0]}: {ways} ranks (cp x tp) share its tokens; use {near}")
    return lengths_for(plan.sequence, lengths, multiple=ways)


def _at_length(job: Job, length: int) -> Job:
    return replace(job, plan=replace(job.plan, sequence=length))


def step_table(of: Setting, found: Prediction, asked: Sequence[Job], *, capture: Capture = captured) -> StepTable:
    """Steps of the job at other lengths and numbers of micro-batches; of each length the model is captured once."""
    rows, peak = [], 0.0
    for job in asked:
        at = replace(of, job=job)
        base = capture(of.source, job)
        for plan in _table_plans(job.plan):
            one = composed(at, base, plan).prediction
            peak = max(peak, one.peak_memory_bytes)
            rows.append(
                StepRow(
                    sequence=plan.sequence, micro_batches=plan.micro_batches, seconds=one.step_s, log_std=one.log_std
                )
            )
    return StepTable(
        model=found.model, parameters=found.parameters, device=found.device, interconnect=found.interconnect,
        framework=found.framework, plan=found.plan, memory_bytes=peak, rows=tuple(rows), provenance=dict(found.provenance),
        sources=tuple(found.sources), notes=(*found.assumptions, *found.notes),
    )  # fmt: skip


def _table_plans(plan: TrainingPlan) -> Iterator[TrainingPlan]:
    for count in TABLE_MICRO_BATCHES:
        yield replace(plan, global_batch=count * plan.pp * plan.dp * plan.micro_batch)
