"""Orders of tasks: complete, free of circles, and as long as the closed forms say."""

from __future__ import annotations

import pytest
from hand_made_traces import plan_of

from rollart.core.errors import ConfigError
from rollart.optrace.composer import Graph
from rollart.optrace.schedules import Task, order, source
from rollart.perf.memory import deferred_gradients, layers_in_flight
from rollart.perf.pipeline import Schedule, schedule_s

TICKS = {"forward": 6, "backward": 12, "input_grad": 6, "weight_grad": 6}


def _length(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Ticks of a schedule with equal stages whose chunks share a stage's time, no transfers."""
    graph = Graph()
    orders = [
        order(schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks)
        for stage in range(stages)
    ]
    event = {(stage, task): graph.event((stage, task)) for stage, tasks in enumerate(orders) for task in tasks}
    for stage, tasks in enumerate(orders):
        for before, task in zip((None, *tasks), tasks, strict=False):
            waits = [] if before is None else [(event[stage, before], TICKS[before.kind] // chunks)]
            read = source(task, stage=stage, stages=stages, chunks=chunks)
            if read is not None:
                waits.append((event[read], TICKS[read[1].kind] // chunks))
            graph.wait(event[stage, task], waits)
    times = graph.place()
    return max(times[at] + TICKS[task.kind] // chunks for (_, task), at in event.items())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 1), (1, 5), (2, 2), (4, 1), (4, 3), (4, 8), (8, 32), (16, 16)]
)
def test_equal_stages_take_m_plus_p_minus_1_slots_exactly(schedule: Schedule, stages: int, micro_batches: int) -> None:
    assert _length(schedule, stages, micro_batches) == (micro_batches + stages - 1) * 18


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 6, 3), (4, 8, 2), (4, 16, 3), (8, 32, 2), (8, 64, 6)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, micro_batches: int, chunks: int) -> None:
    closed = schedule_s(
        "interleaved", stage_forward_s=[6.0] * stages, stage_backward_s=[12.0] * stages, micro_batches=micro_batches,
        chunks=chunks,
    )  # fmt: skip
    assert _length("interleaved", stages, micro_batches, chunks) == closed


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 32), (8, 24)])
def test_deferred_weight_gradients_leave_a_third_of_the_bubble(stages: int, micro_batches: int) -> None:
    closed = schedule_s(
        "zero_bubble", stage_forward_s=[6.0] * stages, stage_backward_s=[12.0] * stages, micro_batches=micro_batches
    )
    assert _length("zero_bubble", stages, micro_batches) == closed


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6, 11, 14])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_any_numbers_give_every_task_once_and_no_circle(
    schedule: Schedule, chunks: int, stages: int, micro_batches: int
) -> None:
    kinds = ("forward", "input_grad", "weight_grad") if schedule == "zero_bubble" else ("forward", "backward")
    whole = {Task(kind, index, chunk) for kind in kinds for index in range(micro_batches) for chunk in range(chunks)}  # type: ignore[arg-type]
    for stage in range(stages):
        tasks = order(schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks)
        assert len(tasks) == len(whole)
        assert set(tasks) == whole
    busy = micro_batches * 18
    assert busy <= _length(schedule, stages, micro_batches, chunks) <= busy + (stages - 1) * 18 * max(1, micro_batches)


def test_memory_of_every_zero_bubble_stage_is_that_of_the_first_in_1f1b() -> None:
    for stage in range(4):
        held = most = 0
        for task in order("zero_bubble", stages=4, stage=stage, micro_batches=12):
            held += {"forward": 1, "weight_grad": -1}.get(task.kind, 0)
            most = max(most, held)
        assert most == 4


def held_at_most(schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int) -> float:
    """Stages' worth of activations, counted along the order: a chunk's are there until its (weight) gradients are."""
    now = most = 0
    for task in order(schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks):
        now += {"forward": 1, "backward": -1, "weight_grad": -1}.get(task.kind, 0)
        most = max(most, now)
    assert now == 0
    return most / chunks


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 12, 17, 32])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4)],
)
def test_the_closed_form_of_memory_counts_what_the_order_holds(
    schedule: Schedule, chunks: int, micro_batches: int, stages: int
) -> None:
    plan = plan_of(pp=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks)
    closed = [layers_in_flight(plan, stages, stage) for stage in range(stages)]
    assert closed == pytest.approx(
        [held_at_most(schedule, stages, stage, micro_batches, chunks) for stage in range(stages)]
    )


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_weight_gradients_that_wait_are_counted(micro_batches: int) -> None:
    plan = plan_of(pp=4, micro_batches=micro_batches, schedule="zero_bubble")
    for stage in range(4):
        waiting = most = 0
        for task in order("zero_bubble", stages=4, stage=stage, micro_batches=micro_batches):
            # while the next input gradients are computed, those of its own are no backlog
            most = max(most, waiting if task.kind == "input_grad" else 0)
            waiting += {"input_grad": 1, "weight_grad": -1}.get(task.kind, 0)
        assert deferred_gradients(plan, stage) == most


def test_what_cannot_be_listed_is_refused() -> None:
    with pytest.raises(ConfigError, match="nearest is zero_bubble"):
        order("dualpipe", stages=4, stage=0, micro_batches=8)
    with pytest.raises(ConfigError, match="take interleaved, or chunks 1"):
        order("1f1b", stages=4, stage=0, micro_batches=8, chunks=2)
    with pytest.raises(ConfigError, match="1 or more of each"):
        order("1f1b", stages=4, stage=4, micro_batches=8)
