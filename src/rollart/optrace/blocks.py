"""A task composed once, whatever the number of times it runs: its operators in time, as maxima over what it waits for.

Owns `Settled` (durations of one class in one variant of a task, with what overlap costs) and `Block` (the joint placement of
all classes that meet inside the task). Invariant: the ends that a block gives for any inputs are, to the tick, those of
composing its operators in place; a lane is first in, first out. Why: a node starts at the latest of (input + lag), so a task
of thousands of operators is a small table of lags from its inputs (when each class may begin, when its data-parallel lane is
free) to its outputs, and a step is composed from hundreds of tasks instead of hundreds of thousands of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from rollart.optrace.composer import NEVER, Composer, Edge
from rollart.optrace.ops import Priced
from rollart.optrace.slowdown import Beside, basis_ticks, slowed
from rollart.optrace.tasks import BESIDE, Item

MOST_PASSES = 5
SETTLED = 1e-3
"""Durations are placed again until the task's length changes by less than this share, at most `MOST_PASSES` times."""
BLOCKING = frozenset({"tp", "ep"})
"""Axes whose collectives a rank issues and waits for in order, unless the framework hides a share of them."""

Meet = Callable[[Item], tuple[Hashable, int]]
"""A collective -> the meeting it takes part in, and how many classes come to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An operator alone: its price in ticks, and the share of them in which it runs inside the products beside it."""

    priced: Priced
    ticks: int
    hidden: float = 0.0

    @property
    def felt(self) -> int:
        """Ticks that its lane and what depends on it feel."""
        return max(1, round(self.ticks * (1.0 - self.hidden))) if self.hidden else self.ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One class in one variant of a task, alone: nothing before it is still running and no peer is late."""

    items: tuple[Item, ...]
    costs: tuple[Cost, ...]
    durations: tuple[int, ...]
    """Ticks with what overlap and shared links cost."""
    length: int
    """From the beginning to the end of the last operator that the next task waits for."""
    compute: int
    """Ticks of the compute lane; with `exposed` they are `length`."""
    exposed: dict[str, int]
    """Ticks by lane in which the compute lane waits for it."""
    passes: int
    overlapped: dict[str, int] = field(default_factory=dict)
    """Ticks of the compute lane beside a collective, by what the slowdown there rests on."""

    @property
    def has_beside(self) -> bool:
        """Whether any operator goes on beside the next task."""
        return any(item.lane == BESIDE for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """Where one class's items are in a composer; edges to what ends the task and what frees the lane beside it."""

    nodes: tuple[int, ...]
    ends: tuple[Edge, ...]
    freed: Edge | None


def lay(
    composer: Composer, items: Sequence[Item], costs: Sequence[Cost], durations: Sequence[int], *, rank: int, tag: Hashable,
    ready: Edge, free: Edge | None = None, meet: Meet | None = None,
) -> Laid:  # fmt: skip
    """Issue the items of one rank: not before `ready`, and on the lane beside not before `free`.

    `tag` tells this task's lanes from other tasks'; the lane beside is one for all of them.
    """
    nodes: list[int] = []
    last: dict[str, int] = {}
    blocked = -1
    for position, (item, cost, duration) in enumerate(zip(items, costs, durations, strict=True)):
        lane = item.lane
        after = [nodes[dep] for dep in item.deps]
        if lane == "compute":
            if blocked >= 0:
                after.append(nodes[blocked])
        elif lane in BLOCKING and not cost.hidden:
            if "compute" in last:
                after.append(last["compute"])
            blocked = position
        edges = []
        if lane not in last:
            edges.append(ready)
            if lane == BESIDE and free is not None:
                edges.append(free)
        meeting: Hashable = None
        expected = 1
        if meet is not None and item.op.stream == "comm":
            meeting, expected = meet(item)
        node = composer.run(
            rank, lane if lane == BESIDE else (lane, tag), item.op.name, duration, after=after, edges=edges,
            meeting=meeting, members=expected,
        )  # fmt: skip
        nodes.append(node)
        last[lane] = node
    ends = {lane: (composer.nodes[node].event, composer.nodes[node].duration) for lane, node in last.items()}
    freed = ends.pop(BESIDE, None)
    return Laid(nodes=tuple(nodes), ends=tuple(ends.values()), freed=freed)


