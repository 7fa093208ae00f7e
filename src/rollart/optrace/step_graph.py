"""The graph of a step: every task of every rank class, the transfers between stages, and the update at the end.

Owns what waits for what across tasks and ranks. Invariant: composing task by task (`blocks`) or operator by operator gives the
same tick for every operator, with classes or with every rank. Why one graph: a late rank is felt through pipelines, layers and
gradients alike, and only a graph that has all three can say by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.optrace.blocks import Cost, Settled, lay
from rollart.optrace.classes import RankClass
from rollart.optrace.composer import NEVER, Composer, Edge, ticks
from rollart.optrace.ops import Op
from rollart.optrace.parallel_groups import send_name
from rollart.optrace.schedules import Task, TaskKind, source
from rollart.optrace.step_tasks import Step, coupled, meeting_of
from rollart.optrace.step_timeline import Detail
from rollart.optrace.tasks import Variant, variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A task (or the update) of a class in the graph."""

    rank_class: int
    kind: str
    micro_batch: int
    chunk: int
    begin: int
    end: int
    settled: Settled
    lack: int
    inputs: tuple[Edge | None, ...] = ()
    """What the block's columns are, as edges; none where operators were composed in place."""
    lags: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()
    """Operators composed in place."""
    joint: bool = False
    """Other classes meet in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A pipeline transfer in the graph: from `event` for `cost.ticks`."""

    sender: int
    receiver: int
    kind: TaskKind
    micro_batch: int
    chunk: int
    event: int
    cost: Cost
    waiting: tuple[int, ...]
    """Events at which a rank goes on that waited for it."""


@dataclass(slots=True, kw_only=True)
class Built:
    """The graph with all that was put into it."""

    composer: Composer
    begins: list[list[int]]
    """(classes, tasks)."""
    ends: list[list[int]]
    runs: list[Run] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    """By class, the event at which its update may begin."""
    free: dict[int, Edge] = field(default_factory=dict)
    """By class, what frees the lane beside, so far."""
    tails: dict[int, Edge] = field(default_factory=dict)
    """By class, the end of its last task's lane beside."""


def build(step: Step, detail: Detail) -> Built:
    """The graph of a step, its tasks as blocks (`tasks`) or as operators in place (`ops`)."""
    composer = Composer()
    graph = composer.graph
    origin = graph.event(("the step begins",))
    begins, ends, updates = [], [], []
    for one in step.classes:
        order = step.orders[one.stage]
        begins.append(
            [graph.event((task.kind, task.micro_batch, "chunk", task.chunk, "of", one.name)) for task in order]
        )
        ends.append([graph.event(("end of", task.kind, task.micro_batch, "of", one.name)) for task in order])
        updates.append(graph.event(("update of", one.name)))
        late = ticks(one.delay_s) if one.delay_s > 0 else 0
        graph.wait(begins[-1][0], [(origin, late)])
        for position in range(1, len(order)):
            graph.wait(begins[-1][position], [(ends[-1][position - 1], 0)])
        graph.wait(updates[-1], [(ends[-1][-1], 0)])
    built = Built(composer=composer, begins=begins, ends=ends, updates=updates)
    _connect(step, built)
    for stage in range(step.plan.pp):
        _run_stage(step, built, stage, detail)
    for one in step.classes:
        tail = built.free.get(one.index)
        if tail is not None:
            built.tails[one.index] = tail
            graph.wait(updates[one.index], [tail])
        _update(step, built, one)
    return built


def _variants(step: Step, order: Sequence[Task]) -> list[Variant]:
    """Of each task of an order."""
    seen: set[tuple[str, int]] = set()
    first = []
    for task in order:
        first.append((task.kind, task.chunk) not in seen)
        seen.add((task.kind, task.chunk))
    seen.clear()
    last = []
    for task in reversed(order):
        last.append((task.kind, task.chunk) not in seen)
        seen.add((task.kind, task.chunk))
    return [
        variant(task.kind, first=is_first, last=is_last, plan=step.plan, framework=step.framework)
        for task, is_first, is_last in zip(order, first, reversed(last), strict=True)
    ]


def _run_stage(step: Step, built: Built, stage: int, detail: Detail) -> None:
    members = step.members(stage)
    order = step.orders[stage]
    for position, (task, which) in enumerate(zip(order, _variants(step, order), strict=True)):
        place = task.chunk * step.plan.pp + stage
        for together in coupled(members, step.items(place, which)):
            if detail == "ops":
                _in_place(step, built, together, position, place, which)
            else:
                _as_block(step, built, together, position, place, which)


def _as_block(
    step: Step, built: Built, together: Sequence[RankClass], position: int, place: int, which: Variant
) -> None:
    graph = built.composer.graph
    block = step.block(place, which, together)
    inputs: list[Edge | None] = []
    for each in block.inputs:
        index = together[each.member].index
        inputs.append((built.begins[index][position], 0) if each.what == "ready" else built.free.get(index))

    def through(lags: Sequence[int]) -> list[Edge]:
        return [
            (edge[0], edge[1] + lag)
            for edge, lag in zip(inputs, lags, strict=True)
            if edge is not None and lag > NEVER // 2
        ]

    freed: dict[int, Edge] = {}
    for member, one in enumerate(together):
        task = step.orders[one.stage][position]
        end = built.ends[one.index][position]
        graph.wait(end, through(block.ends[member]))
        frees = block.frees[member]
        if frees is not None:
            freed[one.index] = (graph.event(("lane beside of", one.name), through(frees)), 0)
        built.runs.append(
            Run(rank_class=one.index, kind=task.kind, micro_batch=task.micro_batch, chunk=task.chunk,
                begin=built.begins[one.index][position], end=end, settled=block.settled[member],
                lack=step.settled(place, which, one.factor)[1], inputs=tuple(inputs), lags=block.starts[member],
                joint=len(together) > 1)
        )  # fmt: skip
    built.free.update(freed)


