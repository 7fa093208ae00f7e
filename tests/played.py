"""Two worlds that answer in one order: what one was seen to answer first, the other answers first too.

An asynchronous run decides by what comes first, which on real machines is chance. A `Score` is written while one world runs,
and played to the other: there a call to a port is carried out when its turn has come and not before, one at a time, and the
next only after control has dealt with the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from rollart.core.types import (
    Applied,
    Failure,
    Generation,
    Manifest,
    Observation,
    RequestId,
    Sample,
    TaskInstance,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)

T = TypeVar("T")
SETTLED = 60
"""Turns of the loop in which control has dealt with an answer: it hands it through a dozen coroutines at most."""


class Score:
    """The order of answers: written down, or played where it is given."""

    def __init__(self, order: Sequence[Hashable] | None = None) -> None:
        self.order = list(order or ())
        self._plays = order is not None
        self._left = Counter(self.order)
        self._place = 0
        self._waiting: dict[Hashable, asyncio.Future[None]] = {}
        self._under_way = False
        self._passing: set[asyncio.Task[None]] = set()

    @property
    def plays(self) -> bool:
        return self._plays

    async def answer(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> T:
        """Carry a call out: at once, and write it down; or when it is its turn."""
        if not self._plays:
            made = await call()
            self.order.append(key)
            return made
        if not self._left[key]:  # the other world never answered this one: it was given up
            await asyncio.get_running_loop().create_future()
        turn = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(key, None)
            if turn.done() and not turn.cancelled():  # its turn had just come
                self._pass_soon()
            raise
        try:
            return await call()
        finally:
            self._left[key] -= 1
            self._pass_soon()

    def _pass_soon(self) -> None:
        passing = asyncio.ensure_future(self._pass_on())
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass_on(self) -> None:
        for _ in range(SETTLED):
            await asyncio.sleep(0)
        self._place += 1
        self._under_way = False
        self._go_on()

    def _go_on(self) -> None:
        if self._under_way or self._place >= len(self.order):
            return
        turn = self._waiting.pop(self.order[self._place], None)
        if turn is not None and not turn.done():
            self._under_way = True
            turn.set_result(None)


class Behind:
    """A port that is called by a score; what it does not know it hands on."""

    def __init__(self, port: Any, score: Score) -> None:
        self._port = port
        self._score = score

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class EngineBehind(Behind):
    def __init__(self, port: Any, score: Score) -> None:
        super().__init__(port, score)
        self._held: set[RequestId] = set()
        self._aborted: set[RequestId] = set()

    async def generate(self, request: TurnRequest) -> Generation:
        async def sample() -> Generation:
            if request.id in self._aborted:
                return Generation(tokens=Tokens(n_tokens=0), finish="aborted")
            self._held.discard(request.id)
            made: Generation = await self._port.generate(request)
            return made

        self._held.add(request.id)
        try:
            return await self._score.answer(("generate", *request.id), sample)
        finally:
            self._held.discard(request.id)

    async def abort(self, requests: Sequence[RequestId]) -> None:
        self._aborted |= self._held.intersection(requests) if self._score.plays else set()
        await self._port.abort(requests)

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        key = ("prefetch", self._port.info.id, manifest.version)
        why: Failure | None = await self._score.answer(key, lambda: self._port.prefetch(manifest))
        return why

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        key = ("apply", self._port.info.id, version)
        done: Applied | Failure = await self._score.answer(
            key, lambda: self._port.apply(version, kept=kept, pinned_deadline_s=pinned_deadline_s)
        )
        return done


class EnvBehind(Behind):
    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> SessionBehind | Failure:
        opened = await self._score.answer(
            ("open", traj, attempt),
            lambda: self._port.open(instance, traj=traj, attempt=attempt, deadline_s=deadline_s),
        )
        return opened if isinstance(opened, Failure) else SessionBehind(opened, self._score, (traj, attempt))


class SessionBehind(Behind):
    def __init__(self, port: Any, score: Score, key: tuple[TrajId, int]) -> None:
        super().__init__(port, score)
        self._key = key
        self._steps = 0

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        seen: Observation | Failure = await self._score.answer(
            ("reset", *self._key), lambda: self._port.reset(deadline_s=deadline_s)
        )
        return seen

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        self._steps += 1
        seen: Observation | Failure = await self._score.answer(
            ("step", *self._key, self._steps), lambda: self._port.step(action, deadline_s=deadline_s)
        )
        return seen

    async def close(self) -> None:
        """An attempt has ended when it is closed, and a group is complete when its attempts have ended."""
        await self._score.answer(("close", *self._key), self._port.close)


class TrainerBehind(Behind):
    def __init__(self, port: Any, score: Score) -> None:
        super().__init__(port, score)
        self._calls: Counter[str] = Counter()

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self._calls[name] += 1
        return await self._score.answer((name, self._calls[name]), call)

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        await self._call("begin", lambda: self._port.begin(step, total_weight=total_weight))

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        found: Mapping[str, float] = await self._call("accumulate", lambda: self._port.accumulate(samples))
        return found

    async def finish(self) -> Mapping[str, float]:
        found: Mapping[str, float] = await self._call("finish", lambda: self._port.finish())
        return found

    async def publish(self, version: Version) -> Manifest:
        made: Manifest = await self._call("publish", lambda: self._port.publish(version))
        return made


def behind(port: Any, role: str, score: Score) -> Any:
    """The port of a lease, called by the score."""
    kinds: dict[str, type[Behind]] = {"train": TrainerBehind, "env": EnvBehind}
    return port if isinstance(port, Failure) or role == "score" else kinds.get(role, EngineBehind)(port, score)
