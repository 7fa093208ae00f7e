"""A figure that is off by a little is found, whichever event carries it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollart.observe.audit_figures import figures
from rollart.observe.audit_record import Record
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, random_env, record_of, simulate


def a_run() -> SimRun:
    tasks = [a_task("a"), a_task("b")]
    config = a_config(tasks, engines=2, schedule={"max_staleness": 1})
    engine = EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.2)
    cluster = SimCluster(engine=engine, env=random_env(), trainer=TrainerModel(finish_s=1.0, publish_s=0.1))
    return simulate(config, tasks, cluster)


RUN = a_run()


def test_the_figures_of_an_honest_log_add_up() -> None:
    assert figures(record_of(RUN)) == []


@pytest.mark.parametrize(
    ("kind", "field", "by"),
    [
        ("group_completed", "reward_mean", 0.01),
        ("group_completed", "members", 1),
        ("group_completed", "oldest_version", 1),
        ("batch_released", "trajectories", 1),
        ("batch_released", "tokens", -1),
        ("batch_released", "staleness_mean", 0.01),
        ("batch_released", "newest_lag_mean", 0.01),
        ("batch_released", "waited_s", -1e6),
        ("step_finished", "trained_tokens", 1),
        ("step_finished", "seconds", 0.001),
        ("turn_done", "seconds", 0.001),
        ("traj_finished", "reward", 0.5),
        ("applied", "exposed_s", 100.0),
        ("published", "seconds", -100.0),
    ],
)
def test_a_figure_that_is_off_is_found(kind: str, field: str, by: float) -> None:
    log: list[dict[str, Any]] = copy.deepcopy([dict(event) for event in RUN.events])
    event = next(event for event in log if event["kind"] == kind)
    event["data"][field] += by
    assert figures(Record(log=log, min_members=2))
