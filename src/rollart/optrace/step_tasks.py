"""The tasks of a step, each made, priced and settled once, and which rank classes meet in them.

Owns `Step`: all that is composed, with what was found out of it. Invariant: tasks with equal parts, variant and slowness are
one task, so what a step costs to compose grows with the kinds of layers and tasks and not with micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollart.optrace.blocks import Block, Cost, Meet, Settled, compiled, settle
from rollart.optrace.classes import EXPERTS, RankClass
from rollart.optrace.composer import seconds, ticks
from rollart.optrace.ops import Op, Part, Pass, Priced, Trace
from rollart.optrace.parallel_groups import is_experts
from rollart.optrace.schedules import Task
from rollart.optrace.slowdown import Beside
from rollart.optrace.tasks import Item, Variant, task_items, update_items
from rollart.perf.train_plan import Framework, TrainingPlan


class Host(Protocol):
    """What the host adds to a task (`costs.Pricer`)."""

    def host_s(
        self, parts: Sequence[Part], direction: Pass, recomputed: float = 0.0, ends: Sequence[Part] = ()
    ) -> float:
        """Seconds in which it launches one pass over `parts`, a layer each, and over embedding and head (`ends`);
        `recomputed`: share of the layers whose forward is run again."""

    def lack_s(self, busy_s: float, host_s: float) -> float:
        """Seconds that the device, busy for `busy_s`, waits for it."""


@dataclass(slots=True)
class Costs:
    """Prices of operators, each asked for once."""

    price: Callable[[Op], Priced]
    hidden: Callable[[Op], float] | None = None
    _known: dict[int, tuple[Op, Cost]] = field(default_factory=dict)

    def of(self, op: Op) -> Cost:
        """Its price, in ticks too."""
        known = self._known.get(id(op))
        if known is None:
            priced = self.price(op)
            hidden = self.hidden(op) if self.hidden is not None and op.stream == "comm" else 0.0
            known = (op, Cost(priced=priced, ticks=ticks(priced.seconds), hidden=hidden))
            self._known[id(op)] = known
        return known[1]


@dataclass(slots=True, kw_only=True)
class Step:
    """All that is composed, and what was found out of it once."""

    trace: Trace
    plan: TrainingPlan
    framework: Framework
    classes: tuple[RankClass, ...]
    places: tuple[tuple[str, ...], ...]
    """Names of the parts of each virtual stage."""
    orders: tuple[tuple[Task, ...], ...]
    """By stage."""
    costs: Costs
    beside: Beside
    host: Host | None = None
    _items: dict[Hashable, tuple[Item, ...]] = field(default_factory=dict)
    _settled: dict[Hashable, tuple[Settled, int]] = field(default_factory=dict)
    _blocks: dict[Hashable, Block] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Of each stage."""
        return len(self.places) // self.plan.pp

    def members(self, stage: int) -> list[RankClass]:
        """Classes of a stage."""
        return [one for one in self.classes if one.stage == stage]

    def items(self, place: int, which: Variant) -> tuple[Item, ...]:
        """Of a task of a virtual stage."""
        names = self.places[place]
        key = (names, which)
        if key not in self._items:
            self._items[key] = task_items([self.trace.parts[name] for name in names], which)
        return self._items[key]

    def settled(self, place: int, which: Variant, factor: float) -> tuple[Settled, int]:
        """A task of a virtual stage, and the ticks that its host adds."""
        key = (self.places[place], which, factor)
        if key not in self._settled:
            items = self.items(place, which)
            found = settle(items, [self.costs.of(item.op) for item in items], factor, self.beside)
            self._settled[key] = found, self._lack(self.places[place], which.kind, found)
        return self._settled[key]

    def update(self, stage: int, factor: float) -> tuple[Settled, int]:
        """What a stage does after its last backward, and the ticks that its host adds."""
        key = ("update", stage, factor)
        if key not in self._settled:
            names = self.stage_names(stage)
            items = update_items(self.trace, [self.trace.parts[name] for name in names], self.plan, self.framework)
            costs = [self.costs.of(item.op) for item in items]
            found = settle(items, costs, factor, self.beside, waits_for_all=True)
            self._settled[key] = found, self._lack(names, "update", found)
        return self._settled[key]

    def stage_names(self, stage: int) -> tuple[str, ...]:
        """Names of the parts of a stage, all chunks."""
        return tuple(name for place in range(stage, len(self.places), self.plan.pp) for name in self.places[place])

    def _lack(self, names: Sequence[str], kind: str, task: Settled) -> int:
        if self.host is None or not task.items:
            return 0
        ends = {self.trace.embedding, self.trace.head}
        parts = [self.trace.parts[name] for name in names if name not in ends]
        outer = [self.trace.parts[name] for name in names if name in ends]
        direction: Pass = "forward" if kind == "forward" else "optimizer" if kind == "update" else "backward"
        host_s = self.host.host_s(parts, direction, _recomputed(parts) if direction == "backward" else 0.0, ends=outer)
        if kind in ("input_grad", "weight_grad"):
            host_s *= len(task.items) / max(1, sum(len(part.backward) for part in (*parts, *outer)))
        lack_s = self.host.lack_s(seconds(task.length), host_s) if host_s > 0 else 0.0
        return ticks(lack_s) if lack_s > 0 else 0

    def block(self, place: int, which: Variant, members: Sequence[RankClass]) -> Block:
        """The joint placement of classes that meet in a task."""
        alike = members[0].factor if len(members) == 1 else tuple(one.index for one in members)
        key = (self.places[place], which, alike)
        if key not in self._blocks:
            found = [self.settled(place, which, one.factor) for one in members]
            self._blocks[key] = compiled(
                [settled for settled, _ in found],
                [lack for _, lack in found],
                [meeting_of(one, "task") for one in members],
            )
        return self._blocks[key]


def _recomputed(parts: Sequence[Part]) -> float:
    """Share of the layers of which at least half of the forward runs again."""
    again = [2 * sum(op.recomputed for op in part.backward) >= max(1, len(part.forward)) for part in parts]
    return sum(again) / len(again) if again else 0.0


def group_key(op: Op) -> str:
    """The group that a collective runs in, as `RankClass.partners` names it."""
    return EXPERTS if is_experts(op) else op.axis


def meeting_of(one: RankClass, tag: Hashable, layers: int = 0) -> Meet:
    """The meetings of a class in a task called `tag`; layers are counted from `layers`, so that stages can meet."""

    def meet(item: Item) -> tuple[Hashable, int]:
        axis = group_key(item.op)
        met = one.partners[axis]
        return ((tag, axis, met, item.layer - layers, item.op.id), len(met)) if len(met) > 1 else (None, 1)

    return meet


def coupled(members: Sequence[RankClass], items: Sequence[Item]) -> list[list[RankClass]]:
    """Classes of a stage in sets that meet nobody outside while they run `items`."""
    axes = {group_key(item.op) for item in items if item.op.stream == "comm"}
    root = {one.index: one.index for one in members}

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for one in members:
        for axis in axes:
            for other in one.partners[axis]:
                root[find(other)] = find(one.index)
    found: dict[int, list[RankClass]] = {}
    for one in members:
        found.setdefault(find(one.index), []).append(one)
    return list(found.values())
