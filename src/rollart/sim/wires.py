"""What a message between control and a worker costs on a simulated machine, and when it leaves, as `runtime.wire` does it.

Owns the way of a call to a worker and of its answer back. The law of times is the same both ways: what is to be sent leaves in
the next turn of the sender's loop, or when a pause has passed since the last batch left, with all that has gathered by then;
what arrives is taken in between two pieces of the receiver's work. The pause of a worker follows what its answers take
(`answer_pause_s`). Control hands out a few answers per turn of its loop, as `control.exchange` does. Invariant: sending and
taking in are work of the process that does it, so messages wait for busy processes and slow them down; they arrive in the order
in which they were sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollart.control.exchange import SLICE
from rollart.sched.pacing import PAUSE_S, answer_pause_s, newer_mean_s
from rollart.sim.host import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCosts:
    """Core seconds, and the seconds that a message is on its way."""

    send_s: float
    """Control sends a batch."""
    take_s: float
    """Control takes an answer."""
    batch_s: float
    """The worker takes a batch in."""
    answer_s: float
    """The worker sends an answer."""
    item_s: float = 0.0
    """The worker, for each item of either."""
    way_s: float = 0.0
    within_s: float = math.inf
    """The worker takes in and answers in a thread of its own, which gets the interpreter after so long; else when it is their
    turn."""


@dataclass(slots=True)
class _Item:
    """One call or one answer, and what control does for it when it is taken."""

    future: asyncio.Future[None]
    control_s: float = 0.0


class _Lane:
    """One direction of a wire."""

    def __init__(
        self, sender: Process, way_s: float, *, pause_s: Callable[[], float], within_s: float,
        send_s: Callable[[int], float], arrived: Callable[[Sequence[_Item]], None],
    ) -> None:  # fmt: skip
        """`send_s`: core seconds of sending a batch of so many items."""
        self._sender = sender
        self._pause_s = pause_s
        self._way_s = way_s
        self._within_s = within_s
        self._send_s = send_s
        self._arrived = arrived
        self._box: list[_Item] = []
        self._sent_s = -math.inf
        self.batches = 0

    def put(self, control_s: float = 0.0) -> asyncio.Future[None]:
        """Be in the next batch; the future is done when the other end says so."""
        loop = asyncio.get_running_loop()
        item = _Item(loop.create_future(), control_s)
        if not self._box:
            _later(self._sent_s + self._pause_s() - loop.time(), self._due)
        self._box.append(item)
        return item.future

    def _due(self) -> None:
        """It is time; the sender gets to it when what it is at is done, and takes what has gathered by then."""
        batch: list[_Item] = []

        def pack() -> float:
            batch.extend(self._box)
            self._box.clear()
            self._sent_s = asyncio.get_running_loop().time()
            self.batches += 1
            return self._send_s(len(batch))

        self._sender.do(pack, lambda: _later(self._way_s, lambda: self._arrived(batch)), within_s=self._within_s)


class SimWire:
    def __init__(self, control: Process, worker: Process, costs: WireCosts) -> None:
        self._control = control
        self._worker = worker
        self._costs = costs
        self._mean_s = 0.0
        """From an item to its answer, at the worker."""
        self._out = _Lane(
            control, costs.way_s, pause_s=lambda: PAUSE_S, within_s=math.inf, send_s=lambda n: costs.send_s,
            arrived=self._taken_in,
        )  # fmt: skip
        self._back = _Lane(
            worker, costs.way_s, pause_s=lambda: answer_pause_s(self._mean_s), within_s=costs.within_s,
            send_s=lambda n: costs.answer_s + costs.item_s * n, arrived=self._answered,
        )  # fmt: skip

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent, and answers that came."""
        return self._out.batches, self._back.batches

    async def there(self) -> float:
        """Be in the next batch; returns when the worker has taken it in: that instant."""
        await self._out.put()
        return asyncio.get_running_loop().time()

    def post(self) -> None:
        """A message that nobody waits for."""
        self._out.put()

    async def back(self, came_s: float, control_s: float) -> None:
        """Be in the worker's next answer, to what came at `came_s`; returns when control has it, which costs it `control_s`
        beside the answer."""
        self._mean_s = newer_mean_s(self._mean_s, asyncio.get_running_loop().time() - came_s)
        await self._back.put(control_s)

    def _taken_in(self, batch: Sequence[_Item]) -> None:
        costs = self._costs
        self._worker.do(costs.batch_s + costs.item_s * len(batch), lambda: _tell(batch), within_s=costs.within_s)

    def _answered(self, items: Sequence[_Item]) -> None:
        """Control takes an answer and hands out a slice after the other."""
        self._control.do(self._costs.take_s, lambda: self._hand_out(items))

    def _hand_out(self, answered: Sequence[_Item]) -> None:
        now, rest = answered[:SLICE], answered[SLICE:]

        def done() -> None:
            _tell(now)
            if rest:
                asyncio.get_running_loop().call_soon(self._hand_out, rest)

        self._control.do(sum(item.control_s for item in now), done)


def _tell(items: Sequence[_Item]) -> None:
    for item in items:
        if not item.future.done():
            item.future.set_result(None)


def _later(seconds: float, do: Callable[[], None]) -> None:
    if seconds > 0:
        asyncio.get_running_loop().call_later(seconds, do)
    else:
        asyncio.get_running_loop().call_soon(do)
