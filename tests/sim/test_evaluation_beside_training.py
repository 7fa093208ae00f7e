"""Evaluations while training goes on: pinned to their version, within a deadline, outside everything that is trained."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate


def an_evaluated_run(*, finish_s: float, prefetch_s: float = 0.2, engines: int = 2, **sections: Any) -> SimRun:
    tasks = [a_task("a", held_out=10), a_task("b")]
    config = a_config(
        tasks, engines=engines,
        **{"schedule": {"steps": 7}, "eval": {"every": 2, "episodes": 12, "concurrency": 8}, **sections},
    )  # fmt: skip
    engine = EngineModel(token_s=0.05, prefetch_s=prefetch_s, apply_s=0.1)
    cluster = SimCluster(engine=engine, env=random_env(mean_s=0.2), trainer=TrainerModel(finish_s=finish_s))
    return simulate(config, tasks, cluster)


@pytest.mark.parametrize("finish_s", [0.1, 3.0])
@pytest.mark.parametrize(("max_staleness", "order"), [(0, "early"), (1, "early"), (2, "paper")])
def test_every_evaluated_token_has_the_version_that_is_evaluated(
    max_staleness: int, order: str, finish_s: float
) -> None:
    sim = an_evaluated_run(
        finish_s=finish_s, schedule={"steps": 7, "max_staleness": max_staleness, "sync_order": order}
    )
    check(sim)
    versions = {row["eval"]: row["version"] for row in sim.of("eval_started")}
    assert versions.items() >= {"before": 0, "step-2": 2, "after": 7}.items()
    names: dict[str, set[int]] = {}
    for score in sim.of("eval_scored"):
        assert score["complete"]
        assert score["version"] == versions[score["eval"]]
        assert score["episodes"] == 12
    for trajectory in sim.kept:
        if trajectory.instance.purpose == "eval":
            names.setdefault(f"{trajectory.instance.task}/{trajectory.instance.epoch}", set()).update(
                span.version for span in trajectory.spans
            )
    assert {len(versions) for versions in names.values()} == {1}


def test_engines_put_an_apply_off_until_the_evaluation_has_ended() -> None:
    sim = an_evaluated_run(finish_s=0.1)
    check(sim)
    for started in sim.of("eval_started"):
        (ended,) = sim.of("eval_finished", eval=started["eval"])
        for row in sim.of("applied"):
            during = started["seq"] < row["seq"] < ended["seq"]
            assert not (during and row["version"] > started["version"])
    published = [row["t"] for row in sim.of("published", version=3)]
    applied = [row["t"] for row in sim.of("applied") if row["version"] >= 3]
    (ended,) = sim.of("eval_finished", eval="step-2")
    assert max(published) < ended["t"] <= min(applied)


def test_an_evaluation_gets_its_version_though_training_is_faster_than_the_fetch() -> None:
    """Engines skip versions that were overtaken on their way to them, but not the one that is being evaluated."""
    sim = an_evaluated_run(finish_s=0.05, prefetch_s=2.0, schedule={"steps": 12, "max_staleness": 3})
    check(sim)
    middle = [row for row in sim.of("eval_finished") if row["eval"].startswith("step")]
    assert middle
    assert all(row["complete"] for row in middle)
    versions = {row["version"] for row in sim.of("applied")}
    assert {row["version"] for row in middle} <= versions
    assert len(versions) < 13


def test_an_evaluation_that_passes_its_deadline_is_cut_and_says_so() -> None:
    sim = an_evaluated_run(finish_s=0.1, schedule={"steps": 7, "max_staleness": 3}, deadlines={"pinned_s": 1.0})
    check(sim)
    assert [row["complete"] for row in sim.of("eval_finished") if row["eval"] == "step-2"] == [False]
    scores = sim.of("eval_scored", eval="step-2")
    assert {score["complete"] for score in scores} == {False}
    assert all(score["episodes"] < 12 for score in scores)
    (started,) = sim.of("eval_started", eval="step-2")
    newer = [row["t"] for row in sim.of("applied") if row["version"] > 2]
    assert min(newer) - started["t"] == pytest.approx(1.1), "the pin's second and the apply itself"
    assert sim.of("eval_finished")[-1]["complete"], "the evaluation after the last step has nobody to make room for"


def test_evaluated_trajectories_enter_no_group_batch_or_mix() -> None:
    sim = an_evaluated_run(finish_s=1.0)
    check(sim)
    groups = {row["group"] for row in sim.of("group_opened")}
    evaluated = sim.of("traj_finished", purpose="eval")
    assert len(evaluated) >= 12 * 3 * 3
    assert groups.isdisjoint(row["group"] for row in evaluated)
    assert sim.of("ledger")[-1]["eval"] > 0


def test_no_evaluation_starts_while_the_last_one_runs() -> None:
    sim = an_evaluated_run(finish_s=0.01, schedule={"steps": 9, "max_staleness": 3}, eval={"every": 1, "episodes": 12})
    check(sim)
    rows = [row for row in sim.rows if row["kind"] in ("eval_started", "eval_finished")]
    assert [row["kind"] for row in rows] == ["eval_started", "eval_finished"] * (len(rows) // 2)
    assert sim.of("advisory", code="evaluation_slow")
