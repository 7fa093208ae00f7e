"""A wake-up call between coroutines of one loop: `while not condition: await signal.wait()`.

No wake-up is lost, because nothing else runs between looking at the condition and starting to wait. Waiters wake in the
order in which they came.
"""

from __future__ import annotations

import asyncio


class Signal:
    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
