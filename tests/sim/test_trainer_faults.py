"""A trainer that hangs, dies or learns nothing ends the run with its reason; nothing is left running."""

from __future__ import annotations

import asyncio

import pytest

from rollart.core.errors import RunFailed
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, Script, SimRun, a_config, a_task, random_env, simulate

NEVER_S = float("inf")


def a_run(trainer: TrainerModel, script: Script | None = None) -> SimRun:
    tasks = [a_task()]
    config = a_config(tasks, deadlines={"train_s": 30.0, "weights_s": 20.0})
    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), trainer=trainer)
    return simulate(config, tasks, cluster, script=script)


def ended_with(sim: SimRun, last_line: str) -> None:
    assert isinstance(sim.error, RunFailed)
    assert str(sim.error).splitlines()[-1] == last_line
    assert sim.rows[-1]["kind"] == "run_finished"
    assert sim.rows[-1]["status"] == "failed"
    assert sim.rows[-1]["why"].endswith(last_line)
    assert sim.tasks_left == []
    assert sorted(sim.cluster.released) == sorted(f"lease-{n + 1}" for n in range(len(sim.cluster.trainers) + 2))
    assert sim.cluster.envs[0].open_sessions == 0


def test_weights_that_do_not_move_under_a_gradient_end_the_run() -> None:
    sim = a_run(TrainerModel(changes_weights=False))
    ended_with(sim, "trainer frozen_weights: lr 0.001, gradient norm 1.0")
    assert sim.of("step_finished") == []
    assert len(sim.of("published")) == 1, "what was not trained is not published"


@pytest.mark.parametrize("slow", [TrainerModel(accumulate_s=NEVER_S), TrainerModel(finish_s=31.0)])
def test_a_trainer_that_does_not_answer_ends_the_run_at_its_deadline(slow: TrainerModel) -> None:
    sim = a_run(slow)
    ended_with(sim, "trainer lost: the trainer does not answer: waited 30.0 s for the trainer")
    (expired,) = sim.of("wait_expired")
    assert expired["what"] == "the trainer"
    assert sim.ended_s == pytest.approx(sim.of("step_started")[0]["t"] + 30.0, abs=2.5)


def test_a_publish_that_hangs_ends_the_run_at_its_deadline() -> None:
    ended_with(
        a_run(TrainerModel(publish_s=NEVER_S)),
        "trainer lost: the trainer does not publish: waited 20.0 s for the trainer to publish",
    )


def test_a_lost_trainer_ends_the_run_at_once() -> None:
    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(12.0)
        cluster.lose_trainer("rank 0 was killed")

    sim = a_run(TrainerModel(finish_s=25.0), script)
    ended_with(sim, "trainer lost: rank 0 was killed")
    assert len(sim.of("step_started")) == 1
    assert sim.ended_s == pytest.approx(12.0, abs=2.5)
