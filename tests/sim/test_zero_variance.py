"""The zero-variance filter in whole runs on virtual time: batches stay whole, the mix is kept, and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from rollart.core.seeds import rng
from rollart.core.types import TrajId
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate, trained

Reward = Callable[[TrajId, int], float]


def task_of(traj: str) -> str:
    return traj.split("/")[1]


def group_of(traj: str) -> str:
    return traj.rpartition("/")[0]


def some_equal(traj: TrajId, attempt: int) -> float:
    """Two thirds of the groups of `a` and none of `b` have equal rewards (the members of `b` alternate)."""
    if task_of(traj) == "b":
        return float(int(traj.rpartition("/")[2]) % 2)
    if rng(0, "easy", group_of(traj)).random() < 2 / 3:
        return 1.0
    return float(int(traj.rpartition("/")[2]) % 2)


def all_equal(traj: TrajId, attempt: int) -> float:
    return 1.0


def only_b_differs(traj: TrajId, attempt: int) -> float:
    return 0.0 if task_of(traj) == "a" else float(int(traj.rpartition("/")[2]) % 2)


def a_run(
    reward: Reward, *, zero_variance: str = "drop", refills: int = 10, steps: int = 6, batch_s: float = 600.0,
    mean_s: float = 0.5, **schedule: int,
) -> SimRun:  # fmt: skip
    tasks = [a_task("a"), a_task("b", ratio=3)]
    config = a_config(
        tasks, schedule={"steps": steps, **schedule},
        algorithm={"zero_variance": zero_variance, "refills": refills}, deadlines={"batch_s": batch_s},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.01),
        env=random_env(reward=reward, mean_s=mean_s),
        trainer=TrainerModel(finish_s=1.0),
    )
    return simulate(config, tasks, cluster)


def rewards_of(sim: SimRun) -> dict[str, set[float]]:
    return {group: {row["reward"] for row in members} for group, members in trained(sim).items()}


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("redundancy", [0, 2])
def test_groups_with_equal_rewards_are_replaced_and_batches_stay_whole(max_staleness: int, redundancy: int) -> None:
    sim = a_run(some_equal, max_staleness=max_staleness, redundancy=redundancy)
    check(sim)
    assert all(len(rewards) == 2 for rewards in rewards_of(sim).values()), "everything that was trained teaches"
    assert {batch["trajectories"] for batch in sim.of("batch_released")} == {16}
    tasks = [group.split("/")[1] for group in trained(sim)]
    assert tasks.count("b") == 3 * tasks.count("a") == 18, "the mix is that of what is trained"
    dropped = sim.of("group_dropped", reason="zero_variance")
    assert dropped
    assert {row["task"] for row in dropped} == {"a"}
    assert sim.of("advisory", code="zero_variance") == []
    # finished members, and those that redundancy had running beside them
    members = [row for row in sim.of("traj_finished") if row["group"] in {one["group"] for one in dropped}]
    assert sim.of("ledger")[-1]["dropped"]["zero_variance"] == sum(row["sampled"] for row in members)


def test_without_the_filter_the_same_groups_are_trained() -> None:
    sim = a_run(some_equal, zero_variance="train")
    check(sim)
    assert sim.of("group_dropped", reason="zero_variance") == []
    assert any(len(rewards) == 1 for rewards in rewards_of(sim).values())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_when_all_groups_have_equal_rewards_the_run_goes_on_after_its_bound_and_says_so(max_staleness: int) -> None:
    sim = a_run(all_equal, refills=2, max_staleness=max_staleness)
    check(sim)
    assert len(sim.of("batch_released")) == 6
    told = sim.of("advisory", code="zero_variance")
    assert sorted(row["task"] for row in told) == ["a", "b"], "each task is told of once, not once a step"
    assert "out of reach" in told[0]["text"]
    released = [0.0, *(row["t"] for row in sim.of("batch_released"))]
    for since, until in pairwise(released):
        dropped = [row["task"] for row in sim.of("group_dropped", reason="zero_variance") if since < row["t"] < until]
        # a batch has one group of a and three of b
        assert dropped.count("a") <= 2
        assert dropped.count("b") <= 6


def test_a_task_that_teaches_nothing_does_not_take_the_others_with_it() -> None:
    sim = a_run(only_b_differs, refills=3)
    check(sim)
    assert {row["task"] for row in sim.of("advisory", code="zero_variance")} == {"a"}
    assert {row["task"] for row in sim.of("group_dropped", reason="zero_variance")} == {"a"}
    assert all(len(rewards) == 2 for group, rewards in rewards_of(sim).items() if group.startswith("train/b/"))


def test_a_slow_refill_ends_before_the_trainer_s_watchdog() -> None:
    """With an allowance that would last beyond deadlines.batch_s, waiting for half of it ends the filter."""
    sim = a_run(all_equal, refills=10_000, steps=2, batch_s=60.0, mean_s=2.0)
    check(sim)
    assert len(sim.of("batch_released")) == 2
    for batch in sim.of("batch_released"):
        assert 30.0 <= batch["waited_s"] < 60.0
    assert sim.of("advisory", code="zero_variance")
