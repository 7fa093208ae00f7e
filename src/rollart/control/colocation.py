"""Devices that rollout and training share: engines give them up before a step and take them back after it.

Invariant: while the trainer computes on shared devices, be it a step or what another one loads and repeats, no engine in
service on them holds memory; engines on other pools go on. Where nothing is shared nothing happens, not even an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from rollart.control.fleet import Fleet
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import RunFailed, failure
from rollart.core.events import Recorder
from rollart.ports import Engine


class Colocation:
    """`pools`: those whose devices are shared; `limit_s`: how long one switch may take."""

    def __init__(self, record: Recorder, waits: Waits, fleet: Fleet, *, pools: frozenset[str], limit_s: float) -> None:
        self._record = record
        self._waits = waits
        self._fleet = fleet
        self._pools = pools
        self._limit_s = limit_s
        self.trains = False
        """The shared devices are the trainer's, or about to be."""

    @asynccontextmanager
    async def training(self, *, keeps: bool = False) -> AsyncIterator[None]:
        """Inside, the shared devices are the trainer's, and afterwards too where it `keeps` them for more.

        Raises RunFailed when engines do not give them up or take them back.
        """
        if not self._pools:
            yield
            return
        if not self.trains:
            self.trains = True
            await self._switch("train")
        yield  # what fails is done again, on devices that are still the trainer's
        if not keeps:
            self.trains = False
            await self._switch("rollout")

    async def admit(self, engine: Engine) -> None:
        """A new engine, before anyone asks anything of it: it gives its devices up as long as they are the trainer's.

        Raises RunFailed as `training` does.
        """
        asleep = False
        while engine.info.pool in self._pools and asleep != self.trains:
            asleep = not asleep
            await self._hand_over([engine], "train" if asleep else "rollout")

    async def _switch(self, to: str) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        sharing = [engine for engine in self._fleet.engines.values() if engine.info.pool in self._pools]
        await self._hand_over(sharing, to)
        self._record("devices_switched", to=to, engines=len(sharing), seconds=round(loop.time() - started, 6))

    async def _hand_over(self, engines: list[Engine], to: str) -> None:
        calls = (engine.sleep() if to == "train" else engine.wake() for engine in engines)
        try:
            await self._waits.on(
                _all(calls), what=f"engines to hand devices over to {'training' if to == 'train' else 'rollout'}",
                deadline_s=asyncio.get_running_loop().time() + self._limit_s,
            )  # fmt: skip
        except WaitExpired as expired:
            why = failure("engine", "timeout", f"{expired}: {', '.join(_names(engines))}")
            raise RunFailed("engines and trainer share devices, and these did not change hands", why) from expired


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*calls)


def _names(engines: list[Engine]) -> list[str]:
    return [engine.info.id for engine in engines]
