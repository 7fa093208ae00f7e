"""Batched calls to one actor: at most one submit and one poll in `PAUSE_S`, and one long poll in flight, whatever the load.

Owns the way between a proxy in the control process and its actor. Batches travel as one pickled byte string, because
Ray would ship every small array in them as a buffer of its own. Batches leave in the order in which items were sent; calls of
the actor's other methods do not pass through here: they leave at once and may overtake items of the last `PAUSE_S`. So a new
version may be applied, or an engine told to sleep, before it has a request that was sent earlier: the request is sampled under
the version that is served when it comes, as its spans say (refused, if it is pinned to an older one), or held until the engine
wakes. Invariant: when the actor is gone, is silent, raises in a submit or a poll, or answers what cannot be taken, `on_lost` is
called once with the cause and nothing is sent any more.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rollart.core.errors import failure
from rollart.core.types import Boundary, Failure
from rollart.runtime.actors import InlineHandle, call, unless_done

S = TypeVar("S")
P = TypeVar("P")

POLL_S = 1.0
"""A poll returns empty after this long, so that a silent actor and a dead connection can be told apart."""
SILENT_S = 30.0
"""Beyond that an actor without an answer counts as lost: longer than any one step or apply, in which it cannot answer."""
PAUSE_S = 0.02
"""Least time between two batches that are sent, and between an answer that brings something and the next poll: a call costs a
few milliseconds of CPU time over both processes, so a busy actor gets its items by the batch. After a quiet moment nothing
waits: the next item is sent, and its answer is polled for, at once."""
BEATS = 8
"""Silence is counted in beats and not in seconds: time in which this loop itself was held up passes for one beat."""


class Wire(Generic[S, P]):
    """Sends items of type S to `actor.submit(bytes)`, receives values of type P from `actor.poll(seconds) -> bytes`: a list of
    answers, or what has them as its `answers`."""

    def __init__(
        self, actor: Any, *, where: Boundary, on_poll: Callable[[P], None], on_lost: Callable[[Failure], None],
        poll_s: float = POLL_S, silent_s: float = SILENT_S, pause_s: float | None = None,
    ) -> None:  # fmt: skip
        self._actor = actor
        self._where = where
        self._on_poll = on_poll
        self._on_lost = on_lost
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._pause_s = (0.0 if isinstance(actor, InlineHandle) else PAUSE_S) if pause_s is None else pause_s
        self._sent_at = float("-inf")
        self._outbox: list[S] = []
        self._answers = self._batches = 0
        self._loops: tuple[asyncio.Task[None], ...] = ()
        self.lost: Failure | None = None

    def open(self) -> None:
        """Start polling, in the running loop."""
        loop = asyncio.get_running_loop()
        self._loops = (
            loop.create_task(self._poll(), name=f"poll {self._where}"),
            loop.create_task(self._watch(), name=f"watch {self._where}"),
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent, and polls that were answered."""
        return self._batches, self._answers

    def send(self, item: S) -> None:
        """Put an item into the next batch."""
        if not self._outbox:
            loop = asyncio.get_running_loop()
            wait_s = self._sent_at + self._pause_s - loop.time()
            if wait_s > 0:
                loop.call_later(wait_s, self._flush)
            else:
                loop.call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if not batch or self.lost is not None:
            return
        self._sent_at = asyncio.get_running_loop().time()
        try:
            self._batches += 1
            sent = self._actor.submit.remote(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))
            # the next batch does not wait for this one; but one that the actor refuses would be missing for ever
            unless_done(self._where, sent, self.fail)
        # boundary: whatever keeps a batch from being sent, nobody would ever answer the items in it
        except Exception as error:  # noqa: BLE001
            self.fail(self._broken("a batch could not be sent", error))

    async def _poll(self) -> None:
        while self.lost is None:
            try:
                outcome = await call(self._where, self._actor.poll.remote(self._poll_s))
                self._answers += 1
                if isinstance(outcome, Failure):
                    self.fail(outcome)
                elif self.lost is None:
                    poll = pickle.loads(outcome)
                    self._on_poll(poll)
                    if self._pause_s and _brings(poll):
                        await asyncio.sleep(self._pause_s)
            # boundary: an answer is the actor's; one that cannot be read or taken leaves its askers waiting for ever
            except Exception as error:  # noqa: BLE001
                self.fail(self._broken("an answer could not be taken", error))

    async def _watch(self) -> None:
        """Find an actor whose process is there and never answers."""
        limit_s, silent = self._poll_s + self._silent_s, 0
        while silent < BEATS:
            answers = self._answers
            await asyncio.sleep(limit_s / BEATS)
            silent = silent + 1 if answers == self._answers else 0
        self.fail(failure(self._where, "lost", f"silent for {limit_s:g} s"))

    def _broken(self, what: str, error: BaseException) -> Failure:
        return failure(self._where, "raised", f"{what}: {type(error).__name__}: {error}")

    def fail(self, why: Failure) -> None:
        """The actor is lost."""
        if self.lost is None:
            self.lost = why
            self.close()
            self._on_lost(why)

    def end(self, why: Failure) -> None:
        """The actor is being ended on purpose: nothing is sent any more, not even what waits for the next batch, and `on_lost`
        is not called."""
        self.lost = self.lost or why
        self.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for task in self._loops:
            task.cancel()


def _brings(poll: object) -> bool:
    """Whether there is an answer in it."""
    return bool(getattr(poll, "answers", poll))


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
