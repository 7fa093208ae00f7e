"""An evaluation while the trainer is lost, and its weights with it: engines that serve go on, and where none does the weights
are brought back as training would, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from rollart.control.run import Result, evaluate
from rollart.core.errors import RunFailed
from rollart.sim.disk import SimCheckpoints
from rollart.sim.engine import EngineModel
from rollart.sim.loop import run as run_virtually
from rollart.sim.trainer import TrainerCall, TrainerMishap, TrainerModel
from rollart.sim.world import SimCluster, world
from simruns import Row, SimRun, a_config, a_task, check, random_env, simulate

EPISODES = 8


def a_cluster(**trainer: Any) -> SimCluster:
    return SimCluster(
        engine=EngineModel(token_s=0.05, prefetch_s=0.2, apply_s=0.1), env=random_env(mean_s=0.3),
        trainer=TrainerModel(finish_s=0.5, bytes_die=True, **trainer),
    )  # fmt: skip


def a_run(
    fields: Row, *, engines: int = 1, kept: bool = True, cluster: SimCluster | None = None, **sections: Any
) -> SimRun:
    """The trainer and one engine are lost after a row of these `fields`, in the middle of an evaluation."""
    tasks = [a_task(held_out=4)]
    config = a_config(
        tasks, engines=engines, checkpoint={"every": int(kept)},
        **{"eval": {"episodes": EPISODES, "concurrency": 4}, "schedule": {"steps": 3}, **sections},
    )  # fmt: skip
    cluster = cluster or a_cluster()

    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        for _ in range(10_000):
            if any(fields.items() <= row.items() for row in rows):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        cluster.lose_trainer("out of memory")
        cluster.lose_engine(0)

    return simulate(config, tasks, cluster, script=script, checkpoints=SimCheckpoints(cluster.disk) if kept else None)


def started(evaluation: str) -> Row:
    return {"kind": "eval_started", "eval": evaluation}


@pytest.mark.parametrize("name", ["before", "after"])
def test_an_evaluation_that_no_engine_can_serve_any_more_is_done_again_under_the_weights_new_number(name: str) -> None:
    sim = a_run(started(name))
    check(sim)
    assert [row["complete"] for row in sim.of("eval_finished", eval=name)] == [False, True]
    first, second = sim.of("eval_started", eval=name)
    (restarted,) = sim.of("trainer_restarted")
    assert first["t"] < restarted["t"] < second["t"]
    (again,) = [row for row in sim.of("published") if "again" in row]
    assert (again["again"], again["version"]) == (first["version"], second["version"])
    assert sim.of("wait_expired") == []
    assert sim.result is not None
    assert all(score.complete for score in sim.result.evaluations[name])


def test_an_evaluation_beside_training_goes_on_with_the_engines_that_serve_its_version() -> None:
    sim = a_run(
        started("step-2"), engines=2, eval={"episodes": EPISODES, "every": 2, "concurrency": 4}, schedule={"steps": 6}
    )
    check(sim)
    (ended,) = sim.of("eval_finished", eval="step-2")
    assert ended["complete"]
    assert [row["engine"] for row in sim.of("engine_joined")] == ["engine-0", "engine-1", "engine-2"]
    joined, version = sim.of("engine_joined")[-1], ended["version"]
    assert joined["version"] > version
    assert joined["t"] < ended["t"], "another engine does not wait for what it cannot get"


def test_weights_that_an_engine_still_serves_are_not_missed_by_the_last_evaluation() -> None:
    sim = a_run(started("after"), engines=2, kept=False)
    check(sim)
    (ended,) = sim.of("eval_finished", eval="after")
    assert ended["complete"]
    assert sim.of("trainer_lost") == []


def test_an_evaluation_that_is_left_when_all_is_trained_does_not_wait_for_weights_that_nobody_brings_back() -> None:
    last = {"kind": "step_finished", "step": 2}
    sim = a_run(last, eval={"episodes": EPISODES, "every": 2, "concurrency": 1})
    check(sim)
    assert [row["complete"] for row in sim.of("eval_finished")] == [True, False, True]
    assert sim.of("wait_expired") == []


def test_a_trainer_that_is_slow_to_come_back_is_waited_for_though_the_evaluation_has_given_up() -> None:
    slow = a_cluster(load_s=200.0)
    sim = a_run(started("before"), cluster=slow, deadlines={"trajectory_s": 10.0, "turn_s": 5.0})
    check(sim)
    assert [row["complete"] for row in sim.of("eval_finished", eval="before")] == [False, True]
    given_up, (restarted,) = sim.of("eval_finished", eval="before")[0], sim.of("trainer_restarted")
    assert given_up["t"] < restarted["t"]
    assert len(slow.trainers) == 2


def test_without_a_checkpoint_weights_that_are_gone_end_the_run_at_once() -> None:
    sim = a_run(started("before"), kept=False)
    assert isinstance(sim.error, RunFailed)
    assert str(sim.error).endswith("trainer lost: out of memory")
    assert sim.ended_s < 10.0
    assert (sim.tasks_left, sim.cluster.held) == ([], [])


def scored(cluster: SimCluster, lose: Callable[[SimCluster], None] | None = None) -> tuple[Result, list[str]]:
    """An evaluation and nothing else, in the middle of which `lose` is done; with the kinds of its events."""
    tasks, log = [a_task(instances=3, held_out=2)], list[Mapping[str, Any]]()

    async def main() -> Result:
        asked = asyncio.create_task(
            evaluate(a_config(tasks), world(tuple(tasks), cluster, sinks=(log.append,)), version=7, mode="greedy")
        )
        await asyncio.sleep(2.0)
        if lose is not None:
            lose(cluster)
        return await asked

    result = run_virtually(main())
    assert log[-1]["t"] < 60.0
    return result, [event["kind"] for event in log]


def lose_both(cluster: SimCluster) -> None:
    cluster.lose_trainer()
    cluster.lose_engine(0)


def lost_while(call: TrainerCall, trainer: str, made: TrainerCall, nth: int) -> TrainerMishap | None:
    return "lost" if (trainer, made) == ("trainer-0", call) else None


@pytest.mark.parametrize(
    ("trainer", "lose", "version"),
    [({"fault": partial(lost_while, "publish")}, None, 7), ({}, lose_both, 8)],
    ids=["lost while it publishes", "lost with the engine"],
)
def test_weights_that_are_only_scored_are_published_by_another_trainer(
    trainer: dict[str, Any], lose: Callable[[SimCluster], None] | None, version: int
) -> None:
    result, kinds = scored(a_cluster(**trainer), lose)
    assert result.version == version
    assert {(score.split, score.episodes, score.complete) for score in result.evaluations["asked"]} == {
        ("train", 3, True), ("held_out", 2, True)
    }  # fmt: skip
    assert kinds.count("trainer_lost") == 1


def test_a_trainer_that_is_lost_time_and_again_ends_an_evaluation_with_its_cause() -> None:
    with pytest.raises(RunFailed, match="role train was lost 9 times"):
        scored(a_cluster(fault=lambda trainer, call, nth: "lost" if call == "publish" else None))
