"""The threads of a simulated environment host, as many as `runtime.envs.workers` would have: more where calls wait, fewer
where they have long been quick.

Invariant: calls begin in the order in which they came, each in a thread of its own while it lasts. Why: a host begins with one
thread, and the first slow calls wait for more, which is a part of what latencies cost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TICK_S = 0.02
"""Between two looks at calls that wait; `runtime.envs.workers` has the same three numbers."""
SLOW_CALL_S = 0.002
"""Mean time in a call from which on threads pay."""
KEEP_LOOKS = 50
"""Threads outlive slow calls by so many looks."""


class Threads:
    def __init__(self, most: int) -> None:
        self._most = most
        self.threads = 1
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._finished = 0
        self._spent_s = 0.0
        self._looked_s = 0.0
        self._fast_looks = 0
        self._waited = False
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The call's result, once there was a thread for it and it is done."""
        loop = asyncio.get_running_loop()
        if self._running >= self.threads or self._queue:
            turn: asyncio.Future[None] = loop.create_future()
            self._queue.append(turn)
            if self._timer is None:
                self._timer = loop.call_at(max(loop.time(), self._looked_s + TICK_S), self._look)
            await turn
        else:
            self._running += 1
        began_s = loop.time()
        try:
            return await call()
        finally:
            self._finished += 1
            self._spent_s += loop.time() - began_s
            self._running -= 1
            self._serve()

    def _serve(self) -> None:
        while self._queue and self._running < self.threads:
            turn = self._queue.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _look(self) -> None:
        """Fit the number of threads to what was done since the last look."""
        loop = asyncio.get_running_loop()
        slow = self._finished == 0 or self._spent_s > SLOW_CALL_S * self._finished
        waiting = bool(self._queue)
        self._fast_looks = 0 if slow else self._fast_looks + 1
        if slow and self._waited and waiting:
            self.threads += min(self.threads, len(self._queue), self._most - self.threads)
        elif self._fast_looks > KEEP_LOOKS:
            self.threads -= self.threads // 2
        self._finished, self._spent_s = 0, 0.0
        self._looked_s, self._waited = loop.time(), waiting
        self._serve()
        self._timer = loop.call_later(TICK_S, self._look) if self._queue else None
