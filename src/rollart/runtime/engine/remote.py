"""The engine port over an engine actor: what control calls `Engine` on real devices.

Invariant: nobody has a turn of a version before it is known, by its fingerprint, that the engine serves it. Turns come over the
wire and the word of an apply by a call of its own, which a turn may overtake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rollart.control.exchange import Exchange
from rollart.core.errors import EngineError, failure
from rollart.core.resources import Degrees, EngineInfo, Limits
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Generation,
    Live,
    Manifest,
    RequestId,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.runtime.actors import call
from rollart.runtime.engine.actor import EnginePoll, Flat, Forget, flat
from rollart.runtime.wire import Wire


class RemoteEngine:
    """Implements `ports.Engine`. One wire carries all turns. `sockets`: see `Wire`."""

    def __init__(
        self, info: EngineInfo, actor: Any, on_lost: Callable[[str, Failure], None], *, sockets: Path | None = None
    ) -> None:
        self.info = info
        self._actor = actor
        self._on_lost = on_lost
        self._last: EnginePoll | None = None
        self._book: EngineBook | None = None
        """Of the last answer, once somebody has asked for it."""
        self._duplicates = 0
        self._applying: Version | None = None
        self._early: list[EnginePoll] = []
        """Answers with turns of a version whose apply is under way, and all since; not taken if the engine is lost before."""
        self.work: tuple[float, ...] = ()
        """Of the last answer; see `EnginePoll`."""
        self._exchange: Exchange[RequestId, Generation] = Exchange(self._orphan)
        self._wire: Wire[Flat | RequestId | Forget, EnginePoll] = Wire(
            actor, where="engine", on_poll=self._polled, on_lost=self._failed, sockets=sockets
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent, and answers that came."""
        return self._wire.traffic

    def open(self) -> None:
        self._wire.open()

    def close(self) -> None:
        """The actor is being ended: who still waits for a turn is told. Idempotent."""
        why = failure("engine", "lost", f"{self.info.id} was released")
        self._wire.end(why)
        self._fail_waiting(why)

    async def generate(self, request: TurnRequest) -> Generation:
        if self._wire.lost is not None:
            return _failed(self._wire.lost)
        self._wire.send(flat(request))
        return await self._exchange.ask(request.id)

    async def abort(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            self._wire.send(request)

    def forget(self, traj: TrajId, attempt: int) -> None:
        self._wire.send(Forget(traj, attempt))

    def _polled(self, poll: EnginePoll) -> None:
        if self._early or self._overtakes(poll):
            self._early.append(poll)
        else:
            self._take(poll)

    def _overtakes(self, poll: EnginePoll) -> bool:
        applying = self._applying
        return applying is not None and any(
            answer.tokens.spans and answer.tokens.spans[-1].version >= applying for _, answer in poll.answers
        )

    def _take_early(self) -> None:
        while self._early and not self._overtakes(self._early[0]):
            self._take(self._early.pop(0))

    def _take(self, poll: EnginePoll) -> None:
        self._last, self._book, self.work = poll, None, poll.work
        self._exchange.answer(poll.answers)

    def _failed(self, why: Failure) -> None:
        self._early.clear()
        self._fail_waiting(why)
        self._on_lost(self.info.id, why)

    def _fail_waiting(self, why: Failure) -> None:
        self._exchange.answer([(rid, _failed(why)) for rid in self._exchange.waiting])

    def _orphan(self, rid: RequestId, answer: Generation) -> None:
        self._duplicates += answer.tokens.n_tokens

    def book(self) -> EngineBook:
        """The engine's last answer; turns that have come in and have not reached their asker yet count as live."""
        pending = {
            rid: Live(n_tokens=answer.tokens.n_tokens, oldest_version=answer.tokens.spans[0].version)
            for rid, answer in self._exchange.pending.items()
            if answer.tokens.spans
        }
        if self._book is None:
            self._book = EngineBook() if self._last is None else self._last.book()
        return replace(self._book, live={**self._book.live, **pending}, duplicates=self._duplicates)

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        """`store missing`: the bytes are gone with the trainer that published them; the engine is as it was."""
        outcome = await call("engine", self._actor.prefetch.remote(manifest))
        return outcome if isinstance(outcome, Failure) else None

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        pinned_s = max(0.0, pinned_deadline_s - asyncio.get_running_loop().time())
        self._applying, outcome = version, None
        try:
            outcome = await call("engine", self._actor.apply.remote(version, kept, pinned_s))
        finally:
            self._applying = None
            if not (isinstance(outcome, Failure) and outcome.kind == "lost"):
                # the caller goes on first, and notes that the version is served
                asyncio.get_running_loop().call_soon(self._take_early)
        return outcome

    async def limit(self, limits: Limits) -> None:
        raise EngineError("this engine takes no limits while it runs: set engine.max_live and engine.kv_tokens")

    async def sleep(self) -> None:
        """Its cache is given back, requests are held, also those that come; the served weights leave a GPU for the host."""
        _done(await call("engine", self._actor.sleep.remote()))

    async def wake(self, degrees: Degrees | None = None) -> None:
        """Held requests go on, their cache is rebuilt. Raises EngineError for degrees other than the engine's."""
        if degrees is not None and degrees != self.info.degrees:
            raise EngineError(
                f"{self.info.id} has {self.info.degrees} and cannot wake with {degrees}: it keeps its weights while it "
                "sleeps; release its lease and acquire one of those degrees"
            )
        _done(await call("engine", self._actor.wake.remote()))


def _done(outcome: object) -> None:
    """A lost engine has no memory to give back; its loss is told elsewhere."""
    if isinstance(outcome, Failure) and outcome.kind != "lost":
        raise EngineError(outcome.detail)


def _failed(why: Failure) -> Generation:
    return Generation(tokens=Tokens(n_tokens=0), finish="failed", failure=why)
