"""Every wait has a deadline and a reason that can be printed.

`Waits.on` is the one way in which control waits for another part: it knows what is being waited for right now (for the
display and for the message when the run cannot go on), ends the wait at its deadline, and records that it did.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from rollart.core.errors import RollartError
from rollart.core.events import Recorder

T = TypeVar("T")

GRACE_S = 5.0
"""How much longer than its own deadline a port gets to answer that the deadline passed, before it counts as lost."""


class WaitExpired(RollartError):
    """A deadline passed. `what` says what was waited for."""

    def __init__(self, what: str, waited_s: float) -> None:
        self.what = what
        self.waited_s = waited_s
        super().__init__(f"waited {waited_s:.1f} s for {what}")


@dataclass(frozen=True, slots=True)
class Wait:
    what: str
    since_s: float


class Waits:
    def __init__(self, record: Recorder, *, grace_s: float = GRACE_S) -> None:
        self._record = record
        self.grace_s = grace_s
        """The same for what must fit into a trajectory's life."""
        self._ids = itertools.count()
        self._live: dict[int, Wait] = {}

    async def on(self, awaitable: Awaitable[T], *, what: str, deadline_s: float) -> T:
        """Await within the absolute deadline; raises WaitExpired, after cancelling what was awaited.

        A TimeoutError of the awaited thing's own comes out as it is.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        key = next(self._ids)
        self._live[key] = Wait(what, since)
        try:
            async with asyncio.timeout_at(deadline_s) as limit:
                return await awaitable
        except TimeoutError:
            if not limit.expired():
                raise
            waited = loop.time() - since
            self._record("wait_expired", what=what, waited_s=round(waited, 6))
            raise WaitExpired(what, waited) from None
        finally:
            del self._live[key]

    def now(self) -> Counter[str]:
        """What is being waited for, and by how many."""
        return Counter(wait.what for wait in self._live.values())
