"""The actor's end of a `runtime.wire.Wire`: what every engine and environment host does to be asked and to answer.

Owns when answers leave. On a line they are pushed: the first at once, what comes within a pause after it together when that
is over, and at least every `beat_s` whatever there is, so that the control process can tell silence from quiet. The pause
follows the work: quick turns are not kept waiting, and slow ones leave in company (`sched.pacing`).
While the control process does not read, nothing is pushed and nothing waits: answers gather where they are made, and leave
together. In one process (`InlineActors`) the same answers are polled for. Invariant: an actor whose work broke says so once,
with the error, as its last word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollart.runtime import line
from rollart.runtime.encoding import decoded, encoded
from rollart.runtime.line import ANSWER, BATCH, BROKEN, Address, Line, Offer
from rollart.sched.pacing import answer_pause_s, newer_mean_s


class Answering:
    """Base of such actors: a subclass says how items are taken in and what is to answer; it calls `took`, `ring`, `broke`."""

    def __init__(self, *, beat_s: float) -> None:
        self._beat_s = beat_s
        self._mean_s = 0.0
        self._ready = asyncio.Event()
        self._error: BaseException | None = None
        self._line: Line | None = None
        self._pushed_s = float("-inf")
        self._due: asyncio.TimerHandle | None = None
        self._meeting: asyncio.Task[None] | None = None

    def take_in(self, items: Sequence[Any]) -> None:
        """Begin what a batch asks for. Whatever it raises loses the actor."""
        raise NotImplementedError

    def take_out(self) -> object:
        """All answers that have come up since the last time, and what else one answer carries."""
        raise NotImplementedError

    # --- for the subclass, in the actor's loop -------------------------------------------------------------------------

    def ring(self) -> None:
        """There is something to answer."""
        self._ready.set()
        if self._line is None or self._due is not None:
            return
        wait_s = self._pushed_s + answer_pause_s(self._mean_s) - self._now()
        if wait_s > 0:
            self._due = asyncio.get_running_loop().call_later(wait_s, self._push)
        else:
            self._push()

    def took(self, seconds: float) -> None:
        """So long an answer took to come up, from its item on."""
        self._mean_s = newer_mean_s(self._mean_s, seconds)

    def broke(self, error: BaseException) -> None:
        """The actor's work is lost."""
        if self._error is None:
            self._error = error
            self._ready.set()
            self._push()

    def tend(self) -> None:
        """Between two pieces of work that hold the loop: take what has come and push what is due, which the loop itself would
        get round to only after the next piece."""
        if self._line is not None:
            self._line.look()
        if self._due is not None and self._due.when() <= self._now():
            self._push()

    # --- in one process ------------------------------------------------------------------------------------------------

    async def submit(self, blob: bytes) -> None:
        self.take_in(decoded(blob))

    async def poll(self, wait_s: float) -> bytes:
        """Return when there is something to answer, or after `wait_s`. Raises what broke the actor's work."""
        try:
            async with asyncio.timeout(min(wait_s, self._beat_s)):
                await self._ready.wait()
        except TimeoutError:
            pass
        self._ready.clear()
        if self._error is not None:
            raise self._error
        return encoded(self.take_out())

    # --- on a line -----------------------------------------------------------------------------------------------------

    async def listen(self, offer: Offer) -> Address:
        """Where the control process finds this actor. Takes one connection; raises OSError when it cannot listen."""
        address, listener = line.listening(offer, _own_ip)
        self._meeting = asyncio.get_running_loop().create_task(self._meet(listener, offer.key))
        return address

    async def hold(self) -> None:
        """Never returns: who calls it is told by Ray when, and why, this actor is gone."""
        await asyncio.Event().wait()

    async def _meet(self, listener: Any, key: bytes) -> None:
        sock = await line.accepted(listener, key)
        if sock is not None:
            self._line = Line(sock, taken=self._taken, ended=self._hung_up, freed=self._push)
            self._push()
            self._beat()

    def _taken(self, kind: int, body: memoryview) -> None:
        try:
            if kind != BATCH:
                raise ValueError(f"a frame of kind {kind} is none that an actor takes")
            self.take_in(decoded(body))
        # boundary: whatever a batch brings about here, who sent it waits for its answers
        except Exception as error:  # noqa: BLE001
            self.broke(error)

    def _push(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._line is None or self._line.clogged:
            return
        if self._error is None:
            try:
                self._line.send(ANSWER, encoded(self.take_out()))
            # boundary: an answer that cannot be sent leaves its asker waiting for ever
            except Exception as error:  # noqa: BLE001
                self._error = error
        self._ready.clear()
        self._pushed_s = self._now()
        if self._error is not None:
            self._line.send(BROKEN, f"{type(self._error).__name__}: {self._error}".encode())
            self._line = None

    def _beat(self) -> None:
        """Say something every now and then."""
        if self._line is not None:
            wait_s = self._pushed_s + self._beat_s - self._now()
            if wait_s <= 0:
                self._push()
                wait_s = self._beat_s
            asyncio.get_running_loop().call_later(wait_s, self._beat)

    def _hung_up(self, why: str) -> None:
        """The control process is gone, or has given this actor up, and ends it in a moment."""
        self._line = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _own_ip() -> str:
    """As Ray has it for this node."""
    import ray

    ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ip
