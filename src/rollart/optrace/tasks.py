"""What one rank issues in one task of a schedule, and in the update at the end of a step: operators in order, with lanes.

Owns the reading of a trace's data-parallel operators. Weights that are gathered (all-gathers over `dp`, with the passes that
only feed them) are issued one layer ahead; gradients that are reduced, and all that follows from them, run beside computation
and nothing in the task waits for them. Invariant: items depend on earlier items only, every operator of the parts is issued
exactly once a step or once a micro-batch, as its kind says, and nothing is issued for which no part holds an operator. Why
here: this is what frameworks do by themselves, whatever the schedule and whatever the operators cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.schedules import TaskKind
from rollart.perf.train_plan import Framework, TrainingPlan

BESIDE = "dp"
"""The lane that goes on while the next task runs."""
Role = Literal["main", "ahead", "behind", "out"]


@dataclass(frozen=True, slots=True)
class Item:
    """An operator as it is issued; `deps` are positions in the task's list."""

    op: Op
    deps: tuple[int, ...]
    lane: str
    """`compute`, `copy`, or the axis of a collective."""
    layer: int
    """Position of its part in the task, in the order of execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What tells the tasks of one chunk apart: the way, and which of the step's data-parallel operators it carries."""

    kind: TaskKind
    gathers: bool
    reduces: bool
    ahead: bool = True
    """Weights are gathered a layer ahead, else when they are needed."""


def variant(kind: TaskKind, *, first: bool, last: bool, plan: TrainingPlan, framework: Framework) -> Variant:
    """The variant of a chunk's `first` forward, `last` backward or any other task.

    Gradients are reduced with every micro-batch where they are sharded (stages 2 and 3), else with the last one, or after
    it where the framework overlaps nothing; weights are gathered with every micro-batch where they are sharded (stage 3).
    """
    late = plan.shards < 2 and not framework.overlap_dp
    if kind == "forward":
        return Variant(kind=kind, gathers=plan.shards == 3 or first, reduces=False, ahead=not late)
    return Variant(kind=kind, gathers=plan.shards == 3, reduces=(plan.shards >= 2 or last) and not late)


def task_items(parts: Sequence[Part], which: Variant) -> tuple[Item, ...]:
    """Items of one task through `parts`, first to last as the forward runs them."""
    forward = which.kind == "forward"
    passes = [part.forward for part in parts] if forward else [part.backward for part in reversed(parts)]
    listed = _Listed()
    known: dict[int, tuple[Role, ...]] = {}
    roles = []
    for ops in passes:
        if id(ops) not in known:
            known[id(ops)] = _roles(ops, which)
        roles.append(known[id(ops)])
    for layer, ops in enumerate(passes):
        if layer == 0:
            listed.add(ops, roles[0], 0, {"ahead"})
        if layer + 1 < len(passes):  # the next layer's weights are under way while this one computes
            listed.add(passes[layer + 1], roles[layer + 1], layer + 1, {"ahead"})
        listed.add(ops, roles[layer], layer, {"main", "behind"})
        listed.close_layer()
    return tuple(listed.items)


def update_items(trace: Trace, parts: Sequence[Part], plan: TrainingPlan, framework: Framework) -> tuple[Item, ...]:
    """Items from the last backward to the end of the step: late reductions, the norm and the clip, the optimizer."""
    listed = _Listed()
    if plan.shards < 2 and not framework.overlap_dp:
        which = Variant(kind="backward", gathers=False, reduces=True)
        for layer, part in enumerate(reversed(parts)):
            listed.add(part.backward, _roles(part.backward, which), layer, {"behind"})
    if listed.items:  # one lane, so the last of them ends last
        listed.exits = (len(listed.items) - 1,)
    if trace.step:
        listed.add(trace.step, _all_main(trace.step), len(parts), {"main"})
        listed.close_layer()
    exits = listed.exits
    for layer, part in enumerate(parts):
        listed.exits = exits
        listed.add(part.optimizer, _all_main(part.optimizer), len(parts) + 1 + layer, {"main"})
    return tuple(listed.items)


# ---- roles


