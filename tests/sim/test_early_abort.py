"""Early abort: a group is given up as stale when it could not be trained any more even if it ended now, and only then."""

from __future__ import annotations

import pytest

from rollart.core.seeds import rng
from rollart.sim.engine import EngineModel
from rollart.sim.envs import EnvModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate


def a_run(max_staleness: int) -> SimRun:
    """One trajectory in ten takes twenty times as long as the others, so its group is overtaken by several batches."""
    tasks = [a_task(max_turns=60)]
    config = a_config(tasks, schedule={"steps": 12, "max_staleness": max_staleness})
    env = random_env(mean_s=0.2, turns=lambda traj, attempt: 60 if rng(0, "long", traj).random() < 0.1 else 3)
    engine = EngineModel(token_s=0.1, prefetch_s=0.1, apply_s=0.1)
    return simulate(config, tasks, SimCluster(engine=engine, env=env, trainer=TrainerModel(finish_s=2.0)))


def test_only_groups_that_no_release_could_take_are_given_up() -> None:
    sim = a_run(1)
    check(sim)
    dropped = sim.of("group_dropped", reason="stale")
    assert dropped
    for drop in dropped:
        release = [row for row in sim.of("batch_released") if row["seq"] < drop["seq"]][-1]
        oldest = min(
            version
            for row in sim.of("turn_done")
            if row["traj"].startswith(f"{drop['group']}/")
            for version, _ in row["spans"]
        )
        assert release["version"] + 1 - oldest > 1, "not even the next release could have trained it"


def test_no_group_that_the_next_release_cannot_take_is_left_running() -> None:
    sim = a_run(1)
    ended = {row["group"]: row["seq"] for row in sim.of("group_dropped")}
    for release in sim.of("batch_released"):
        ended.update(dict.fromkeys(release["groups"], release["seq"]))
    for release in sim.of("batch_released"):
        after = next(row["seq"] for row in sim.rows if row["seq"] > release["seq"] and row["kind"] == "step_started")
        for row in sim.of("turn_done", finish="stop") + sim.of("turn_done", finish="length"):
            group = row["traj"].rsplit("/", 1)[0]
            hopeless = any(release["version"] + 1 - version > 1 for version, _ in row["spans"])
            if row["seq"] < release["seq"] and hopeless:
                assert ended[group] < after


def test_the_tokens_of_what_was_given_up_are_stale() -> None:
    sim = a_run(1)
    groups = {row["group"] for row in sim.of("group_dropped", reason="stale")}
    tokens = sum(row["sampled"] for row in sim.of("traj_finished") if row["group"] in groups)
    assert sim.of("ledger")[-1]["dropped"] == {"stale": tokens}


def test_a_bound_that_is_never_reached_gives_nothing_up() -> None:
    sim = a_run(12)
    check(sim)
    assert sim.of("group_dropped") == []


def test_a_synchronous_run_gives_nothing_up() -> None:
    sim = a_run(0)
    check(sim)
    assert sim.of("group_dropped") == []


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("finish_s", [0.5, 4.0, 20.0])
def test_nothing_goes_stale_only_because_new_weights_were_on_their_way(max_staleness: int, finish_s: float) -> None:
    """Groups that open when a version is published begin with that version, also while engines still fetch it. With the
    one before they would be due together with the batch before theirs, and one of the two would be thrown away."""
    tasks = [a_task()]
    config = a_config(tasks, schedule={"steps": 10, "max_staleness": max_staleness})
    env = EnvModel(latency_s=lambda traj, attempt, call, turn: 0.2, turns=lambda traj, attempt: 4)
    engine = EngineModel(token_s=0.05, prefetch_s=0.5, apply_s=0.2)
    sim = simulate(config, tasks, SimCluster(engine=engine, env=env, trainer=TrainerModel(finish_s=finish_s)))
    check(sim)
    assert sim.of("ledger")[-1]["dropped"] == {}