def _in_place(
    step: Step, built: Built, together: Sequence[RankClass], position: int, place: int, which: Variant
) -> None:
    for one in together:
        task = step.orders[one.stage][position]
        settled, lack = step.settled(place, which, one.factor)
        begin, end = built.begins[one.index][position], built.ends[one.index][position]
        laid = lay(
            built.composer, settled.items, settled.costs, settled.durations, rank=one.index, tag=position, ready=(begin, 0),
            meet=meeting_of(one, (one.stage, position)),
        )  # fmt: skip
        built.composer.graph.wait(end, [(event, lag + lack) for event, lag in ((begin, 0), *laid.ends)])
        if laid.freed is not None:
            built.free[one.index] = laid.freed
        built.runs.append(
            Run(rank_class=one.index, kind=task.kind, micro_batch=task.micro_batch, chunk=task.chunk, begin=begin, end=end,
                settled=settled, lack=lack, nodes=laid.nodes, joint=len(together) > 1)
        )  # fmt: skip


def _update(step: Step, built: Built, one: RankClass) -> None:
    graph = built.composer.graph
    settled, lack = step.update(one.stage, one.factor)
    begin = built.updates[one.index]
    laid = lay(
        built.composer, settled.items, settled.costs, settled.durations, rank=one.index, tag="update", ready=(begin, 0),
        meet=meeting_of(one, "update", len(step.stage_names(one.stage))),
    )  # fmt: skip
    waits = [(begin, 0), *laid.ends] + ([laid.freed] if laid.freed is not None else [])
    end = graph.event(("end of the update of", one.name), [(event, lag + lack) for event, lag in waits])
    built.runs.append(
        Run(rank_class=one.index, kind="update", micro_batch=-1, chunk=-1, begin=begin, end=end, settled=settled, lack=lack,
            nodes=laid.nodes)
    )  # fmt: skip


# ---- between stages


def _connect(step: Step, built: Built) -> None:
    """Edges from every task to the one that reads its output; between stages as a transfer.

    A framework that overlaps transfers issues the receive early and goes on after a send. One that does not waits for both,
    and its receive is there when the task before is done, so the sender waits for that (but interleaved schedules, whose
    receives are issued a round ahead).
    """
    graph = built.composer.graph
    blocking = not step.framework.overlap_pp
    rendezvous = blocking and step.plan.schedule != "interleaved"
    positions = [{task: position for position, task in enumerate(order)} for order in step.orders]
    sends: dict[int, Op] = {}
    last: dict[tuple[int, TaskKind], Edge] = {}
    for one in step.classes:
        for position, task in enumerate(step.orders[one.stage]):
            read = source(task, stage=one.stage, stages=step.plan.pp, chunks=step.chunks)
            if read is None:
                continue
            begin = built.begins[one.index][position]
            sender = one.partners["pp"][read[0]] if read[0] != one.stage else one.index
            at = positions[read[0]][read[1]]
            made = (built.ends[sender][at], 0)
            op = _send(step, sends, task, one.stage) if sender != one.index else None
            if op is None:
                graph.wait(begin, [made])
                continue
            waits = [made]
            if rendezvous and position:
                waits.append((built.ends[one.index][position - 1], 0))
            if (sender, task.kind) in last:
                waits.append(last[sender, task.kind])
            event = graph.event(("transfer for", *graph.labels[begin]), waits)
            cost = step.costs.of(op)
            arrived = (event, cost.ticks)
            last[sender, task.kind] = arrived
            after = built.begins[sender][at + 1] if at + 1 < len(built.begins[sender]) else built.updates[sender]
            waiting = (begin, after) if blocking else (begin,)
            for other in waiting:
                graph.wait(other, [arrived])
            built.transfers.append(
                Transfer(sender=sender, receiver=one.index, kind=task.kind, micro_batch=task.micro_batch,
                         chunk=read[1].chunk, event=event, cost=cost, waiting=waiting)
            )  # fmt: skip


def _send(step: Step, known: dict[int, Op], task: Task, stage: int) -> Op | None:
    """What is sent for `task` to run on `stage`; None where no bytes are."""
    place = task.chunk * step.plan.pp + stage + (0 if task.kind == "forward" else 1)
    part = step.trace.parts[step.places[place][0]]
    # without sequence parallelism tensor-parallel peers hold the same and send a part each (arXiv 2104.04473, section 4.1)
    payload = part.boundary_bytes / (1 if step.plan.sequence_parallel else step.plan.tp)
    if payload <= 0:
        return None
    if place not in known:
        known[place] = Op(
            id=0,
            name=send_name((place - 1) % step.plan.pp, place % step.plan.pp),
            kind="send",
            stream="comm",
            collective="send_recv",
            payload_bytes=payload,
            axis="pp",
        )
    return known[place]


def starts_of(run: Run, built: Built, times: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """(ticks of the inputs, lags of each operator from them)."""
    if run.nodes or not run.inputs:
        return (0,), tuple((times[built.composer.nodes[node].event],) for node in run.nodes)
    return tuple(NEVER if edge is None else times[edge[0]] + edge[1] for edge in run.inputs), run.lags
