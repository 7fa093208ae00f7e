"""Workers of every role are lost in the middle of a run, and the run goes on: nothing complete is lost or trained twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from rollart.core.errors import RunFailed, failure
from rollart.core.resources import Change
from rollart.sim.disk import SimCheckpoints, SimDisk
from rollart.sim.engine import EngineModel
from rollart.sim.trainer import TrainerCall, TrainerMishap, TrainerModel
from rollart.sim.world import SimCluster
from simruns import Row, Script, SimRun, a_config, a_task, check, random_env, simulate


def a_run(
    script: Script | None = None,
    *,
    every: int = 3,
    trainer: TrainerModel | None = None,
    steps: int = 10,
    **sections: Any,
) -> SimRun:
    tasks = [a_task("a"), a_task("b")]
    config = a_config(
        tasks, schedule={"steps": steps, "max_staleness": 1}, checkpoint={"every": every}, engines=2,
        envs={"hosts": 2}, **sections,
    )  # fmt: skip
    disk = SimDisk()
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.5), env=random_env(), disk=disk, start_s=lambda role, nth: 4.0,
        trainer=trainer or TrainerModel(finish_s=2.0, publish_s=0.2, save_s=0.5, load_s=0.5),
    )  # fmt: skip
    return simulate(config, tasks, cluster, script=script, checkpoints=SimCheckpoints(disk))


def test_lost_workers_of_every_role_are_replaced_and_the_run_keeps_its_promises() -> None:
    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(15.0)
        cluster.lose_engine(0)
        await asyncio.sleep(4.0)
        cluster.lose_host(0)
        await asyncio.sleep(4.0)
        cluster.lose_trainer()

    sim = a_run(script)
    check(sim)
    assert [row["engine"] for row in sim.of("engine_joined")] == ["engine-0", "engine-1", "engine-2"]
    assert [row["host"] for row in sim.of("host_joined")] == ["host-0", "host-1", "host-2"]
    assert len(sim.of("trainer_lost")) == len(sim.of("trainer_restarted")) == 1
    assert len(sim.cluster.released) == sim.cluster._leases


def test_all_engines_and_all_hosts_die_at_once_and_come_back() -> None:
    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(15.0)
        for index in (0, 1):
            cluster.lose_engine(index)
            cluster.lose_host(index)

    sim = a_run(script)
    check(sim)
    assert len(sim.of("engine_joined")) == len(sim.of("host_joined")) == 4


@pytest.mark.parametrize("call", ["begin", "accumulate", "finish", "publish", "save"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_trainer_that_dies_in_any_call_comes_back_to_where_it_was(call: TrainerCall, every: int) -> None:
    """The weights after the last step are those of a run in which nobody died: the same samples, in order, once each."""

    def fault(trainer: str, made: TrainerCall, nth: int) -> TrainerMishap | None:
        return "lost" if (trainer, made, nth) == ("trainer-0", call, 2) else None

    sim = a_run(every=every, trainer=TrainerModel(finish_s=2.0, publish_s=0.2, save_s=0.5, load_s=0.5, fault=fault))
    check(sim)
    (restarted,) = sim.of("trainer_restarted")
    assert 0 <= restarted["steps"] <= every
    assert len(sim.cluster.trainers) == 2
    assert [row["version"] for row in sim.of("published")] == list(range(12))
    (again,) = [row for row in sim.of("published") if "again" in row]
    assert again["again"] == again["version"] - 1
    learned = Counter(sample.traj for batch in sim.cluster.trainers[-1].batches for sample in batch)
    assert set(learned.values()) == {1}
    assert len(learned) == 160


def test_a_trainer_that_is_lost_while_nobody_calls_it_is_replaced_before_its_weights_are_missed() -> None:
    tasks = [a_task()]
    disk = SimDisk()
    config = a_config(tasks, schedule={"steps": 4, "max_staleness": 0})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=1.0),
        env=random_env(),
        disk=disk,
        trainer=TrainerModel(bytes_die=True),
    )

    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        for _ in range(1000):
            if any(row["kind"] == "published" and row["version"] == 2 for row in rows):
                break
            await asyncio.sleep(0.1)
        cluster.lose_trainer()

    sim = simulate(config, tasks, cluster, script=script, checkpoints=SimCheckpoints(disk))
    check(sim)
    assert len(sim.cluster.trainers) == 2
    assert sim.of("engine_lost") == []


def test_without_checkpoints_a_lost_trainer_ends_the_run_and_says_why() -> None:
    tasks = [a_task()]

    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(10.0)
        cluster.lose_trainer("out of memory")

    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), trainer=TrainerModel(finish_s=2.0))
    sim = simulate(a_config(tasks), tasks, cluster, script=script)
    assert isinstance(sim.error, RunFailed)
    assert "no checkpoint" in str(sim.error)
    assert str(sim.error).endswith("trainer lost: out of memory")


def test_workers_that_die_faster_than_steps_are_trained_end_the_run_with_their_cause() -> None:
    """Field case 2: restarts are not for ever."""

    def fault(trainer: str, made: TrainerCall, nth: int) -> TrainerMishap | None:
        return "lost" if made == "finish" else None

    sim = a_run(trainer=TrainerModel(finish_s=1.0, fault=fault), failure={"restarts": 3})
    assert isinstance(sim.error, RunFailed)
    assert "role train was lost 4 times with no step trained (failure.restarts=3)" in str(sim.error)
    assert len(sim.cluster.trainers) == 4
    assert sim.tasks_left == []


def losing(*at: tuple[float, Callable[[SimCluster], None]]) -> Script:
    """Do something to the cluster at each of these times."""

    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        for when, act in at:
            await asyncio.sleep(when - asyncio.get_running_loop().time())
            act(cluster)

    return script


def test_a_resumed_run_without_further_checkpoints_does_not_go_on_from_an_old_one() -> None:
    """Batches are not kept where checkpoints are off, so what a lost trainer had learned cannot be repeated."""
    tasks = [a_task()]
    disk = SimDisk()
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1), env=random_env(), disk=disk, trainer=TrainerModel(finish_s=2.0)
    )
    simulate(
        a_config(tasks, schedule={"steps": 3}, checkpoint={"every": 1}), tasks, cluster,
        checkpoints=(first := SimCheckpoints(disk)),
    )  # fmt: skip
    assert first.saves
    disk.log.append({"kind": "published", "seq": 10**6, "version": 3})
    off = a_config(tasks, schedule={"steps": 9}, checkpoint={"every": 0})
    again = SimCluster(
        engine=EngineModel(token_s=0.1),
        env=random_env(),
        disk=disk,
        trainer=TrainerModel(finish_s=2.0),
        first_engine=10,
    )
    sim = simulate(
        off, tasks, again, script=losing((12.0, lambda c: c.lose_trainer())), checkpoints=SimCheckpoints(disk),
        resumed=disk.resumed(),
    )  # fmt: skip
    assert len(sim.of("step_finished")) >= 1
    assert isinstance(sim.error, RunFailed)
    assert "no checkpoint to go on from" in str(sim.error)


def test_repeating_many_slow_steps_does_not_end_the_run() -> None:
    """The window stays full for longer than any step may take; the trainer's own deadlines are the ones that count."""
    tasks = [a_task()]
    disk = SimDisk()
    config = a_config(tasks, schedule={"steps": 10}, checkpoint={"every": 9})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1), env=random_env(), disk=disk, trainer=TrainerModel(finish_s=400.0)
    )
    script = losing((8 * 400.0 + 200.0, lambda c: c.lose_trainer()))
    sim = simulate(config, tasks, cluster, script=script, checkpoints=SimCheckpoints(disk))
    check(sim)
    (restarted,) = sim.of("trainer_restarted")
    assert restarted["seconds"] >= 8 * 400.0
    assert sim.of("wait_expired", what="room in the staleness window")


