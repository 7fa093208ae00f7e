"""Batched calls to one actor: at most one submit per turn of the loop and one long poll in flight, whatever the load.

Owns the way between a proxy in the control process and its actor. Batches travel as one pickled byte string, because
Ray would ship every small array in them as a buffer of its own. Invariant: when the actor is gone, or raises in a poll,
`on_lost` is called once with the cause and nothing is sent any more.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rollart.core.types import Boundary, Failure
from rollart.runtime.actors import call

S = TypeVar("S")
P = TypeVar("P")

POLL_S = 1.0
"""A poll returns empty after this long, so that a silent actor and a dead connection can be told apart."""


class Wire(Generic[S, P]):
    """Sends items of type S to `actor.submit(bytes)`, receives values of type P from `actor.poll(seconds) -> bytes`."""

    def __init__(
        self, actor: Any, *, where: Boundary, on_poll: Callable[[P], None], on_lost: Callable[[Failure], None]
    ) -> None:
        self._actor = actor
        self._where = where
        self._on_poll = on_poll
        self._on_lost = on_lost
        self._outbox: list[S] = []
        self._polling: asyncio.Task[None] | None = None
        self.lost: Failure | None = None

    def open(self) -> None:
        """Start polling, in the running loop."""
        self._polling = asyncio.get_running_loop().create_task(self._poll(), name=f"poll {self._where}")

    def send(self, item: S) -> None:
        """Put an item into the next batch."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if batch and self.lost is None:
            self._actor.submit.remote(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))

    async def _poll(self) -> None:
        while self.lost is None:
            outcome = await call(self._where, self._actor.poll.remote(POLL_S))
            if isinstance(outcome, Failure):
                self.fail(outcome)
            else:
                self._on_poll(pickle.loads(outcome))

    def fail(self, why: Failure) -> None:
        """The actor is lost."""
        if self.lost is None:
            self.lost = why
            self._on_lost(why)

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()


class Bell:
    """The actor's side of a long poll: rings when there is something to answer."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self.error: BaseException | None = None

    def wake(self) -> None:
        self._ready.set()

    async def wait(self, wait_s: float) -> None:
        """Return when there is something to answer, or after `wait_s`. Raises what broke the actor's work."""
        try:
            async with asyncio.timeout(wait_s):
                await self._ready.wait()
        except TimeoutError:
            pass
        self._ready.clear()
        if self.error is not None:
            raise self.error
