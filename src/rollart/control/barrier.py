"""What a batch of environments does together: step when all have their action, be scored when all are done.

The ways of older systems, kept so that a schedule with them can be run and compared: `schedule.barrier=turn` is an
environment that takes a batch of actions and gives back a batch of observations, `schedule.score=batch` a reward stage after
the rollout stage. Invariant: an attempt waits for attempts that are open, and each of those comes to where it is waited for,
or ends, within its own deadlines; one that ends, fails or is told to stop is waited for no longer, and waits no longer. Each
wait is in `Waits`, with the end of the attempt's work as its deadline. Attempts that never joined (evaluation's, retries
between two attempts) wait for nobody. O(1) a turn, apart from waking who waits.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from rollart.control.fleet import Key
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import failure
from rollart.core.types import Failure

Place = Literal["playing", "ready", "stepping", "back", "played"]
"""playing: its environment opens, or an engine samples for it; ready: has its action; stepping: its environment steps; back:
has its observation, others of its wave do not; played: done, and its reward is not asked for yet."""
REASONS: dict[Place, str] = {
    "ready": "the other environments to have their actions (schedule.barrier)",
    "back": "the other environments to have stepped (schedule.barrier)",
    "played": "the other trajectories to end before rewards (schedule.score)",
}


class Barrier:
    """Where each open attempt is, and who is woken when the last of them arrives."""

    def __init__(self, waits: Waits, *, turns: bool, scores: bool) -> None:
        self._waits = waits
        self._turns = turns
        self._scores = scores
        self._places: dict[Key, Place] = {}
        self._counts: dict[Place, int] = {"playing": 0, "ready": 0, "stepping": 0, "back": 0, "played": 0}
        self._waiting: dict[Place, dict[Key, asyncio.Future[None]]] = {place: {} for place in REASONS}

    @property
    def open(self) -> int:
        """Attempts that have joined and not left."""
        return len(self._places)

    def join(self, key: Key) -> None:
        """An attempt begins: the others wait for it from now on."""
        if self._turns or self._scores:
            self._places[key] = "playing"
            self._counts["playing"] += 1

    def leave(self, key: Key) -> None:
        """It is over, or told to stop: nobody waits for it, and it waits for nobody. Safe to call twice."""
        place = self._places.pop(key, None)
        if place is None:
            return
        self._counts[place] -= 1
        wakes = self._waiting[place].pop(key, None) if place in self._waiting else None
        if wakes is not None and not wakes.done():
            wakes.set_result(None)
        self._settle()

    async def actions(self, key: Key, deadline_s: float) -> Failure | None:
        """It has its action: wait until all that are open have theirs."""
        return await self._wait(key, "ready", deadline_s) if self._turns else None

    async def observations(self, key: Key, deadline_s: float) -> Failure | None:
        """Its environment has stepped: wait until those that stepped with it have."""
        return await self._wait(key, "back", deadline_s) if self._turns else None

    async def ends(self, key: Key, deadline_s: float) -> None:
        """It is done: wait until all that are open are. At the deadline it goes on alone, while its reward can be had."""
        if self._scores:
            await self._wait(key, "played", deadline_s)
        self.leave(key)

    async def _wait(self, key: Key, place: Place, deadline_s: float) -> Failure | None:
        if key not in self._places:
            return None
        wakes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place][key] = wakes
        self._move(key, place)
        self._settle()
        if wakes.done():
            return None
        try:
            await self._waits.on(wakes, what=REASONS[place], deadline_s=deadline_s)
        except WaitExpired as expired:
            self.leave(key)
            return failure("env", "timeout", str(expired))
        return None

    def _move(self, key: Key, place: Place) -> None:
        self._counts[self._places[key]] -= 1
        self._places[key] = place
        self._counts[place] += 1

    def _settle(self) -> None:
        """Wake who has nobody left to wait for. A move counts at once, though its coroutine runs only later."""
        n = self._counts
        if n["back"] and not n["stepping"]:
            self._wake("back", "playing")
        if n["ready"] and not (n["playing"] or n["stepping"] or n["back"]):
            self._wake("ready", "stepping")
        if n["played"] and n["played"] == len(self._places):
            waiting, self._waiting["played"] = self._waiting["played"], {}
            self._places.clear()
            n["played"] = 0
            for wakes in waiting.values():
                if not wakes.done():
                    wakes.set_result(None)

    def _wake(self, place: Place, then: Place) -> None:
        waiting, self._waiting[place] = self._waiting[place], {}
        for key, wakes in waiting.items():
            self._move(key, then)
            if not wakes.done():
                wakes.set_result(None)
