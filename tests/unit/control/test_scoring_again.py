"""A scorer that fails is asked again, a few times and after growing pauses; one that will only fail again is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollart.control.rewards import PAUSE_S, TRIES, Rewards
from rollart.control.waits import Waits
from rollart.core.errors import failure
from rollart.core.events import Recorder
from rollart.core.types import Failure, TaskInstance, Trajectory
from rollart.sim.loop import run

AGAIN = failure("scorer", "raised", "HTTP 500")
NEVER = failure("scorer", "raised", "no such scorer", retryable=False)


class Script:
    """Answers in turn; notes when it was asked."""

    def __init__(self, answers: Sequence[float | Failure]) -> None:
        self.answers = list(answers)
        self.asked_s: list[float] = []

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        self.asked_s.append(asyncio.get_running_loop().time())
        return self.answers.pop(0)


def a_trajectory() -> Trajectory:
    instance = TaskInstance(task="a", epoch=0, index=0, seed=0)
    return Trajectory(
        id=instance.traj_id(0), attempt=0, group_id=instance.group_id, instance=instance, member=0, segments=(),
        status="done", finish_cause="env_done",
    )  # fmt: skip


def scored(script: Script, *, until_s: float = 100.0) -> float | Failure:
    async def main() -> float | Failure:
        waits = Waits(Recorder((), asyncio.get_running_loop().time))
        return await Rewards(waits, script, limit_s=10.0).score(a_trajectory(), work_until_s=until_s)

    return run(main())


@pytest.mark.parametrize(
    ("answers", "asked", "reward"),
    [
        ([1.0], 1, 1.0),
        ([0.0], 1, 0.0),
        ([AGAIN, 0.5], 2, 0.5),
        ([AGAIN] * TRIES, TRIES, AGAIN),
        ([NEVER], 1, NEVER),
        ([AGAIN, NEVER], 2, NEVER),
    ],
)
def test_how_often_a_scorer_is_asked(answers: list[float | Failure], asked: int, reward: float | Failure) -> None:
    script = Script(answers)
    assert scored(script) == reward
    assert len(script.asked_s) == asked


def test_pauses_double() -> None:
    script = Script([AGAIN] * TRIES)
    scored(script)
    assert script.asked_s == pytest.approx([0.0, PAUSE_S, 3 * PAUSE_S])


def test_nobody_is_asked_when_the_attempts_time_is_over() -> None:
    script = Script([1.0])
    why = scored(script, until_s=0.0)
    assert isinstance(why, Failure)
    assert (why.where, why.kind) == ("scorer", "timeout")
    assert script.asked_s == []


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_no_reward(reward: float) -> None:
    why = scored(Script([reward] * TRIES))
    assert isinstance(why, Failure)
    assert why.kind == "not_finite"
