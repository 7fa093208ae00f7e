"""Each try to score a trajectory is a call of its own: it takes its own time, the first as it always did."""

from __future__ import annotations

import asyncio
import math

import pytest

from rollart.config.virtual import EnvRewards, LocalRewards, RewardConfig
from rollart.control.rewards import TRIES, Rewards
from rollart.control.waits import Waits
from rollart.core.events import Recorder
from rollart.core.types import Failure, TaskInstance, Trajectory
from rollart.ports import Scorer
from rollart.sim.deadlines import share_above
from rollart.sim.envs import ScorerModel, SimScorer
from rollart.sim.loop import run
from rollart.sim.rewards import RewardService, scoring
from rollart.sim.workload import Draws, workload


def a_trajectory(index: int, attempt: int = 0) -> Trajectory:
    instance = TaskInstance(task="math", epoch=0, index=index, seed=index)
    return Trajectory(
        id=instance.traj_id(0), attempt=attempt, group_id=instance.group_id, instance=instance, member=0, segments=(),
        status="done", finish_cause="env_done",
    )  # fmt: skip


def tried(scorer: Scorer, one: Trajectory, limits_s: list[float]) -> list[float]:
    """Seconds of a call after another, each with so much time."""
    took: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for limit_s in limits_s:
            began = loop.time()
            await scorer.score(one, deadline_s=began + limit_s)
            took.append(loop.time() - began)

    run(main())
    return took


@pytest.mark.parametrize("config", [EnvRewards(), LocalRewards(kind="local")])
def test_a_try_that_came_too_late_is_followed_by_one_of_another_length(config: RewardConfig) -> None:
    draws = Draws(workload("math"), 0)
    one = next(a_trajectory(index) for index in range(100) if draws.score_s(a_trajectory(index).id, 0) > 0.1)
    own = [draws.score_s(one.id, 0, nth) for nth in range(3)]
    assert len(set(own)) == 3
    service = RewardService(config, scoring({"math": draws}), devices=1)
    assert tried(service, one, [0.1, math.inf]) == pytest.approx([0.1, own[1]])
    fresh = RewardService(config, scoring({"math": draws}), devices=1)
    assert tried(fresh, one, [0.001, 0.001, math.inf]) == pytest.approx([0.001, 0.001, own[2]])
    assert tried(fresh, a_trajectory(one.instance.index, attempt=1), [math.inf]) == pytest.approx(
        [draws.score_s(one.id, 1)]
    )


def test_a_trajectory_that_was_scored_is_scored_again_as_if_for_the_first_time() -> None:
    draws = Draws(workload("math"), 0)
    service = RewardService(EnvRewards(), scoring({"math": draws}))
    one = a_trajectory(7)
    assert tried(service, one, [math.inf] * 3) == pytest.approx([draws.score_s(one.id, 0)] * 3)


def test_a_model_without_a_law_for_further_tries_takes_as_long_each_time() -> None:
    slow = SimScorer(ScorerModel(latency_s=lambda trajectory: 5.0))
    assert tried(slow, a_trajectory(0), [1.0, 1.0, 9.0]) == [1.0, 1.0, 5.0]
    quicker = SimScorer(ScorerModel(latency_s=lambda trajectory: 5.0, again_s=lambda trajectory, nth: 5.0 - nth))
    assert tried(quicker, a_trajectory(0), [1.0, 1.0, 9.0]) == [1.0, 1.0, 3.0]


def test_as_many_trajectories_stay_unscored_as_three_independent_tries_leave() -> None:
    """With a limit that a share p of the calls misses, p^3 of the trajectories are not scored; it was p."""
    load, n = workload("math"), 600
    draws = Draws(load, 0)
    limit_s = load.score_s.at(0.5)
    late = share_above(load.score_s, limit_s)
    service = RewardService(EnvRewards(), scoring({"math": draws}))

    async def main() -> list[float | Failure]:
        waits = Waits(Recorder((), asyncio.get_running_loop().time))
        rewards = Rewards(waits, service, limit_s=limit_s)
        return await asyncio.gather(*(rewards.score(a_trajectory(at), work_until_s=1e6) for at in range(n)))

    unscored = sum(isinstance(reward, Failure) for reward in run(main())) / n
    expected = late**TRIES
    assert unscored == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / n))
