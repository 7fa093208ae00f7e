"""The engines in service, and the one function through which every turn goes.

Owns: the router's notes, who serves which trajectory, both sides of the token ledger for delivered turns. Invariant: a
turn is answered once; its tokens enter the ledger in the same breath in which the engine's book stops calling them live;
a turn that an apply or a lost engine cut short goes on elsewhere from the tokens that were delivered, and no token is
counted twice.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollart.control.signal import Signal
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import describe, failure
from rollart.core.events import Recorder, rounded_s
from rollart.core.ledger import Ledger
from rollart.core.resources import EngineInfo
from rollart.core.seeds import seed_of, unit
from rollart.core.types import (
    EngineBook,
    Failure,
    Generation,
    RequestId,
    Tokens,
    TrajId,
    Turn,
    TurnRequest,
    Version,
)
from rollart.ports import Engine
from rollart.sched.affinity import OFF, Affinity, Ahead, Seen
from rollart.sched.routing import Choice, Router

Key = tuple[TrajId, int]
"""A trajectory attempt."""
Spawn = Callable[[Coroutine[Any, Any, None]], object]

MAX_RESENDS = 3
"""Engines that may fail under one turn before the trajectory fails: a request that kills engines must not kill them all."""
RESEND_PAUSE_S = 0.1
"""Wait before a failed turn is sent again: an engine that is breaking down fails at once what it is given."""


class Fleet:
    """Engines join and leave; `turn` routes, retries, resumes and records."""

    def __init__(
        self,
        record: Recorder,
        waits: Waits,
        ledger: Ledger,
        *,
        seed: int,
        spawn: Spawn,
        on_lost: Callable[[EngineInfo, Failure], None] = lambda engine, why: None,
        affinity: Affinity = OFF,
    ) -> None:
        self._record = record
        self._waits = waits
        self._ledger = ledger
        self._seed = seed
        self._spawn = spawn
        self._on_lost = on_lost
        self.router = Router()
        self.engines: dict[str, Engine] = {}
        self.changed = Signal()
        self.min_version: Version = 0
        """Tokens sampled under an older version could not be trained any more."""
        self._retired: dict[str, EngineBook] = {}
        self._duplicates: dict[str, int] = {}
        self._homes: dict[Key, str] = {}
        self._live: dict[Key, tuple[str, RequestId]] = {}
        self._aborting: set[Key] = set()
        self._parts: dict[Key, tuple[Tokens, ...]] = {}
        """Pieces of turns that were cut short and go on, which their attempts do not have yet."""
        self._affinity = affinity
        self._told: set[str] = set()
        """Why engines are slower than they need be, once each."""
        self._cached: dict[Key, tuple[int, Version]] = {}
        """Tokens of a trajectory that its home held after its last turn, and of which version; kept where affinity learns."""

    # --- engines -----------------------------------------------------------------------------------------------

    def add(self, engine: Engine) -> None:
        """An engine has started; it takes turns once it serves a version (`applied`)."""
        self.engines[engine.info.id] = engine
        slower = engine.info.slower
        if slower and slower not in self._told:
            self._told.add(slower)
            self._record("advisory", code="engine_slower", text=slower)

    def applied(self, engine: str, version: Version) -> None:
        """An engine serves `version` from now on."""
        if engine not in self.engines:
            return
        if engine in self.router:
            self.router.applied(engine, version)
        else:
            pool = self.engines[engine].info.pool
            self.router.joined(engine, self._affinity.place(pool), version)
            self._record("engine_joined", engine=engine, pool=pool, version=version)
        self.changed.notify()

    def lost(self, engine: str, why: Failure) -> None:
        """An engine is gone. What it had sampled and not delivered is counted as `engine_lost`; its turns go elsewhere, or
        wait for the one that is started in its place."""
        port = self.engines.pop(engine, None)
        if port is None:
            return
        if engine in self.router:
            self.router.left(engine)
        book = port.book()
        self._settle_duplicates(engine, book)
        lost_tokens = sum(live.n_tokens for live in book.live.values())
        self._ledger.lose(engine, lost_tokens)
        self._retired[engine] = replace(book, live={})
        self._record("engine_lost", engine=engine, failure=describe(why), lost_tokens=lost_tokens)
        self.changed.notify()
        # it may live and only be unfit to serve: what it still samples would be thrown away
        unanswered = [rid for name, rid in self._live.values() if name == engine]
        if unanswered:
            self._send_abort(port, unanswered)
        self._on_lost(port.info, why)

    def restore(self, sampled: Mapping[str, int]) -> None:
        """Engines of an earlier incarnation of the run, by the tokens that each had sampled."""
        for engine, tokens in sampled.items():
            self._retired[engine] = EngineBook(sampled={"train": tokens})

    @property
    def gone(self) -> Mapping[str, EngineBook]:
        """Engines that served once, by their last books."""
        return self._retired

    def parts(self, key: Key) -> tuple[Tokens, ...]:
        """What an attempt's turn that is under way has delivered so far."""
        return self._parts.get(key, ())

    def books(self) -> Mapping[str, EngineBook]:
        """The engines' side of the ledger, of those gone as well."""
        books = dict(self._retired)
        for name, engine in self.engines.items():
            books[name] = engine.book()
            self._settle_duplicates(name, books[name])
        return books

    def _settle_duplicates(self, engine: str, book: EngineBook) -> None:
        new = book.duplicates - self._duplicates.get(engine, 0)
        if new:
            self._duplicates[engine] = book.duplicates
            self._ledger.lose(engine, new, "duplicate")
            self._record("tokens_dropped", reason="duplicate", tokens=new, engine=engine)

    def live_versions(self) -> Mapping[Key, Version]:
        """Oldest version among the tokens of each live request that has some, as the engines last reported it. O(live)."""
        return {
            (rid.traj, rid.attempt): live.oldest_version
            for engine in self.engines.values()
            for rid, live in engine.book().live.items()
            if live.oldest_version is not None
        }

    # --- turns -------------------------------------------------------------------------------------------------

    async def turn(self, request: TurnRequest) -> Turn:
        """One turn of a trajectory, whatever happens to engines meanwhile. Never raises but on shutdown."""
        key = (request.id.traj, request.id.attempt)
        try:
            return await self._turn(key, request)
        finally:
            self._parts.pop(key, None)

    async def _turn(self, key: Key, request: TurnRequest) -> Turn:
        pieces: tuple[Tokens, ...] = ()
        losses = 0
        part = 0
        while True:
            if key in self._aborting:
                return Turn(pieces=pieces, finish="aborted")
            choice = await self._choose(key, _part(request, part, pieces, self.min_version))
            if isinstance(choice, Failure):
                return Turn(pieces=pieces, finish="failed", failure=choice)
            if key in self._aborting:
                return Turn(pieces=pieces, finish="aborted")
            answer = await self._ask(choice, key, _part(request, part, pieces, self.min_version))
            if answer.tokens.n_tokens:
                pieces += (answer.tokens,)
                self._parts[key] = pieces
            if answer.finish == "stop" or sum(piece.n_tokens for piece in pieces) >= request.max_tokens:
                return Turn(pieces=pieces, finish="stop" if answer.finish == "stop" else "length")
            if answer.failure is not None:
                if answer.failure.kind == "lost" and choice.engine in self.router:
                    self.router.left(choice.engine)  # it looks idle, and the world may tell of its loss much later
                losses += 1
                overdue = asyncio.get_running_loop().time() + RESEND_PAUSE_S >= request.deadline_s
                if not answer.failure.retryable or losses > MAX_RESENDS or overdue:
                    return Turn(pieces=pieces, finish="failed", failure=answer.failure)
                await asyncio.sleep(RESEND_PAUSE_S)
            elif answer.finish == "length":
                return Turn(pieces=pieces, finish="length")
            part += 1

    async def _choose(self, key: Key, request: TurnRequest) -> Choice | Failure:
        """Pick an engine; wait while none is eligible (all of them are still applying a version, say)."""
        while True:
            home = self._homes.get(key)
            least = max(request.min_version, self.min_version) if _trained(request) else 0
            if self._affinity.learns:
                choice = self._weigh(key, home, least, request)
            else:
                served = self.router.version(home) if home is not None and request.pin is None else None
                choice = self.router.choose(
                    home=home,
                    pools=self._affinity.order(request.domain),
                    min_version=least,
                    pin=request.pin,
                    draw=0 if served is not None and served >= least else seed_of(self._seed, "route", *request.id),
                )
            if choice is not None:
                return choice
            if request.pin is not None and len(self.router) and self.router.oldest > request.pin:
                return failure("engine", "refused", f"no engine serves version {request.pin} any more", retryable=False)
            least = max(request.min_version, self.min_version)
            what = f"an engine at version {request.pin if request.pin is not None else f'>= {least}'}"
            try:
                await self._waits.on(self.changed.wait(), what=what, deadline_s=request.deadline_s)
            except WaitExpired as expired:
                return failure("engine", "timeout", str(expired))
            if key in self._aborting:
                return failure("engine", "refused", "aborted while it waited for an engine")

    def _weigh(self, key: Key, home: str | None, least: Version, request: TurnRequest) -> Choice | None:
        """Where a turn costs least; a prefix that is held somewhere counts there, unless new weights have made it void."""
        held, version = self._cached.get(key, (0, -1))
        served = None if home is None else self.router.version(home)
        ahead = Ahead(
            domain=request.domain, context=request.context.n_tokens,
            cached=-1 if served is None else held if served == version else 0,
            draw=unit(self._seed, "affinity", *key) if served is None else 1.0,
        )  # fmt: skip
        cost_s = self._affinity.cost_s
        return self.router.weigh(
            home=home, min_version=least, pin=request.pin, draw=seed_of(self._seed, "route", *request.id),
            cost_s=lambda place, live, at_home: cost_s(ahead, place, live, home=at_home),
        )  # fmt: skip

    async def _ask(self, choice: Choice, key: Key, ask: TurnRequest) -> Generation:
        loop = asyncio.get_running_loop()
        name, engine, started = choice.engine, self.engines[choice.engine], loop.time()
        traj, attempt, turn, part = ask.id
        self._record(
            "turn_routed", traj=traj, attempt=attempt, turn=turn, part=part, engine=name, load=choice.load,
            sticky=choice.sticky, **({"fallback": True} if choice.fallback else {}),
        )  # fmt: skip
        self.router.started(name)
        self._move(key, name)
        self._live[key] = (name, ask.id)
        try:
            # the deadline aborts by value first, so that the tokens so far come back and the ledger closes
            answer = await self._waits.on(
                engine.generate(ask),
                what="engines to generate",
                deadline_s=ask.deadline_s,
                overdue=lambda: self._send_abort(engine, [ask.id]),
            )
        except WaitExpired as expired:
            answer = _nothing(failure("engine", "timeout", f"{name} does not answer: {expired}"))
        finally:
            self.router.finished(name)
            del self._live[key]
        if name not in self.engines:  # `lost` has closed this engine's book with these tokens in it
            gone = failure("engine", "lost", f"{name} was given up before its answer came")
            answer = _nothing(answer.failure or gone)
        self._ledger.deliver(name, answer.tokens.n_tokens, ask.purpose)
        if answer.finish == "aborted" and loop.time() >= ask.deadline_s:
            why = failure("engine", "timeout", f"the turn was not done by its deadline on {name}")
            answer = replace(answer, finish="failed", failure=why)
        self._record(
            "turn_done", traj=traj, attempt=attempt, turn=turn, part=part, engine=name,
            seconds=rounded_s(loop.time() - started), sampled=answer.tokens.n_tokens,
            spans=[[span.version, span.n_tokens] for span in answer.tokens.spans], finish=answer.finish,
            prefilled=answer.prefilled_tokens, rebuilt=answer.rebuilt_tokens,
            **({} if answer.failure is None else {"failure": describe(answer.failure)}),
        )  # fmt: skip
        if self._affinity.learns:
            self._learn(key, choice, ask, answer, loop.time() - started)
        return answer

    def _move(self, key: Key, name: str) -> None:
        """An attempt's home is the engine that it was last on; where it may move by choice, the one before forgets it."""
        before = self._homes.get(key)
        self._homes[key] = name
        if self._affinity.learns and before != name and before in self.engines:
            self.engines[before].forget(*key)

    def _learn(self, key: Key, choice: Choice, ask: TurnRequest, answer: Generation, seconds: float) -> None:
        engine, served = self.engines.get(choice.engine), self.router.version(choice.engine)
        if engine is None or served is None:
            return
        self._cached[key] = (ask.context.n_tokens + answer.tokens.n_tokens, served)
        spans = answer.tokens.spans
        self._affinity.measured(
            Seen(
                domain=ask.domain, pool=engine.info.pool, seconds=seconds, sampled=answer.tokens.n_tokens,
                read=answer.prefilled_tokens + answer.rebuilt_tokens, context=ask.context.n_tokens,
                live=(choice.load + self.router.load(choice.engine)) / 2,
                steady=answer.failure is None and len(spans) == 1 and spans[0].version == served,
            )
        )  # fmt: skip

    # --- abort -------------------------------------------------------------------------------------------------

    def abort(self, keys: Iterable[Key]) -> None:
        """Make the running and every later turn of these attempts answer `aborted`. Takes one engine step."""
        per_engine: dict[str, list[RequestId]] = defaultdict(list)
        for key in keys:
            self._aborting.add(key)
            seat = self._live.get(key)
            if seat is not None and seat[0] in self.engines:
                per_engine[seat[0]].append(seat[1])
        for name, ids in per_engine.items():
            self._send_abort(self.engines[name], ids)
        self.changed.notify()

    def forget(self, key: Key) -> None:
        """An attempt is over."""
        home = self._homes.pop(key, None)
        self._cached.pop(key, None)
        if home in self.engines:
            self.engines[home].forget(*key)
        self._aborting.discard(key)

    def _send_abort(self, engine: Engine, ids: list[RequestId]) -> None:
        self._spawn(engine.abort(ids))


def _part(request: TurnRequest, part: int, pieces: tuple[Tokens, ...], min_version: Version) -> TurnRequest:
    """The request for what is left of a turn after `pieces`; its versions go on from theirs."""
    if pieces:
        min_version = max(min_version, pieces[-1].spans[-1].version)
    if _trained(request) and request.min_version < min_version:
        request = replace(request, min_version=min_version)
    if not pieces and not part:
        return request
    return replace(
        request,
        id=request.id._replace(part=part),
        context=request.context.extended(*pieces),
        max_tokens=request.max_tokens - sum(piece.n_tokens for piece in pieces),
    )


def _trained(request: TurnRequest) -> bool:
    return request.pin is None and request.purpose == "train"


def _nothing(why: Failure) -> Generation:
    return Generation(tokens=Tokens(n_tokens=0), finish="failed", failure=why)
