"""Colocated rollout and training: engines sleep while the trainer has their devices, and sample again with new weights."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from rollart.config.schema import RunConfig
from rollart.sim.disk import SimCheckpoints
from rollart.sim.engine import EngineModel
from rollart.sim.trainer import TrainerCall, TrainerMishap, TrainerModel
from rollart.sim.world import SimCluster
from simruns import Row, a_config, a_task, check, random_env, simulate

SLEEP_S, WAKE_S, TRAIN_S = 2.0, 3.0, 10.0


def cluster(**trainer: Any) -> SimCluster:
    return SimCluster(
        engine=EngineModel(token_s=0.1, sleep_s=SLEEP_S, wake_s=WAKE_S), env=random_env(),
        trainer=TrainerModel(finish_s=TRAIN_S, **trainer),
    )  # fmt: skip


def shared(**schedule: object) -> RunConfig:
    pools = {"gpus": {"device": "H20", "nodes": 1, "devices_per_node": 4, "roles": ["train"], "tp": 2}}
    return a_config([a_task()], schedule={"max_staleness": 0, "colocated": True, **schedule}, cluster={"pools": pools})


def test_nothing_is_sampled_while_the_trainer_has_the_devices() -> None:
    sim = simulate(shared(), [a_task()], cluster())
    check(sim)
    assert len(sim.cluster.engines) == 2  # four devices, two ranks an engine
    switched = [(row["to"], row["seconds"]) for row in sim.of("devices_switched")]
    assert switched == [("train", SLEEP_S), ("rollout", WAKE_S)] * 4
    given = [row["t"] for row in sim.of("devices_switched", to="train")]
    back = [row["t"] for row in sim.of("devices_switched", to="rollout")]
    for row in sim.of("turn_done"):
        assert not any(a < row["t"] - row["seconds"] < b or a < row["t"] < b for a, b in zip(given, back, strict=True))


def test_a_step_costs_what_it_costs_apart_and_both_switches() -> None:
    apart = simulate(a_config([a_task()], engines=2, schedule={"max_staleness": 0}), [a_task()], cluster())
    together = simulate(shared(), [a_task()], cluster())
    assert together.ended_s - apart.ended_s == pytest.approx(4 * (SLEEP_S + WAKE_S))


def test_without_pools_nothing_is_shared() -> None:
    config = a_config([a_task()], schedule={"max_staleness": 0, "colocated": True})
    sim = simulate(config, [a_task()], cluster())
    check(sim)
    assert sim.of("devices_switched") == []


def test_engines_that_do_not_let_go_end_the_run_with_the_reason() -> None:
    stuck = SimCluster(engine=EngineModel(token_s=0.1, sleep_s=1e9), env=random_env())
    config = shared().model_copy(update={"deadlines": shared().deadlines.model_copy(update={"start_s": 5.0})})
    sim = simulate(config, [a_task()], stuck)
    assert "share devices" in str(sim.error)


def test_a_trainer_that_is_lost_in_a_step_leaves_the_devices_its_successor_s() -> None:
    async def lose(cluster: SimCluster, rows: object) -> None:
        while not cluster.trainers or cluster.trainers[-1].phase != "finish":  # noqa: ASYNC110 - the cluster tells nobody
            await asyncio.sleep(0.5)
        cluster.lose_trainer()

    inside = cluster()
    sim = simulate(shared(), [a_task()], inside, script=lose, checkpoints=SimCheckpoints(inside.disk))
    check(sim)
    assert [row["to"] for row in sim.of("devices_switched")] == ["train", "rollout"] * 4


COMPUTES = ("load", "begin", "accumulate", "finish", "logprobs")
Case = Literal["idle", "publish", "twice"]


@pytest.mark.parametrize(("case", "turns"), [("idle", 5), ("publish", 6), ("twice", 5)])
def test_a_trainer_that_comes_back_takes_its_turn_on_the_devices(case: Case, turns: int) -> None:
    """Lost on devices whose engines are awake, or lost again while it repeats: they sleep meanwhile, and sample after it."""

    def fault(trainer: str, call: TrainerCall, nth: int) -> TrainerMishap | None:
        dies = {"publish": ("trainer-0", "publish", 2), "twice": ("trainer-1", "finish", 0)}.get(case)
        return "lost" if (trainer, call, nth) == dies else None

    awake: list[str] = []

    async def watch(cluster: SimCluster, rows: list[Row]) -> None:
        while True:
            trainer = cluster.trainers[-1] if cluster.trainers else None
            if trainer is not None and trainer.phase in COMPUTES:
                awake.extend(f"{trainer.name} {trainer.phase}" for engine in cluster.engines if not engine.asleep)
            steps = sum(row["kind"] == "step_finished" for row in rows)
            if case != "publish" and steps == 2 and trainer is not None and trainer.name == "trainer-0":
                cluster.lose_trainer()
            await asyncio.sleep(0.25)

    inside = cluster(load_s=4.0, fault=fault)
    sim = simulate(shared(), [a_task()], inside, script=watch, checkpoints=SimCheckpoints(inside.disk))
    check(sim)
    assert awake == []
    (restarted,) = sim.of("trainer_restarted")
    assert restarted["steps"] == (1 if case == "publish" else 2)
    assert [row["to"] for row in sim.of("devices_switched")] == ["train", "rollout"] * turns
    assert not any(engine.asleep for engine in sim.cluster.engines)
