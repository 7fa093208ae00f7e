"""Batched messages between a proxy in the control process and its actor: over a line of their own, or by calls in one process.

Owns the way of items to an actor and of its answers back. An actor in a process of its own is asked over Ray where it can be
reached, and from then on batches and answers travel over one socket (`runtime.line`): a message costs a fraction of a Ray call,
and answers are pushed. Batches leave in the order in which items were sent; calls of the actor's other methods do not pass
through here: they go through Ray and may overtake items, or be overtaken by them. So a new version may be applied, or an engine
told to sleep, before it has a request that was sent earlier: the request is sampled under the version that is served when it
comes, as its spans say (refused, if it is pinned to an older one), or held until the engine wakes.

The law of times: an item leaves in the loop's next turn, or when `PAUSE_S` has passed since the last batch left, with all that
has gathered by then; an answer leaves when the actor's piece of work ends, or when `answer_pause_s` has passed since the last
answer left, in the same way. While the other end does not read, nothing leaves, and what gathers leaves together.

Invariant: when the actor is gone, cannot be reached, is silent, raises, or answers what cannot be taken, `on_lost` is called
once with the cause and nothing is sent any more.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollart.core.errors import ClusterError, failure
from rollart.core.types import Boundary, Failure
from rollart.runtime import line
from rollart.runtime.actors import InlineHandle, call, unless_done
from rollart.runtime.encoding import decoded, encoded
from rollart.runtime.line import ANSWER, BATCH, BROKEN, Line, Offer
from rollart.sched.pacing import PAUSE_S

S = TypeVar("S")
P = TypeVar("P")

POLL_S = 1.0
"""In one process a poll returns empty after this long; on a line an actor says something as often: its beat is no longer."""
SILENT_S = 30.0
"""Beyond that an actor without an answer counts as lost: longer than any one step or apply, in which it cannot answer."""
CAUSE_S = 3.0
"""After the end of a line Ray knows within a second why the actor is gone; when it does not, that is all there is to tell."""
BEATS = 8
"""Silence is counted in beats and not in seconds: time in which this loop itself was held up passes for one beat."""
FOLDER = "rollart-line-"
MAX_TEMP_CHARS = 70
"""Longest folder for the sockets' folders: 107 characters are the limit of a socket's path."""


class Wire(Generic[S, P]):
    """Sends items of type S in batches, receives values of type P: a list of answers, or what has them as its `answers`.

    The actor is an `Answering`; one in this process need only have its `submit(bytes)` and `poll(seconds) -> bytes`.
    `sockets`: an existing folder for sockets, which goes with the run; by default the system's for temporary files.
    """

    def __init__(
        self, actor: Any, *, where: Boundary, on_poll: Callable[[P], None], on_lost: Callable[[Failure], None],
        poll_s: float = POLL_S, silent_s: float = SILENT_S, cause_s: float = CAUSE_S, pause_s: float | None = None,
        sockets: Path | None = None,
    ) -> None:  # fmt: skip
        self._actor = actor
        self._where = where
        self._on_poll = on_poll
        self._on_lost = on_lost
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._cause_s = cause_s
        self._inline = isinstance(actor, InlineHandle)
        self._pause_s = (0.0 if self._inline else PAUSE_S) if pause_s is None else pause_s
        self._sockets = sockets
        self._sent_at = float("-inf")
        self._outbox: list[S] = []
        self._answers = self._batches = 0
        self._line: Line | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._loops: tuple[asyncio.Task[None], ...] = ()
        self.lost: Failure | None = None

    def open(self) -> None:
        """Begin to send and to listen, in the running loop."""
        loop, ways = asyncio.get_running_loop(), (self._poll,) if self._inline else (self._connect, self._hold)
        self._loops = tuple(
            loop.create_task(way(), name=f"{way.__name__[1:]} {self._where}") for way in (*ways, self._watch)
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent, and answers that came, empty ones too."""
        return self._batches, self._answers

    def send(self, item: S) -> None:
        """Put an item into the next batch; none follows once the actor is lost."""
        if self.lost is not None:
            return
        if not self._outbox:
            loop = asyncio.get_running_loop()
            wait_s = self._sent_at + self._pause_s - loop.time()
            if wait_s > 0:
                loop.call_later(wait_s, self._flush)
            else:
                loop.call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        if not self._outbox or self.lost is not None or not self._can_send:
            return
        batch, self._outbox = self._outbox, []
        self._sent_at = asyncio.get_running_loop().time()
        try:
            self._batches += 1
            self._go(encoded(batch))
        # boundary: whatever keeps a batch from being sent, nobody would ever answer the items in it
        except Exception as error:  # noqa: BLE001
            self.fail(self._broken("a batch could not be sent", error))

    @property
    def _can_send(self) -> bool:
        """Otherwise the batch leaves when the line is there, or free again."""
        return self._inline or (self._line is not None and not self._line.clogged)

    def _go(self, batch: bytes) -> None:
        if self._line is not None:
            self._line.send(BATCH, batch)
        else:
            # the next batch does not wait for this one; but one that the actor refuses would be missing for ever
            unless_done(self._where, self._actor.submit.remote(batch), self.fail)

    # --- in one process --------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while self.lost is None:
            outcome = await call(self._where, self._actor.poll.remote(self._poll_s))
            if isinstance(outcome, Failure):
                self.fail(outcome)
            else:
                brings = self._answered(outcome)
                if self._pause_s and brings:
                    await asyncio.sleep(self._pause_s)

    def _answered(self, answer: bytes | memoryview) -> bool:
        """Hand an answer out. Returns whether there is anything in it."""
        self._answers += 1
        if self.lost is not None:
            return False
        try:
            poll = decoded(answer)
            self._on_poll(poll)
            return bool(getattr(poll, "answers", poll))
        # boundary: an answer is the actor's; one that cannot be read or taken leaves its askers waiting for ever
        except Exception as error:  # noqa: BLE001
            self.fail(self._broken("an answer could not be taken", error))
            return False

    # --- on a line -------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix=FOLDER, dir=self._sockets or _temporary())
            offer = Offer(key=secrets.token_bytes(line.KEY_BYTES), machine=line.this_machine(), folder=folder)
            address = await call(self._where, self._actor.listen.remote(offer))
            if isinstance(address, Failure):
                self.fail(address)
                return
            sock = await line.connected(address, offer.key)
        except (ClusterError, OSError) as error:
            # an OSError's own words name a path, which differs from run to run
            self._lost_unless_told(f"it cannot be reached: {getattr(error, 'strerror', '') or error}")
            return
        finally:
            # who is connected needs the socket's name no longer
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        self._line = Line(sock, taken=self._frame, ended=self._ended, freed=self._flush)
        self._flush()

    async def _hold(self) -> None:
        """Ray tells why an actor is gone, and also when a process of the actor's keeps its end of the line open."""
        outcome = await call(self._where, self._actor.hold.remote())
        if self._line is not None:
            self._line.look()  # what it said before it went
        self.fail(outcome if isinstance(outcome, Failure) else failure(self._where, "lost", "it has stopped answering"))

    def _frame(self, kind: int, body: memoryview) -> None:
        if kind == ANSWER:
            self._answered(body)
        elif kind == BROKEN:
            self.fail(failure(self._where, "raised", bytes(body).decode(errors="replace")))
        else:
            self.fail(failure(self._where, "raised", f"a frame of kind {kind} is no answer"))

    def _ended(self, why: str) -> None:
        self._line = None
        self._lost_unless_told(f"its connection has ended: {why}")

    def _lost_unless_told(self, why: str) -> None:
        """The actor is gone, for which Ray may know a better cause in a moment."""
        cause = failure(self._where, "lost", why)
        self._ending = asyncio.get_running_loop().call_later(self._cause_s, self.fail, cause)

    # --- its end -----------------------------------------------------------------------------------------------------------

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
        if self._line is not None:
            self._line.close()
        if self._ending is not None:
            self._ending.cancel()


def _temporary() -> str:
    """The system's folder for temporary files, if a socket's path has room in it."""
    base = tempfile.gettempdir()
    return base if len(base) <= MAX_TEMP_CHARS else "/tmp"