def _roles(ops: Sequence[Op], which: Variant) -> tuple[Role, ...]:
    """What becomes of each operator of a pass in a task of this variant."""
    place = {op.id: position for position, op in enumerate(ops)}
    gathers = {position for position, op in enumerate(ops) if op.axis == "dp" and op.collective == "all_gather"}
    reduces = {position for position, op in enumerate(ops) if op.axis == "dp"} - gathers
    behind = _descendants(ops, place, lambda position: position in reduces)
    ahead = _feeding(ops, place, gathers) if which.ahead else set()
    weights = _descendants(ops, place, lambda position: ops[position].weight_gradient)
    found: list[Role] = []
    for position in range(len(ops)):
        role: Role = "behind" if position in behind else "ahead" if position in ahead else "main"
        gathered = role == "ahead" or position in gathers
        wanted = which.reduces if role == "behind" else which.gathers if gathered else True
        if which.kind in ("input_grad", "weight_grad"):
            wanted = wanted and (position in weights) == (which.kind == "weight_grad")
        found.append(role if wanted else "out")
    return tuple(found)


def _all_main(ops: Sequence[Op]) -> tuple[Role, ...]:
    return tuple("main" for _ in ops)


def _descendants(ops: Sequence[Op], place: dict[int, int], is_root: Callable[[int], bool]) -> set[int]:
    """Positions of the roots and of all that depends on them."""
    found: set[int] = set()
    for position, op in enumerate(ops):
        if is_root(position) or any(place[dep] in found for dep in op.deps if dep in place):
            found.add(position)
    return found


def _feeding(ops: Sequence[Op], place: dict[int, int], gathers: set[int]) -> set[int]:
    """The gathers that wait for nothing else of their pass, with the passes whose results go nowhere but into them."""
    users: list[list[int]] = [[] for _ in ops]
    for position, op in enumerate(ops):
        for dep in op.deps:
            if dep in place:
                users[place[dep]].append(position)
    feeding = set(gathers)
    for position in reversed(range(len(ops))):
        uses = users[position]
        if uses and ops[position].kind == "pass" and all(user in feeding for user in uses):
            feeding.add(position)
    found: set[int] = set()
    for position in sorted(feeding):  # what needs anything else of its own layer cannot be issued before that layer
        if all(place[dep] in found for dep in ops[position].deps if dep in place):
            found.add(position)
    return found


# ---- the list


class _Listed:
    """Items under construction."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.exits: tuple[int, ...] = ()
        """What an operator that depends on nothing in its part waits for: the end of the part before."""
        self._at: dict[tuple[int, int], int] = {}
        self._last_compute: list[int] = []
        """By closed layer, the last compute item so far (-1: none)."""
        self._last_main: dict[str, int] = {}

    def add(self, ops: Sequence[Op], roles: Sequence[Role], layer: int, wanted: Iterable[Role]) -> None:
        """Issue those of a part's operators that have one of the wanted roles."""
        wanted = set(wanted)
        for op, role in zip(ops, roles, strict=True):
            if role not in wanted:
                continue
            deps = tuple(self._at[layer, dep] for dep in op.deps if (layer, dep) in self._at)
            if role == "ahead":
                # it may start when the layer before its own begins to compute
                before = self._last_compute[layer - 2] if layer >= 2 else -1
                deps = (*deps, before) if before >= 0 else deps
            elif not any(self.items[dep].lane != BESIDE for dep in deps):
                deps = (*deps, *self.exits)
            lane = BESIDE if role in ("ahead", "behind") else op.axis if op.stream == "comm" else op.stream
            position = len(self.items)
            self._at[layer, op.id] = position
            self.items.append(Item(op, deps, lane, layer))
            if role == "main":
                self._last_main[lane] = position

    def close_layer(self) -> None:
        """The next part begins: what depends on nothing in it waits for all that this one ended with."""
        compute = self._last_main.get("compute", -1)
        self._last_compute.append(compute)
        last = max(self._last_main.values(), default=-1)
        self.exits = tuple(sorted({compute, last} - {-1}))


def check_deferred(parts: Iterable[Part]) -> None:
    """Raise `ConfigError` unless the parts say which operators a zero-bubble schedule may defer."""
    if not any(op.weight_gradient for part in parts for op in part.backward):
        raise ConfigError(
            "schedule zero_bubble defers weight gradients, but no operator of the trace is marked as one; take 1f1b"
        )
