"""A machine whose cores are shared by all processes of a run: who computes beside whom decides how fast each is.

Owns the division of the cores. Invariants: processes of one weight that have work get the same speed, at most a core each;
control goes before all others, and those share what it leaves in proportion to their weights; what is computed in any time is
never more than the cores can; speeds change in the instant in which a process begins or ends, an event each, whatever the
amounts of work. Why: on a small machine control, engines, trainer and environments are more than its cores, and a model that
gives each a core of its own is wrong by half.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable

from rollart.core.errors import ConfigError

TURN_S = 1e-7
"""One turn of a process's own loop, or of its threads: only an order, what it costs is in what is done in it."""
ROUNDING_S = 1e-9
"""Of work: what sums of floating-point seconds may lack of a whole piece."""
LEAST_SHARE = 0.02
"""Of a core, for all who come second together: the system starves nobody."""
MOST_TOGETHER = 1.5
FIRST = math.inf
"""Weight of who goes before all others."""

Work = float | Callable[[], float]
"""Core seconds of a piece, or what says them when it begins."""


class _Class:
    """Processes of one weight: all of them go at the same speed."""

    __slots__ = ("ends", "served_s", "speed", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.ends: list[tuple[float, int, Process]] = []
        """Heap over the count of core seconds at which a piece of work ends."""
        self.served_s = 0.0
        """Core seconds that a process which was busy all the time has got."""
        self.speed = 1.0


class Host:
    """`cores` may be broken: what goes to strangers and to the system is taken off. `together`: the speed of a core while all
    are busy, where 1 does a core second in a second; above 1 where what is given was measured under more sharing."""

    def __init__(self, cores: float, *, together: float = 1.0) -> None:
        if not (math.isfinite(cores) and cores > 0 and 0 < together <= MOST_TOGETHER):
            raise ConfigError(
                f"a host of cores={cores} with together={together}: use cores above 0 and together in (0, {MOST_TOGETHER:g}]"
            )
        self._cores = cores
        self._together = together
        self._classes: list[_Class] = []
        """By weight, the highest first."""
        self._at_s = 0.0
        self._pieces = 0
        self._timer: asyncio.TimerHandle | None = None
        self.core_s = 0.0
        """Core seconds given out so far."""

    def compute(self, process: Process, work_s: float) -> None:
        """`process`, which does not compute now, has `work_s` core seconds to do; `process.ended()` is called when it has."""
        self._advance()
        self._pieces += 1
        mine = self._class_of(process.weight)
        heapq.heappush(mine.ends, (mine.served_s + work_s, self._pieces, process))
        self._divide()

    def _class_of(self, weight: float) -> _Class:
        for one in self._classes:
            if one.weight == weight:
                return one
        self._classes.append(_Class(weight))
        self._classes.sort(key=lambda one: -one.weight)
        return self._class_of(weight)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s, self._at_s = now - self._at_s, now
        for one in self._classes:
            one.served_s += elapsed_s * one.speed
            self.core_s += elapsed_s * one.speed * len(one.ends)

    def _divide(self) -> None:
        """Set the speeds for who is busy now, and the time of the next end."""
        left, busy = self._cores, sum(len(one.ends) for one in self._classes)
        slow = self._together if busy >= max(2, round(self._cores)) else 1.0
        weighted = sum(one.weight * len(one.ends) for one in self._classes if one.weight < FIRST)
        ends_s = math.inf
        for one in self._classes:
            n = len(one.ends)
            if not n:
                one.speed = slow
                continue
            if one.weight == FIRST:
                share = min(1.0, left / n)
            else:
                # who has more weight comes first: what it cannot use for want of a second core goes to the others
                share = min(1.0, left * one.weight / weighted)
                weighted -= n * one.weight
            left = max(left - n * share, LEAST_SHARE)
            one.speed = share * slow
            ends_s = min(ends_s, max(0.0, one.ends[0][0] - one.served_s) / one.speed)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._at_s + ends_s, self._end) if busy else None

    def _end(self) -> None:
        self._timer = None
        self._advance()
        ended = [process for one in self._classes for process in _ended(one)]
        self._divide()
        for process in ended:
            process.ended()


def _ended(one: _Class) -> list[Process]:
    """Take out those whose work is done, within rounding."""
    ended: list[Process] = []
    while one.ends and one.ends[0][0] <= one.served_s + ROUNDING_S:
        ended.append(heapq.heappop(one.ends)[2])
    return ended


class Process:
    """One process: what it is given is done one after the other, in the order in which it came. A second thread, where it has
    one, shares its interpreter: what that is given waits while the first computes, but not for long."""

    __slots__ = ("_aside", "_done_s", "_host", "_looking", "_queue", "_under_way", "name", "used_s", "weight")

    def __init__(self, host: Host, name: str, *, weight: float = 1.0) -> None:
        """`weight`: of its share where cores are busy. Ray gives its workers niceness 15, so control, with `FIRST`, goes before
        them."""
        self.name = name
        self.weight = weight
        self.used_s = 0.0
        """Core seconds of all that it has begun."""
        self._host = host
        self._queue: deque[tuple[Work, Callable[[], object]]] = deque()
        self._aside: deque[tuple[float, Work, Callable[[], object]]] = deque()
        """Of the second thread: at which count of `_done_s` its turn comes at the latest."""
        self._done_s = 0.0
        """Core seconds of the pieces that the first thread has begun."""
        self._looking = False
        self._under_way: Callable[[], object] | None = None

    def do(self, work_s: Work, done: Callable[[], object], *, within_s: float = math.inf) -> None:
        """Call `done` when this piece of `work_s` core seconds has had its turn. What depends on when it begins may be a
        function, which is called then. `within_s`: it is the second thread's, whose turn comes when the first has nothing to
        do, or has begun so many core seconds meanwhile."""
        if within_s < math.inf:
            self._aside.append((self._done_s + within_s, work_s, done))
        else:
            self._queue.append((work_s, done))
        if self._under_way is None:
            self._next()

    def _next(self) -> None:
        if self._aside and self._aside[0][0] <= self._done_s:
            self._begin(*self._aside.popleft()[1:])
        elif self._queue:
            self._done_s += self._begin(*self._queue.popleft())
        elif self._aside and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(TURN_S, self._look)

    def _look(self) -> None:
        """If nothing came in this very instant, the first thread waits for something, and the second has the process."""
        self._looking = False
        if self._under_way is None and not self._queue and self._aside:
            self._begin(*self._aside.popleft()[1:])

    def _begin(self, work: Work, done: Callable[[], object]) -> float:
        self._under_way = done
        work_s = work() if callable(work) else work
        self.used_s += work_s
        self._host.compute(self, work_s)
        return work_s

    def ended(self) -> None:
        done, self._under_way = self._under_way, None
        self._next()
        if done is not None:
            done()

    async def work(self, work_s: float) -> None:
        """The same for a coroutine. Whoever gives up waiting does not stop the work."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.do(work_s, lambda: None if future.done() else future.set_result(None))
        await future
