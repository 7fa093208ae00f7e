"""Waiting in line for something that is given out one by one: places of a service, room on a host.

Invariant: first come, first served; what is given goes to exactly one that still waits, and what was given to one that has
gone in the same instant goes back. Each of it costs O(1) on average: whoever gave up is passed over when it comes up.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """`back` takes what was given to a waiter that is cancelled before it has it."""

    __slots__ = ("_back", "_turns")

    def __init__(self, back: Callable[[T], None]) -> None:
        self._back = back
        self._turns: deque[asyncio.Future[T | None]] = deque()

    async def wait(self, deadline_s: float) -> T | None:
        """What is given, or None at the deadline (loop time)."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[T | None] = loop.create_future()
        self._turns.append(turn)
        timer = loop.call_at(deadline_s, _give_up, turn) if math.isfinite(deadline_s) else None
        try:
            return await turn
        except asyncio.CancelledError:
            given = turn.result() if turn.done() and not turn.cancelled() else None
            if given is not None:
                self._back(given)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def give(self, value: T) -> bool:
        """To the first that still waits; False when nobody does."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(value)
                return True
        return False


def _give_up(turn: asyncio.Future[T | None]) -> None:
    if not turn.done():
        turn.set_result(None)