def settle(
    items: Sequence[Item], costs: Sequence[Cost], factor: float, of: Beside, *, waits_for_all: bool = False
) -> Settled:
    """Durations of a task whose computation takes `factor` times as long, until overlap changes them no more.

    `waits_for_all`: what goes on beside a task ends it too, as at the end of a step.
    """
    solo = [
        max(1, round(cost.ticks * factor)) if item.lane == "compute" and factor != 1.0 else cost.felt
        for item, cost in zip(items, costs, strict=True)
    ]
    ops, lanes = [item.op for item in items], [item.lane for item in items]
    inside = {position for position, cost in enumerate(costs) if cost.hidden}
    durations, before, passes = solo, -1, 0
    while True:
        composer = Composer()
        ready = composer.graph.event(("the task begins",))
        laid = lay(composer, items, costs, durations, rank=0, tag=0, ready=(ready, 0))
        times = composer.graph.place()
        starts = [times[composer.nodes[node].event] for node in laid.nodes]
        ends = [*laid.ends, laid.freed] if waits_for_all and laid.freed is not None else laid.ends
        length = max((times[event] + lag for event, lag in ends), default=0)
        passes += 1
        if abs(length - before) <= SETTLED * length or passes >= MOST_PASSES:
            break
        before = length
        placed = [(start, start + duration) for start, duration in zip(starts, durations, strict=True)]
        again = slowed(ops, lanes, solo, placed, of, inside)
        if again == durations:
            break
        durations = again
    placed = [(start, start + duration) for start, duration in zip(starts, durations, strict=True)]
    compute, exposed = _exposed(items, starts, durations, length)
    return Settled(
        items=tuple(items), costs=tuple(costs), durations=tuple(durations), length=length, compute=compute,
        exposed=exposed, passes=passes, overlapped=basis_ticks(ops, lanes, solo, placed, of),
    )  # fmt: skip


def _exposed(
    items: Sequence[Item], starts: Sequence[int], durations: Sequence[int], length: int
) -> tuple[int, dict[str, int]]:
    """Ticks of the compute lane, and by other lane those in which it stands still for it."""
    ended_by: dict[int, str] = {}
    for item, start, duration in zip(items, starts, durations, strict=True):
        if item.lane != "compute":
            ended_by[start + duration] = item.lane
    exposed: dict[str, int] = {}
    free = compute = 0
    for item, start, duration in zip(items, starts, durations, strict=True):
        if item.lane == "compute":
            if start > free:  # a wait ends when what was waited for does
                lane = ended_by[start]
                exposed[lane] = exposed.get(lane, 0) + start - free
            free = start + duration
            compute += duration
    if length > free:
        lane = ended_by[length]
        exposed[lane] = exposed.get(lane, 0) + length - free
    return compute, exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a block waits for: `ready` or `free` of the class at a position among its classes."""

    what: str
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lags of all classes that meet in a task, from its inputs."""

    settled: tuple[Settled, ...]
    inputs: tuple[Input, ...]
    ends: tuple[tuple[int, ...], ...]
    """(members, inputs): lag of the end of the task, the host's lack included; far below 0 where it does not wait."""
    frees: tuple[tuple[int, ...] | None, ...]
    """The same of the lane beside; None where nothing of the task runs on it."""
    starts: tuple[tuple[tuple[int, ...], ...], ...]
    """(members, items, inputs): lag of each operator's start."""


def compiled(members: Sequence[Settled], lacks: Sequence[int], meets: Sequence[Meet]) -> Block:
    """The block of classes that meet, each with its own durations and `lacks` ticks added by its host."""
    composer = Composer()
    graph = composer.graph
    inputs: list[Input] = []
    events: list[int] = []
    laid: list[Laid] = []
    for member, settled in enumerate(members):
        ready, free = graph.event(("begin",)), graph.event(("free",))
        inputs.append(Input(what="ready", member=member))
        events.append(ready)
        if settled.has_beside:
            inputs.append(Input(what="free", member=member))
            events.append(free)
        laid.append(
            lay(composer, settled.items, settled.costs, settled.durations, rank=member, tag=0, ready=(ready, 0),
                free=(free, 0), meet=meets[member])
        )  # fmt: skip
    ends = [
        graph.event(("end",), [(events[inputs.index(Input(what="ready", member=member))], 0), *each.ends])
        for member, each in enumerate(laid)
    ]
    columns = []
    for event in events:
        given = {other: NEVER for other, into in enumerate(graph.edges) if not into}
        given[event] = 0
        columns.append(graph.place(given))
    return Block(
        settled=tuple(members),
        inputs=tuple(inputs),
        ends=tuple(
            tuple(column[end] + lack for column in columns) for end, lack in zip(ends, lacks, strict=True)
        ),
        frees=tuple(
            None if each.freed is None else tuple(column[each.freed[0]] + each.freed[1] for column in columns)
            for each in laid
        ),
        starts=tuple(
            tuple(tuple(column[composer.nodes[node].event] for column in columns) for node in each.nodes) for each in laid
        ),
    )  # fmt: skip
