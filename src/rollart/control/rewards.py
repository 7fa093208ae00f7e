"""Scoring: each trajectory on its own, as soon as it ends; no batch waits for a reward.

Invariant: a scorer that fails leaves the trajectory unscored, never at 0.
"""

from __future__ import annotations

import asyncio
import math

from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import failure
from rollart.core.types import Failure, Trajectory
from rollart.ports import Scorer
from rollart.sched.timeouts import call_deadline

PAUSE_S = 0.1
"""Before a failed scoring is tried again; doubled each time, so that a service that is overloaded gets some air."""
TRIES = 3
"""A scorer is stateless, so asking again is cheap beside the trajectory that would be lost."""


class Rewards:
    def __init__(self, waits: Waits, scorer: Scorer | None, *, limit_s: float) -> None:
        self._waits = waits
        self._scorer = scorer
        self.limit_s = limit_s
        """Of one call."""

    async def score(self, trajectory: Trajectory, *, work_until_s: float) -> float | Failure:
        """The scorer's reward, a finite number, or why there is none."""
        if self._scorer is None:
            return failure("scorer", "lost", f"task {trajectory.instance.task!r} names a scorer and none is running")
        last: float | Failure = failure("scorer", "timeout", "no time was left for scoring")
        for turn in range(TRIES):
            if turn:
                await asyncio.sleep(PAUSE_S * 2 ** (turn - 1))
            now = asyncio.get_running_loop().time()
            if now >= work_until_s:
                break
            deadline = call_deadline(now, self.limit_s, work_until_s)
            try:
                last = await self._waits.on(
                    self._scorer.score(trajectory, deadline_s=deadline),
                    what="scorers",
                    deadline_s=deadline + self._waits.grace_s,
                )
            except WaitExpired as expired:
                last = failure("scorer", "timeout", str(expired))
            last = finite(last)
            if not isinstance(last, Failure) or not last.retryable:
                break
        return last


def finite(reward: float | Failure) -> float | Failure:
    """NaN and infinities are no rewards."""
    if isinstance(reward, Failure) or math.isfinite(reward):
        return reward
    return failure("scorer", "not_finite", f"reward is {reward}; a reward is a finite number")
