"""A training step from the trace of one rank: tasks on a schedule, ranks that wait for each other, seconds by cause.

Owns `compose_step` and the accounts of each class. Invariants: the seconds of a class are its step, to the tick; the step does
not depend on how many ranks a class stands for; a step without length, or a class that never computes, is an error and no
result. Why here: this is the one place that knows the trace, the schedule, the prices and the classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rollart.core.errors import ConfigError, InvariantBroken
from rollart.optrace.blocks import Settled
from rollart.optrace.classes import RankClass, Straggler, check_called, rank_classes, stage_parts
from rollart.optrace.composer import seconds
from rollart.optrace.ops import Op, Priced, Trace
from rollart.optrace.schedules import order
from rollart.optrace.slowdown import Beside, Factors
from rollart.optrace.step_graph import Built, Run, build, starts_of
from rollart.optrace.step_tasks import Costs, Host, Step
from rollart.optrace.step_timeline import ClassTime, Detail, Placed, Sent, StepTimeline, Usage
from rollart.optrace.tasks import BESIDE, check_deferred
from rollart.perf.links import Fabric
from rollart.perf.overlap import DEFAULT_SMS, Level, OverlapModel
from rollart.perf.train_plan import Framework, TrainingPlan

DERIVED = ("tp", "cp", "dp", "ep", "shards")
"""Degrees that must be in the operators already."""


def compose_step(
    trace: Trace, plan: TrainingPlan, price: Callable[[Op], Priced], *, framework: Framework,
    hidden: Callable[[Op], float] | None = None, host: Host | None = None, fabric: Fabric | None = None,
    overlap: OverlapModel | Factors | None = None, level: Level | None = None, sms: int = DEFAULT_SMS,
    delays: Mapping[str, float] | None = None, stragglers: Sequence[Straggler] = (), jitter: float = 0.0, seed: int = 0,
    every_rank: bool = False, detail: Detail = "tasks",
) -> StepTimeline:  # fmt: skip
    """One optimiser step of `plan`, from a trace that has its degrees.

    `price`: of an operator alone; `hidden`: share of a collective that its framework runs inside the products beside it,
    where it is not felt; `host`: what launching adds;
    `fabric`: its links are shared by collectives that run at once (None: no one slows another); `overlap`, `level`, `sms`:
    what computation beside a collective costs (level 0: nothing); `delays`: seconds by name of a class, `stragglers`,
    `jitter` (standard deviation of the log of a rank's slowness, drawn from `seed`): who is late.
    `every_rank` and `detail="ops"` compose without rank classes and without blocks, to check those against.
    Raises `ConfigError` for a trace of another plan, a schedule that it cannot have or a class that does not exist,
    `DeadlockError` when ranks wait for each other in a circle, `InvariantBroken` for a result that is none.
    """
    differ = [
        f"{name} {getattr(trace.plan, name)}" for name in DERIVED if getattr(trace.plan, name) != getattr(plan, name)
    ]
    if differ:
        asked = ", ".join(f"{name} {getattr(plan, name)}" for name in DERIVED)
        raise ConfigError(
            f"trace of {trace.model} has {', '.join(differ)}, the plan {asked}; derive the trace for the plan first"
        )
    chunks = plan.chunks if plan.schedule == "interleaved" else 1
    orders = tuple(
        order(plan.schedule, stages=plan.pp, stage=stage, micro_batches=plan.micro_batches, chunks=chunks)
        for stage in range(plan.pp)
    )
    if plan.schedule == "zero_bubble":
        check_deferred(trace.parts.values())
    costs = Costs(price=price, hidden=hidden)
    head_layers = _head_layers(trace, costs)
    classes = rank_classes(trace, plan, stragglers=stragglers, jitter=jitter, seed=seed, every_rank=every_rank)
    step = Step(
        trace=trace, plan=plan, framework=framework, classes=_delayed(classes, delays or {}),
        places=stage_parts(trace, plan, head_layers), orders=orders, costs=costs,
        beside=Beside(plan=plan, overlap=overlap, level=level, sms=sms, fabric=fabric), host=host,
    )  # fmt: skip
    built = build(step, detail)
    times = built.composer.graph.place()
    whole = max(times[run.end] for run in built.runs)
    if whole <= 0:
        raise InvariantBroken(f"the step of {trace.model} has no length; no operator was composed")
    under_way = _under_way(built)
    placed = tuple(_placed(run, built, times) for run in built.runs)
    return StepTimeline(
        step_s=seconds(whole),
        classes=tuple(_account(one, step, built, times, whole, under_way) for one in step.classes),
        head_layers=head_layers,
        passes=max(run.settled.passes for run in built.runs),
        placed=placed,
        sent=tuple(
            Sent(rank_class=each.sender, kind=each.kind, micro_batch=each.micro_batch, chunk=each.chunk,
                 begin=times[each.event], end=times[each.event] + each.cost.ticks, provenance=each.cost.priced.provenance)
            for each in built.transfers
        ),
    )  # fmt: skip


def _head_layers(trace: Trace, costs: Costs) -> float:
    """What the output head computes in a micro-batch, in mean layers."""

    def work(name: str) -> int:
        part = trace.parts[name]
        return sum(costs.of(op).ticks for op in (*part.forward, *part.backward) if op.stream == "compute")

    layers = sum(work(name) * count for name, count in Counter(trace.layers).items())
    return work(trace.head) * len(trace.layers) / layers if layers else 0.0


def _delayed(classes: tuple[RankClass, ...], delays: Mapping[str, float]) -> tuple[RankClass, ...]:
    check_called(delays, classes)
    for name, delay_s in delays.items():
        if not 0 <= delay_s < float("inf"):
            raise ConfigError(f"delay of {name}: {delay_s} s; need 0 or more")
    return tuple(replace(one, delay_s=one.delay_s + delays.get(one.name, 0.0)) for one in classes)


def _placed(run: Run, built: Built, times: Sequence[int]) -> Placed:
    inputs, lags = starts_of(run, built, times)
    return Placed(
        rank_class=run.rank_class, kind=run.kind, micro_batch=run.micro_batch, chunk=run.chunk, begin=times[run.begin],
        end=times[run.end], settled=run.settled, inputs=inputs, lags=lags,
    )  # fmt: skip


# ---- accounts


def _account(
    one: RankClass, step: Step, built: Built, times: Sequence[int], whole: int, under_way: Mapping[int, int]
) -> ClassTime:
    """Where a class spends the step. What it waits for between tasks is a transfer as far as one was under way."""
    runs = [run for run in built.runs if run.rank_class == one.index]
    tasks, update = [run for run in runs if run.kind != "update"], next(run for run in runs if run.kind == "update")
    exposed: Counter[str] = Counter()
    busy = slowed = host = bubble = 0
    before = 0
    for run in tasks:
        settled, begin = run.settled, times[run.begin]
        sending = min(begin - before, under_way.get(run.begin, 0))
        exposed["pp"] += sending
        bubble += begin - before - sending
        busy += settled.compute
        slowed += settled.compute - _alone(settled, one.factor)
        host += run.lack
        exposed.update(settled.exposed)
        late = times[run.end] - begin - settled.length - run.lack
        if settled.has_beside and not run.joint:
            exposed[BESIDE] += late
        else:
            bubble += late
        before = times[run.end]
    tail = built.tails.get(one.index)
    draining = min(times[update.begin] - before, max(0, times[tail[0]] + tail[1] - before)) if tail is not None else 0
    exposed[BESIDE] += draining
    left = times[update.begin] - before - draining
    sending = min(left, under_way.get(update.begin, 0))
    exposed["pp"] += sending
    exposed.update(update.settled.exposed)
    alone = update.settled.compute + sum(update.settled.exposed.values()) + update.lack
    bubble += left - sending + whole - times[update.begin] - alone
    if busy == 0:
        raise InvariantBroken(f"{one.name} of {step.trace.model} computes nothing: its step is all bubble")
    return ClassTime(
        rank_class=one, busy_s=seconds(busy), slowed_s=seconds(slowed), optimizer_s=seconds(update.settled.compute),
        host_s=seconds(host + update.lack), bubble_s=seconds(bubble),
        exposed_s={axis: seconds(waited) for axis, waited in sorted(exposed.items()) if waited},
        comm_s=_communication(one, built, runs), usage=_usage(one, built, runs), overlapped_s=_overlapped(runs),
    )  # fmt: skip


def _under_way(built: Built) -> dict[int, int]:
    """By event, ticks of the longest transfer that a rank waited for there."""
    found: dict[int, int] = {}
    for each in built.transfers:
        for event in each.waiting:
            found[event] = max(found.get(event, 0), each.cost.ticks)
    return found


def _alone(settled: Settled, factor: float) -> int:
    """Ticks of the compute lane without overlap."""
    return sum(
        max(1, round(cost.ticks * factor)) if factor != 1.0 else cost.ticks
        for item, cost in zip(settled.items, settled.costs, strict=True)
        if item.lane == "compute"
    )


def _communication(one: RankClass, built: Built, runs: Sequence[Run]) -> dict[str, float]:
    """Seconds by axis, hidden or not."""
    found: Counter[str] = Counter()
    for settled, count in _counted(runs):
        for item, cost, duration in zip(settled.items, settled.costs, settled.durations, strict=True):
            if item.op.stream == "comm":
                found[item.op.axis] += count * (duration + cost.ticks - cost.felt)
    for each in built.transfers:
        if one.index in (each.sender, each.receiver):
            found["pp"] += each.cost.ticks
    return {axis: seconds(spent) for axis, spent in sorted(found.items())}


def _overlapped(runs: Sequence[Run]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for settled, count in _counted(runs):
        found.update({basis: count * spent for basis, spent in settled.overlapped.items()})
    return {basis: seconds(spent) for basis, spent in sorted(found.items())}


def _counted(runs: Sequence[Run]) -> list[tuple[Settled, int]]:
    counts = Counter(id(run.settled) for run in runs)
    by_id = {id(run.settled): run.settled for run in runs}
    return [(by_id[key], count) for key, count in counts.items()]


def _usage(one: RankClass, built: Built, runs: Sequence[Run]) -> tuple[Usage, ...]:
    """What the seconds of a class's operators rest on."""
    found: dict[tuple[str, str, str, str], list[float]] = {}

    def add(op: Op, priced: Priced, spent: float) -> None:
        key = (op.kind, op.axis if op.stream == "comm" else "", priced.provenance, priced.source)
        sums = found.setdefault(key, [0.0, 0.0])
        sums[0] += spent
        sums[1] += spent * priced.log_std

    for settled, count in _counted(runs):
        for item, cost, duration in zip(settled.items, settled.costs, settled.durations, strict=True):
            add(item.op, cost.priced, count * seconds(duration + cost.ticks - cost.felt))
    for each in built.transfers:
        if one.index in (each.sender, each.receiver):
            key = ("send", "pp", each.cost.priced.provenance, each.cost.priced.source)
            sums = found.setdefault(key, [0.0, 0.0])
            sums[0] += seconds(each.cost.ticks)
            sums[1] += seconds(each.cost.ticks) * each.cost.priced.log_std
    return tuple(
        Usage(kind=kind, axis=axis, provenance=provenance, source=basis, seconds=sums[0], error_s=sums[1])  # type: ignore[arg-type]
        for (kind, axis, provenance, basis), sums in sorted(found.items())
    )