def test_each_worker_has_a_budget_of_restarts_of_its_own() -> None:
    """Ten engines lost at once are ten losses, not ten of one; all of them come back at once."""
    tasks = [a_task()]
    config = a_config(tasks, engines=10, schedule={"steps": 8}, failure={"restarts": 1})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1),
        env=random_env(),
        trainer=TrainerModel(finish_s=2.0),
        start_s=lambda role, nth: 5.0,
    )
    script = losing(*((20.0, partial(SimCluster.lose_engine, index=index)) for index in range(10)))
    sim = simulate(config, tasks, cluster, script=script)
    check(sim)
    assert len(sim.of("engine_joined")) == 20
    assert sim.of("advisory", code="worker_given_up") == []


def test_a_loss_that_is_told_twice_is_one_loss() -> None:
    tasks = [a_task()]
    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), trainer=TrainerModel(finish_s=2.0))

    def twice(cluster: SimCluster) -> None:
        cluster.lose_host(0)
        change = Change(kind="lost", subject="host-0", role="env", lease=cluster.hosts["host-0"])
        for after_s in (0.0, 3.0):
            cluster._say(change, after_s)

    sim = simulate(a_config(tasks, schedule={"steps": 8}), tasks, cluster, script=losing((10.0, twice)))
    check(sim)
    assert len(sim.of("host_lost")) == 1
    assert len(sim.of("host_joined")) == 2


