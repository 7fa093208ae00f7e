"""When weights change: `early` as soon as engines hold them, `paper` between a batch's release and its step."""

from __future__ import annotations

import pytest

from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate


def a_run(order: str, *, max_staleness: int = 1, steps_per_batch: int = 1) -> SimRun:
    tasks = [a_task()]
    config = a_config(
        tasks, engines=2,
        schedule={
            "steps": 6, "sync_order": order, "max_staleness": max_staleness, "steps_per_batch": steps_per_batch,
        },
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.5, apply_s=0.3),
        env=random_env(),
        trainer=TrainerModel(finish_s=3.0),
    )
    return simulate(config, tasks, cluster)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_paper_order_applies_weights_only_between_the_release_and_the_step(max_staleness: int) -> None:
    sim = a_run("paper", max_staleness=max_staleness)
    check(sim)
    stage = "start"
    for row in sim.rows:
        if row["kind"] in ("batch_released", "step_started", "step_finished"):
            stage = row["kind"]
        if row["kind"] == "applied" and 0 < row["version"] < 6:
            assert stage == "batch_released"
            assert row["version"] == sim.of("batch_released")[row["version"]]["version"]
    for step in sim.of("step_started"):
        before = [row["version"] for row in sim.of("applied") if row["seq"] < step["seq"]]
        assert sorted(before) == sorted([*range(step["version"] + 1)] * 2), (
            "all engines serve it before the step begins"
        )


def test_early_order_applies_weights_while_the_next_batch_is_still_collected() -> None:
    sim = a_run("early")
    check(sim)
    for row in sim.of("published"):
        applied = sim.of("applied", version=row["version"])
        assert [one["t"] for one in applied] == pytest.approx([row["t"] + 0.8] * 2)


def test_live_requests_are_kept_across_an_apply_and_the_time_that_they_lost_is_reported() -> None:
    sim = a_run("early")
    assert any(len(row["spans"]) > 1 for row in sim.of("turn_done")), "turns that two versions sampled"
    for row in sim.of("applied"):
        assert row["exposed_s"] == (0.3 if row["live"] else 0.0)
    assert any(row["rebuilt"] > 0 for row in sim.of("turn_done"))


def test_the_steps_of_a_batch_train_whole_groups_once_at_one_version() -> None:
    sim = a_run("early", steps_per_batch=2)
    check(sim)
    parts = sim.cluster.trainers[0].batches
    assert len(parts) == 12
    for step, batch in enumerate(sim.of("batch_released")):
        groups = [{sample.traj.rsplit("/", 1)[0] for sample in part} for part in parts[2 * step : 2 * step + 2]]
        assert groups[0] | groups[1] == set(batch["groups"])
        assert groups[0] & groups[1] == set()
        assert sum(len(part) for part in parts[2 * step : 2 * step + 2]) == batch["trajectories"]
    assert [row["version"] for row in sim.of("published")] == [0, 1, 2, 3, 4, 5, 6]
