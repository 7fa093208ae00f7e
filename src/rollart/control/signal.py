"""A wake-up call between coroutines of one loop: `while not condition: await signal.wait()`.

No wake-up is lost, because nothing else runs between looking at the condition and starting to wait. Waiters wake in the
order in which they came, a slice of them per turn of the loop, so that thousands that wait for the same cannot hold it.
"""

from __future__ import annotations

import asyncio
from itertools import islice

SLICE = 32
"""Waiters woken per turn of the loop."""


class Signal:
    __slots__ = ("_followers", "_waiters")

    def __init__(self) -> None:
        self._followers: list[Signal] = []
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, {}
        self._wake(waiters)
        for follower in self._followers:
            follower.notify()

    def forward_to(self, other: Signal) -> None:
        """Whoever waits for `other` is woken by this one too."""
        self._followers.append(other)

    def _wake(self, waiters: dict[asyncio.Future[None], None]) -> None:
        for waiter in list(islice(waiters, SLICE)):
            del waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
        if waiters:
            asyncio.get_running_loop().call_soon(self._wake, waiters)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
