"""What a task issues: roles, order, and everything exactly as often as it should be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hand_made_traces import BLOCKING, computes, plan_of, rich, talks
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.optrace.ops import Op, Part
from rollart.optrace.schedules import TaskKind
from rollart.optrace.tasks import Variant, task_items, update_items, variant


def _names(parts: list[Part], kind: TaskKind, *, gathers: bool = True, reduces: bool = True) -> list[tuple[str, str]]:
    items = task_items(parts, Variant(kind=kind, gathers=gathers, reduces=reduces))
    for position, item in enumerate(items):
        assert all(dep < position for dep in item.deps)
    return [(item.op.name, item.lane) for item in items]


def _copied(number: int, name: str, *deps: int) -> Op:
    return Op(id=number, name=name, kind="pass", deps=deps, moved_bytes=1e9, flops=1e9)


def test_weights_are_gathered_a_layer_ahead_with_the_copies_that_feed_them() -> None:
    forward = (
        _copied(0, "copy_in"), talks(1, 1.0, "dp", "all_gather", 0), _copied(2, "copy_out", 1), computes(3, 1.0, 2),
    )  # fmt: skip
    part = Part(name="layer", forward=forward, backward=())
    items = task_items([part] * 3, Variant(kind="forward", gathers=True, reduces=False))
    assert [(item.op.name, item.layer) for item in items] == [
        ("copy_in", 0), ("c10d.all_gather", 0), ("copy_in", 1), ("c10d.all_gather", 1), ("copy_out", 0), ("aten.mm", 0),
        ("copy_in", 2), ("c10d.all_gather", 2), ("copy_out", 1), ("aten.mm", 1), ("copy_out", 2), ("aten.mm", 2),
    ]  # fmt: skip
    third = next(position for position, item in enumerate(items) if item.layer == 2)
    assert items[items[third].deps[0]].layer == 0  # when the second layer begins to compute
    assert {item.lane for item in items if item.op.name in ("copy_in", "c10d.all_gather")} == {"dp"}
    assert _names([part], "forward", gathers=False) == [("copy_out", "compute"), ("aten.mm", "compute")]


def test_a_gather_that_needs_its_own_layer_is_not_issued_before_it() -> None:
    forward = (computes(0, 1.0), talks(1, 1.0, "dp", "all_gather", 0), computes(2, 1.0, 1))
    part = Part(name="layer", forward=forward, backward=())
    assert [lane for _, lane in _names([part] * 2, "forward")] == ["compute", "dp", "compute"] * 2
    assert [lane for _, lane in _names([part], "forward", gathers=False)] == ["compute", "compute"]


def test_reductions_and_what_follows_them_run_beside_and_are_left_out_where_they_do_not_run() -> None:
    backward = (
        computes(0, 1.0), computes(1, 1.0, 0, weight=True), talks(2, 1.0, "dp", "reduce_scatter", 1), _copied(3, "divide", 2),
        computes(4, 1.0, 0),
    )  # fmt: skip
    part = Part(name="layer", forward=(), backward=backward)
    assert _names([part], "backward")[2:4] == [("c10d.reduce_scatter", "dp"), ("divide", "dp")]
    assert _names([part], "backward", reduces=False) == [("aten.mm", "compute")] * 3
    assert _names([part], "input_grad") == [("aten.mm", "compute")] * 2
    assert [name for name, _ in _names([part], "weight_grad")] == ["aten.mm", "c10d.reduce_scatter", "divide"]


def test_when_data_parallel_operators_run() -> None:
    def of(
        kind: TaskKind, shards: int, *, first: bool = False, last: bool = False, late: bool = False
    ) -> tuple[bool, bool]:
        framework = replace(BLOCKING, overlap_dp=not late)
        found = variant(kind, first=first, last=last, plan=plan_of(dp=2, shards=shards), framework=framework)
        return found.gathers, found.reduces

    assert [of("forward", shards) for shards in range(4)] == [(False, False)] * 3 + [(True, False)]
    assert [of("forward", shards, first=True)[0] for shards in range(4)] == [True] * 4
    assert [of("backward", shards)[1] for shards in range(4)] == [False, False, True, True]
    assert [of("backward", shards, last=True)[1] for shards in range(4)] == [True] * 4
    assert [of("backward", shards, last=True, late=True)[1] for shards in range(4)] == [False, False, True, True]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(1, 6), st.booleans(), st.booleans())
def test_every_operator_runs_once_a_micro_batch_or_once_a_step(
    shards: int, layers: int, late: bool, split: bool
) -> None:
    plan = plan_of(tp=2, dp=2, shards=shards)
    framework = replace(BLOCKING, overlap_dp=not late)
    trace = rich(plan, layers=layers)
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    kinds: tuple[TaskKind, ...] = ("input_grad", "weight_grad") if split else ("backward",)
    issued: Counter[int] = Counter()
    for kind in ("forward", *kinds):
        which = variant(kind, first=True, last=True, plan=plan, framework=framework)
        issued.update(id(item.op) for item in task_items(parts, which))
    issued.update(id(item.op) for item in update_items(trace, parts, plan, framework))
    wanted = Counter(id(op) for part in parts for op in (*part.forward, *part.backward, *part.optimizer))
    wanted.update(id(op) for op in trace.step)
    assert issued == wanted


@pytest.mark.parametrize("late", [False, True])
def test_the_update_waits_for_late_reductions_and_the_optimizer_for_the_norm(late: bool) -> None:
    plan = plan_of(dp=2)
    trace = rich(plan, layers=2)
    parts = [trace.parts[name] for name in trace.layers]
    items = update_items(trace, parts, plan, replace(BLOCKING, overlap_dp=not late))
    reductions = [position for position, item in enumerate(items) if item.lane == "dp"]
    assert len(reductions) == (2 if late else 0)
    norm = len(reductions)
    assert items[norm].op is trace.step[0]
    assert items[norm].deps == tuple(reductions[-1:])
    last_of_step = norm + len(trace.step) - 1
    updates = items[last_of_step + 1 :]
    assert [item.op for item in updates] == [op for part in parts for op in part.optimizer]
    assert all(item.deps == (last_of_step,) for item in updates)
