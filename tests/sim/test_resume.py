"""A driver is killed at any instant and the run is resumed from its last checkpoint, on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config.schema import RunConfig
from rollart.control.run import run
from rollart.core.types import TaskSpec
from rollart.sim.disk import SimCheckpoints, SimDisk
from rollart.sim.engine import EngineModel
from rollart.sim.loop import VirtualLoop
from rollart.sim.loop import run as run_virtually
from rollart.sim.trainer import TrainerModel
from rollart.sim.world import SimCluster, world
from simruns import SimRun, a_config, a_task, check, random_env

Tasks = Sequence[TaskSpec]


def incarnation(disk: SimDisk, config: RunConfig, tasks: Tasks, *, killed_s: float | None = None) -> SimRun:
    """Run from where the disk says to the end, or for `killed_s` seconds: then nothing more of it reaches the disk."""
    resumed = disk.resumed() if disk.log else None
    first = 10 * disk.incarnation
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.5), env=random_env(), disk=disk, first_engine=first,
        first_host=first, trainer=TrainerModel(finish_s=2.0, publish_s=0.2, save_s=0.5, load_s=0.5),
    )  # fmt: skip
    sim = SimRun(config=config, tasks=tasks, cluster=cluster)
    around = world(
        tuple(tasks), cluster, sinks=(disk.sink(), sim.take), kept=sim.kept, checkpoints=SimCheckpoints(disk),
        resumed=resumed,
    )  # fmt: skip

    async def main() -> None:
        running = asyncio.create_task(run(config, around))
        await asyncio.wait([running], timeout=killed_s)
        disk.cut()
        running.cancel()
        with suppress(asyncio.CancelledError):
            sim.result = await running

    run_virtually(main(), loop=VirtualLoop())
    return sim


def as_one(disk: SimDisk, *parts: SimRun) -> SimRun:
    """All incarnations as one run: its rows are those that survive."""
    last = parts[-1]
    whole = SimRun(config=last.config, tasks=last.tasks, cluster=last.cluster, result=last.result)
    for event in disk.surviving():
        whole.take(event)
    whole.events = list(disk.log)
    return whole


def a_resumed_run(config: RunConfig, tasks: Tasks, kills_s: Sequence[float]) -> tuple[SimRun, SimDisk]:
    disk = SimDisk()
    parts = [incarnation(disk, config, tasks, killed_s=at) for at in [*kills_s, None]]
    return as_one(disk, *parts), disk


def consumed(sim: SimRun) -> Counter[str]:
    return Counter(group for batch in sim.of("batch_released") for group in batch["groups"])


TASKS = (a_task("a"), a_task("b", ratio=3.0))


def a_schedule(**schedule: Any) -> RunConfig:
    schedule = {"steps": 8, **schedule}
    return a_config(TASKS, schedule=schedule, checkpoint={"every": 2}, engines=2, eval={"episodes": 4, "every": 3})


@pytest.mark.parametrize("killed_s", [1.0, 9.0, 17.0, 23.0, 29.0, 41.0])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_was_killed_and_resumed_reads_as_one_run(killed_s: float, staleness: int) -> None:
    sim, disk = a_resumed_run(a_schedule(max_staleness=staleness), TASKS, [killed_s])
    check(sim)
    assert [row["seq"] for row in sim.rows] == list(range(1, len(sim.rows) + 1))
    assert [batch["step"] for batch in sim.of("batch_released")] == list(range(8))
    assert set(consumed(sim).values()) == {1}
    versions = [event["version"] for event in disk.log if event["kind"] == "published"]
    assert versions == sorted(set(versions)), "numbers are never used again, in what was taken back neither"


def test_with_staleness_0_a_resumed_run_consumes_what_an_uninterrupted_one_does() -> None:
    """Field case 35: the same multiset of problems, whenever the driver was killed."""
    config = a_schedule(max_staleness=0)
    whole, _ = a_resumed_run(config, TASKS, [])
    for killed_s in (12.0, 20.0, 33.0):
        sim, _ = a_resumed_run(config, TASKS, [killed_s])
        assert consumed(sim) == consumed(whole)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kills=st.lists(st.floats(0.5, 60.0), min_size=1, max_size=3), staleness=st.integers(0, 2))
def test_what_was_issued_is_a_prefix_of_each_cursor_and_everything_issued_is_accounted_for(
    kills: list[float], staleness: int
) -> None:
    """Field case 35: with any staleness and any number of kills. `check` compares with the cursors."""
    sim, _ = a_resumed_run(a_schedule(max_staleness=staleness), TASKS, kills)
    check(sim)


def test_groups_that_were_buffered_at_the_checkpoint_are_trained_once_each_after_it() -> None:
    """Field case 33: all ids trained before and after are the ids that were buffered or trained, once each."""
    config = a_schedule(max_staleness=2)
    disk = SimDisk()
    first = incarnation(disk, config, TASKS, killed_s=25.0)
    resumed = disk.resumed()
    assert resumed.snapshot is not None
    buffered = {group.instance.group_id for group in resumed.snapshot.groups if group.complete}
    assert buffered
    sim = as_one(disk, first, incarnation(disk, config, TASKS))
    check(sim)
    trained = consumed(sim)
    dropped = {row["group"] for row in sim.of("group_dropped")}
    assert all(trained[group] == 1 for group in buffered - dropped)
    assert buffered - dropped
    opened = [row["group"] for row in sim.of("group_opened")]
    assert len(opened) == len(set(opened)), "no problem is issued twice"


def test_each_task_goes_on_from_its_own_cursor() -> None:
    """Field case 36: tasks of unlike shares have issued unlike numbers of problems at the checkpoint."""
    config = a_schedule(max_staleness=1)
    disk = SimDisk()
    incarnation(disk, config, TASKS, killed_s=25.0)
    resumed = disk.resumed()
    assert resumed.snapshot is not None
    cursors = resumed.snapshot.cursors
    assert cursors["b"].position > 2 * cursors["a"].position > 0
    issued = Counter(row["task"] for row in disk.surviving()[: resumed.snapshot.seq] if row["kind"] == "group_opened")
    assert issued == {task: cursor.position for task, cursor in cursors.items()}


def test_another_data_set_is_begun_at_its_first_problem_with_a_warning() -> None:
    """Field case 34: the data set of one task changed between save and resume."""
    config = a_schedule(max_staleness=1)
    disk = SimDisk()
    first = incarnation(disk, config, TASKS, killed_s=25.0)
    other = (replace(TASKS[0], train=range(5000, 5050)), TASKS[1])
    sim = as_one(disk, first, incarnation(disk, config, other))
    (warning,) = sim.of("advisory", code="data_changed")
    assert "data set of a is not the one of the checkpoint" in warning["text"]
    after = [row["group"] for row in sim.of("group_opened", task="a") if row["seq"] > warning["seq"]]
    assert {group.split("/")[2] for group in after} == {"1"}, "another epoch: no group id comes twice"
    assert [row["status"] for row in sim.of("run_finished")] == ["done"]


def test_a_resumed_run_takes_its_first_step_as_soon_as_any() -> None:
    """Field case 6: engines come up without weights and wait for the version that the resumed run publishes first."""
    config = a_schedule(max_staleness=1)
    disk = SimDisk()
    first = incarnation(disk, config, TASKS, killed_s=30.0)
    sim = as_one(disk, first, incarnation(disk, config, TASKS))
    (resumed,) = sim.of("resumed")
    steps = [row["t"] for row in sim.of("step_finished")]
    at_the_start = steps[0] - sim.of("group_opened")[0]["t"]
    assert next(t for t in steps if t > resumed["t"]) - resumed["t"] <= 2 * at_the_start


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_in_the_same_log() -> None:
    sim, disk = a_resumed_run(a_schedule(), TASKS, [0.1])
    check(sim)
    assert [row["kind"] for row in sim.rows[:2]] == ["resumed", "run_started"]
    assert disk.log[0]["kind"] == "run_started"


def test_a_finished_run_can_be_extended() -> None:
    disk = SimDisk()
    first = incarnation(disk, a_schedule(steps=4), TASKS)
    sim = as_one(disk, first, incarnation(disk, a_schedule(steps=7), TASKS))
    check(sim)
    assert [batch["step"] for batch in sim.of("batch_released")] == list(range(7))


def test_the_step_that_was_under_way_is_the_only_one_that_is_done_again() -> None:
    """With a checkpoint after every step, a kill costs at most the step that was under way."""
    config = a_config(TASKS, schedule={"steps": 8, "max_staleness": 1}, checkpoint={"every": 1})
    disk = SimDisk()
    incarnation(disk, config, TASKS, killed_s=25.0)
    done = sum(event["kind"] == "published" for event in disk.log) - 1
    resumed = disk.resumed()
    assert resumed.snapshot is not None
    assert done - 1 <= resumed.snapshot.step <= done
