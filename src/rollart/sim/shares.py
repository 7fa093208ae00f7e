"""What many draw on at once (a registry's link), shared out equally from instant to instant.

Owns processor sharing: with n jobs each gets `min(each, capacity / n)` a second. Invariants: what jobs have got together is
the integral of that; equal jobs of one instant end in one instant, in the order in which they came. All jobs rise at one rate,
so one level serves them all: a job ends when the level has risen by its amount. An event is the end of a job or a change of
the rate and costs O(log n), however many others are there.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

from rollart.core.errors import ConfigError


class Job:
    """One draw on a share; given back by `FairShare.start`, understood by `FairShare.stop`."""

    __slots__ = ("done", "end", "live")

    def __init__(self, end: float, done: Callable[[], None]) -> None:
        self.end = end
        """Level at which it has all."""
        self.done = done
        self.live = True


class FairShare:
    """`capacity` units a second in all, at most `each` for one job: bytes of a link."""

    __slots__ = (
        "_at_s",
        "_capacity",
        "_ends",
        "_jobs",
        "_level",
        "_order",
        "_timer",
        "each",
    )

    def __init__(self, capacity: float, each: float = math.inf) -> None:
        for name, value in (("capacity", capacity), ("each", each)):
            if not value > 0:
                raise ConfigError(f"{name} of something shared is {value}; give a number above 0")
        if math.isinf(capacity) and math.isinf(each):
            raise ConfigError("something shared has neither a capacity nor a rate for each; give one of them")
        self._capacity = capacity
        self.each = each
        self._level = 0.0
        self._at_s = 0.0
        self._order = 0
        self._jobs = 0
        self._ends: list[tuple[float, int, Job]] = []
        """Heap over the level at which a job ends; jobs that were stopped are in it until they come up."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def jobs(self) -> int:
        return self._jobs

    @property
    def rate(self) -> float:
        """Units a second that each job gets now."""
        return min(self.each, self._capacity / self._jobs) if self._jobs else 0.0

    def start(self, amount: float, done: Callable[[], None]) -> Job:
        """Draw `amount` units; `done` is called when they are there, never within this call."""
        self._advance()
        self._order += 1
        job = Job(self._level + max(0.0, amount), done)
        heapq.heappush(self._ends, (job.end, self._order, job))
        self._jobs += 1
        self._arm()
        return job

    def stop(self, job: Job) -> float:
        """Draw no more; what it lacked, 0 for one that has ended."""
        if not job.live:
            return 0.0
        self._advance()
        lacking = max(0.0, job.end - self._level)
        self._leave(job)
        self._arm()
        return lacking

    def _leave(self, job: Job) -> None:
        job.live = False
        self._jobs -= 1

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed, self._at_s = now - self._at_s, now
        if self._jobs and elapsed > 0:
            self._level += elapsed * self.rate

    def _arm(self) -> None:
        """Wake when the next one ends at today's rate."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].live:
            heapq.heappop(self._ends)
        if not self._ends:
            self._level = 0.0  # nobody measures from it: start anew where numbers are finest
            return
        due_s = self._at_s + max(0.0, self._ends[0][0] - self._level) / self.rate
        self._timer = asyncio.get_running_loop().call_at(due_s, self._due, self._ends[0][0])

    def _due(self, level: float) -> None:
        """The first of the heap has all, whatever rounding says, and so have those that are level with it."""
        self._timer = None
        self._advance()
        self._level = max(self._level, level)
        ended: list[Job] = []
        while self._ends and (self._ends[0][0] <= self._level or not self._ends[0][2].live):
            job = heapq.heappop(self._ends)[2]
            if job.live:
                self._leave(job)
                ended.append(job)
        self._arm()
        for job in ended:
            job.done()
