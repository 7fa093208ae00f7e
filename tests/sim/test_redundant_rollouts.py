"""Redundant members and groups: exactly a batch is trained, losers are stopped at once and their tokens counted."""

from __future__ import annotations

import pytest

from rollart.sched.mixing import Mix
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate, trained


def a_run(**schedule: int) -> SimRun:
    tasks = [a_task("a"), a_task("b", ratio=3)]
    config = a_config(tasks, schedule={"steps": 6, **schedule})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1), env=random_env(mean_s=1.0, most_turns=5), trainer=TrainerModel(finish_s=4.0)
    )
    return simulate(config, tasks, cluster)


@pytest.mark.parametrize("redundancy", [1, 3])
def test_a_group_is_trained_with_its_first_members_and_stops_the_others(redundancy: int) -> None:
    sim = a_run(redundancy=redundancy)
    check(sim)
    assert {row["members"] for row in sim.of("group_opened")} == {4 + redundancy}
    assert {len(members) for members in trained(sim).values()} == {4}
    assert {batch["trajectories"] for batch in sim.of("batch_released")} == {16}
    assert sim.of("ledger")[-1]["dropped"]["redundant"] > 0
    for group, members in trained(sim).items():
        (completed,) = sim.of("group_completed", group=group)
        ended = [row for row in sim.of("traj_finished", group=group) if row["status"] == "done"]
        assert ended[:4] == members, "the first four to be done, not the first four to be opened"
        stopped = [row for row in sim.of("abort_requested", reason="redundant") if row["traj"].startswith(f"{group}/")]
        running = 4 + redundancy - 4
        assert len(stopped) == running
        assert {row["t"] for row in stopped} == {completed["t"]}


def test_redundant_groups_are_opened_beyond_the_window_and_dropped_at_release() -> None:
    sim = a_run(redundant_groups=2)
    check(sim)
    window = 2 * 16 // 4
    outstanding = most = 0
    for row in sim.rows:
        outstanding += row["kind"] == "group_opened"
        outstanding -= row["kind"] == "group_dropped"
        if row["kind"] == "published":
            outstanding -= len(sim.of("batch_released", step=row["step"])[0]["groups"]) if row["step"] >= 0 else 0
        most = max(most, outstanding)
    assert most == window + 2
    dropped = sim.of("group_dropped", reason="redundant")
    assert dropped
    assert sim.of("ledger")[-1]["dropped"]["redundant"] == sum(
        row["sampled"] for row in sim.of("traj_finished") if row["group"] in {group["group"] for group in dropped}
    )


def test_without_redundancy_no_token_is_redundant() -> None:
    sim = a_run()
    check(sim)
    assert "redundant" not in sim.of("ledger")[-1]["dropped"]


def test_after_a_release_no_more_groups_are_left_than_coming_batches_want() -> None:
    """Per task, over the batches that what is left may still be trained in."""
    sim = a_run(redundant_groups=3, max_staleness=1)
    check(sim)
    mix = Mix({"a": 0.25, "b": 0.75}, 4)
    task = {row["group"]: row["task"] for row in sim.of("group_opened")}
    releases = sim.of("batch_released")
    assert sim.of("group_dropped", reason="redundant")
    for batch in releases[:-1]:
        left = {row["group"] for row in sim.of("group_opened") if row["seq"] < batch["seq"]}
        left -= {group for earlier in releases if earlier["seq"] <= batch["seq"] for group in earlier["groups"]}
        left -= {row["group"] for row in sim.of("group_dropped") if row["t"] <= batch["t"]}
        quota = mix.quota(batch["step"] + 1)
        assert all(sum(task[group] == name for group in left) <= quota[name] for name in ("a", "b"))
