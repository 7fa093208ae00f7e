"""What a message between control and a worker costs on a simulated machine: batches out, polls back, as `runtime.wire` does.

Owns the way of a call to a worker and of its answer back. Invariants: calls that control makes in one turn of its loop travel
as one batch; one poll is under way at a time, and takes all answers that are there; control hands out a few answers per turn
of its loop, as `control.exchange` does. Each of these is work of the process that does it, so messages wait for busy
processes and slow them down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from rollart.control.exchange import SLICE
from rollart.sim.host import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCosts:
    """Core seconds, and the seconds that a message is on its way."""

    send_s: float
    """Control sends a batch."""
    take_s: float
    """Control takes the answer to a poll."""
    batch_s: float
    """The worker takes a batch in."""
    poll_s: float
    """The worker answers a poll."""
    item_s: float = 0.0
    """The worker, for each item of either."""
    way_s: float = 0.0
    in_turns: int = 0
    """Turns of the worker's loop from the arrival of a call to its beginning."""
    out_turns: int = 0
    """And from its end to its answer's departure."""
    gap_s: float = 0.0
    """Between two polls at least: a call goes through several threads of both processes, each of which waits for a core."""
    within_s: float = math.inf
    """The worker answers polls in a thread of its own, which gets the interpreter after so long; else when it is their turn."""


@dataclass(slots=True)
class _Item:
    """One call or one answer, and what control does for it when it is taken."""

    future: asyncio.Future[None]
    control_s: float = 0.0


class SimWire:
    def __init__(self, control: Process, worker: Process, costs: WireCosts) -> None:
        self._control = control
        self._worker = worker
        self._costs = costs
        self._outbox: list[_Item] = []
        self._answers: list[_Item] = []
        self.batches = self.polls = 0
        self._polled_s = -math.inf
        self._polling = False
        """A poll is not with the worker: it is answered, or control has not taken the answer yet."""

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent, and polls that were answered."""
        return self.batches, self.polls

    async def there(self) -> None:
        """Be in the next batch; returns when the worker has taken it in."""
        await self._out()

    def post(self) -> None:
        """A message that nobody waits for."""
        self._out()

    def _out(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        item = _Item(loop.create_future())
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(item)
        return item.future

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        costs = self._costs
        self.batches += 1
        taken_in_s = costs.batch_s + costs.item_s * len(batch)

        def arrived() -> None:
            self._worker.turns(costs.in_turns, lambda: self._worker.do(taken_in_s, lambda: _tell(batch)))

        self._control.do(costs.send_s, lambda: _later(costs.way_s, arrived))

    async def back(self, control_s: float) -> None:
        """Be in the next answer to a poll; returns when control has it, which costs it `control_s` beside the poll."""
        item = _Item(asyncio.get_running_loop().create_future(), control_s)
        self._answers.append(item)
        if not self._polling:
            self._answer()
        await item.future

    def _answer(self) -> None:
        """The worker answers the poll that is with it; answers that come before it gets to that go with it."""
        self._polling = True
        self._polled_s = asyncio.get_running_loop().time()
        self.polls += 1
        answered: list[_Item] = []

        def pack() -> None:
            answered.extend(self._answers)
            self._answers.clear()
            packed_s = costs.item_s * len(answered)
            self._worker.do(packed_s, lambda: self._worker.turns(costs.out_turns, gone), within_s=costs.within_s)

        def gone() -> None:
            _later(costs.way_s, lambda: self._take(answered))

        costs = self._costs
        self._worker.do(costs.poll_s, pack, within_s=costs.within_s)

    def _take(self, answered: list[_Item]) -> None:
        """Control takes an answer, polls again and hands out a slice after the other."""
        self._control.do(self._costs.take_s, lambda: self._hand_out(answered))
        # the next poll is on its way before the answers are handed out
        self._control.do(0.0, lambda: _later(self._way_of_poll_s(), self._poll_arrived))

    def _way_of_poll_s(self) -> float:
        return max(self._costs.way_s, self._polled_s + self._costs.gap_s - asyncio.get_running_loop().time())

    def _poll_arrived(self) -> None:
        self._worker.turns(self._costs.in_turns, self._poll_begins)

    def _poll_begins(self) -> None:
        self._polling = False
        if self._answers:
            self._answer()

    def _hand_out(self, answered: list[_Item]) -> None:
        now, rest = answered[:SLICE], answered[SLICE:]

        def done() -> None:
            _tell(now)
            if rest:
                asyncio.get_running_loop().call_soon(self._hand_out, rest)

        self._control.do(sum(item.control_s for item in now), done)


def _tell(items: list[_Item]) -> None:
    for item in items:
        if not item.future.done():
            item.future.set_result(None)


def _later(seconds: float, do: Callable[[], None]) -> None:
    if seconds > 0:
        asyncio.get_running_loop().call_later(seconds, do)
    else:
        do()
