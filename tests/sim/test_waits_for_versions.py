"""Waiting for weights is nobody's failure: a schedule may be slow, and no attempt's deadline may pay for it."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.sim.engine import EngineModel
from rollart.sim.envs import EnvModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, simulate


def slow_env(seconds: float) -> EnvModel:
    return EnvModel(latency_s=lambda traj, attempt, call, turn: seconds if call == "step" else 0.0)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_in_the_papers_order_long_trajectories_do_not_wait_for_versions_that_come_later(max_staleness: int) -> None:
    """Engines apply at get_batch only, and one trajectory takes longer than a turn's deadline."""
    tasks = [a_task()]
    config = a_config(
        tasks,
        schedule={"steps": 5, "max_staleness": max_staleness, "sync_order": "paper"},
        deadlines={"env_step_s": 400.0, "trajectory_s": 900.0},
    )
    sim = simulate(config, tasks, SimCluster(env=slow_env(150.0), trainer=TrainerModel(finish_s=20.0)))
    assert sim.error is None
    assert not sim.of("failure_decided")
    assert len(sim.of("step_finished")) == 5


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_redundant_groups_do_not_wait_out_a_train_step_longer_than_a_turns_deadline(max_staleness: int) -> None:
    tasks = [a_task()]
    config = a_config(tasks, schedule={"steps": 4, "max_staleness": max_staleness, "redundant_groups": 2})
    sim = simulate(config, tasks, SimCluster(env=slow_env(5.0), trainer=TrainerModel(finish_s=300.0)))
    assert sim.error is None
    assert not sim.of("failure_decided")
    assert len(sim.of("step_finished")) == 4


def test_an_evaluation_beside_training_may_hold_versions_longer_than_a_turns_deadline() -> None:
    tasks = [a_task()]
    sections: dict[str, Any] = {"schedule": {"steps": 4, "max_staleness": 0}, "eval": {"episodes": 4, "every": 1}}
    config = a_config(tasks, deadlines={"pinned_s": 600.0, "env_step_s": 400.0, "trajectory_s": 900.0}, **sections)
    cluster = SimCluster(engine=EngineModel(apply_s=1.0), env=slow_env(200.0), trainer=TrainerModel(finish_s=5.0))
    sim = simulate(config, tasks, cluster)
    assert sim.error is None
    assert not sim.of("failure_decided")
    assert all(row["complete"] for row in sim.of("eval_scored"))


def test_redundant_groups_never_cost_a_slow_task_its_turn() -> None:
    """With two spare groups a run of a fast and a slow task takes no longer than without."""
    tasks = [a_task("fast"), a_task("slow")]
    ended = {}
    for spare in (0, 2):
        config = a_config(
            tasks,
            schedule={"steps": 8, "max_staleness": 1, "redundant_groups": spare},
            deadlines={"env_step_s": 400.0, "trajectory_s": 900.0},
        )
        env = EnvModel(
            latency_s=lambda traj, attempt, call, turn: (30.0 if "slow" in traj else 1.0) if call == "step" else 0.0
        )
        sim = simulate(config, tasks, SimCluster(env=env, trainer=TrainerModel(finish_s=2.0)))
        assert sim.error is None
        ended[spare] = sim.ended_s
    assert ended[2] <= ended[0]
