"""Every wait has a deadline and a reason that can be printed.

`Waits.on` is the one way in which control waits for another part: it knows what is being waited for right now (for the
display and for the message when the run cannot go on), ends the wait at its deadline, and records that it did.

Nearly every wait ends long before its deadline, and there are thousands at any time. So all share one timer, for the
earliest deadline; a wait costs an entry in a heap of numbers, and entries of waits that are over are dropped in bulk.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollart.core.errors import RollartError
from rollart.core.events import Recorder

T = TypeVar("T")

GRACE_S = 5.0
"""How much longer than its own deadline a port gets to answer that the deadline passed, before it counts as lost."""
OVER_KEPT = 512
"""Entries of waits that are over, tolerated in the heap beside as many as there are live ones before it is rebuilt."""


class WaitExpired(RollartError):
    """A deadline passed. `what` says what was waited for."""

    def __init__(self, what: str, waited_s: float) -> None:
        self.what = what
        self.waited_s = waited_s
        super().__init__(f"waited {waited_s:.1f} s for {what}")


@dataclass(slots=True)
class _Wait:
    """Does what `asyncio.Timeout` does, for less: there are two waits in every turn of every trajectory."""

    what: str
    overdue: Callable[[], None] | None
    task: asyncio.Task[Any]
    expired: bool = False
    """Its task was cancelled by it; whoever sees that cancellation takes it back."""


class Waits:
    def __init__(self, record: Recorder, *, grace_s: float = GRACE_S) -> None:
        self._record = record
        self.grace_s = grace_s
        """The same for what must fit into a trajectory's life."""
        self._ids = itertools.count()
        self._live: dict[int, _Wait] = {}
        self._deadlines: list[tuple[float, int]] = []
        """A heap of (deadline, id), of waits that are over as well."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        """When it rings."""

    async def on(
        self, awaitable: Awaitable[T], *, what: str, deadline_s: float, overdue: Callable[[], None] | None = None
    ) -> T:
        """Await within the absolute deadline; raises WaitExpired, after cancelling what was awaited.

        overdue: asks for an answer at the deadline, which then has `grace_s` seconds to come.
        A TimeoutError of the awaited thing's own comes out as it is.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError(f"a wait for {what} outside of a task has nobody whom its deadline could wake")
        since, cancels = asyncio.get_running_loop().time(), task.cancelling()
        key = next(self._ids)
        wait = self._live[key] = _Wait(what, overdue, task)
        try:
            self._expect(deadline_s, key)
            return await awaitable
        except (asyncio.CancelledError, TimeoutError) as error:
            if not wait.expired:
                raise
            wait.expired = False
            if task.uncancel() > cancels and isinstance(error, asyncio.CancelledError):
                raise  # somebody else has cancelled it as well
            waited = asyncio.get_running_loop().time() - since
            self._record("wait_expired", what=what, waited_s=round(waited, 6))
            raise WaitExpired(what, waited) from None
        finally:
            del self._live[key]
            if wait.expired:
                task.uncancel()

    def now(self) -> Counter[str]:
        """What is being waited for, and by how many."""
        return Counter(wait.what for wait in self._live.values())

    # --- deadlines ---------------------------------------------------------------------------------------------------

    def _expect(self, deadline_s: float, key: int) -> None:
        heapq.heappush(self._deadlines, (deadline_s, key))
        if len(self._deadlines) > 2 * len(self._live) + OVER_KEPT:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)
        if deadline_s < self._alarm_s:
            self._set_alarm()

    def _set_alarm(self) -> None:
        """For the earliest deadline of a live wait."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._alarm_s = None, math.inf
        while self._deadlines and self._deadlines[0][1] not in self._live:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            self._alarm_s = self._deadlines[0][0]
            self._alarm = asyncio.get_running_loop().call_at(self._alarm_s, self._ring)

    def _expire(self, key: int) -> None:
        wait = self._live.get(key)
        if wait is not None:
            wait.expired = True
            wait.task.cancel()

    def _ring(self) -> None:
        """End the waits whose deadline has come, or ask for their answers."""
        self._alarm, self._alarm_s = None, math.inf
        now = asyncio.get_running_loop().time()
        try:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, key = heapq.heappop(self._deadlines)
                wait = self._live.get(key)
                if wait is None:
                    continue
                if wait.overdue is None:
                    asyncio.get_running_loop().call_soon(self._expire, key)
                else:
                    ask, wait.overdue = wait.overdue, None
                    heapq.heappush(self._deadlines, (now + self.grace_s, key))
                    ask()
        finally:  # whatever an `overdue` raises, the other deadlines stand
            self._set_alarm()