@dataclass(kw_only=True)
class StubbornCluster(SimCluster):
    """One lease is not given back without trouble."""

    trouble: str = ""

    async def release(self, lease: str) -> None:
        await super().release(lease)
        if lease == "lease-2" and self.trouble == "raises":
            raise OSError("no such process")
        if lease == "lease-2":
            await asyncio.sleep(1e6)


@pytest.mark.parametrize("trouble", ["raises", "hangs"])
def test_a_lease_that_cannot_be_released_keeps_no_other_and_not_the_run(trouble: str) -> None:
    tasks = [a_task()]
    cluster = StubbornCluster(env=random_env(), trouble=trouble)
    sim = simulate(a_config(tasks, schedule={"steps": 2}), tasks, cluster)
    assert sim.error is None
    assert sim.cluster.held == []
    assert sim.rows[-1]["status"] == "done"
    assert sim.of("advisory", code={"raises": "release_failed", "hangs": "release_slow"}[trouble])
    assert sim.ended_s < 1000.0


def test_a_step_is_told_once_though_its_trainer_dies_while_it_publishes() -> None:
    def fault(trainer: str, made: TrainerCall, nth: int) -> TrainerMishap | None:
        return "lost" if (trainer, made, nth) == ("trainer-0", "publish", 3) else None

    sim = a_run(trainer=TrainerModel(finish_s=2.0, publish_s=0.2, fault=fault))
    check(sim)
    assert [row["step"] for row in sim.of("step_finished")] == list(range(10))
    assert len(sim.of("step_started")) == 11


def test_a_worker_that_nobody_can_replace_is_not_tried_again() -> None:
    """One host of two, then the other: the run goes on without the first, and ends at once when none is left."""
    tasks = [a_task()]
    never = failure("cluster", "no_room", "no machine is left", retryable=False)
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1), env=random_env(), trainer=TrainerModel(finish_s=2.0),
        start_fault=lambda role, nth: never if role == "env" and nth >= 2 else None,
    )  # fmt: skip
    script = losing((8.0, lambda c: c.lose_host(0)), (12.0, lambda c: c.lose_host(1)))
    sim = simulate(a_config(tasks, schedule={"steps": 50}, envs={"hosts": 2}), tasks, cluster, script=script)
    told = "a worker of role env was lost and nobody takes its place"
    (advisory,) = sim.of("advisory", code="worker_given_up")
    assert advisory["text"] == f"{told} (cluster no_room: no machine is left); 1 go on without it"
    assert str(sim.error).splitlines() == [f"{told}, and none is left", "cluster no_room: no machine is left"]
    assert cluster._starts["env"] == 4
    assert sim.ended_s == pytest.approx(12.0, abs=0.1)
