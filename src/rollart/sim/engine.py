"""A simulated engine: turns take time by a rate, weights take time to apply, and every token has a version.

One event per turn or per rate change, never per token. Invariants: at every instant its book equals what it has answered
plus what requests in it have so far, as for a real engine; no token is sampled while weights change, and none under a
version that its request does not allow.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Literal

from rollart.control.exchange import Exchange
from rollart.control.signal import Signal
from rollart.core.errors import InvariantBroken, failure
from rollart.core.resources import Degrees, EngineInfo, Limits
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Fingerprint,
    Finish,
    Generation,
    Live,
    Manifest,
    Purpose,
    RequestId,
    Segment,
    Span,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.sim.pace import EachAlone, Pace, Work
from rollart.sim.prefixes import NOTHING, Key, Prefixes, Taken
from rollart.sim.pushes import Bytes

Command = Literal["generate", "prefetch", "apply"]
Mishap = Literal["dead", "deaf", "twice", "slow", "late", "partial"]
"""dead: never answered; deaf: a request that no abort reaches; twice: a request that is sampled and answered two times;
slow: `SLOW` times the time; late: slow and deaf, so that its answer finds nobody; partial: given back half-way, with the
tokens so far, though nobody asked for that."""
SLOW = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Rates of one engine, in seconds, and how it misbehaves."""

    token_s: float = 0.0
    """One sampled token of one request."""
    prefill_token_s: float = 0.0
    prefetch_s: float = 0.0
    pushed: bool = True
    """Weights come through the store; False: the trainer has them on the engine's own devices."""
    pull: Callable[[Version], Awaitable[Failure | None]] | None = None
    """Brings a version near, where `prefetch_s` does not say all: engines of one node may share what they pull."""
    apply_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    length: Callable[[TurnRequest], int] = field(default=lambda request: request.max_tokens)
    """Tokens that a turn would sample if nothing stopped it; less than max_tokens ends in `stop`."""
    fault: Callable[[str, Command, int], Failure | Mishap | None] = field(default=lambda engine, call, nth: None)
    """(engine id, command, how many of that command it had before) -> what goes wrong with this one."""
    flipped: Callable[[str, int], bool] = field(default=lambda engine, nth: False)
    """(engine id, applies before) -> this apply leaves a wrong bit in the weights that are served."""
    slowness: Callable[[str], float] = field(default=lambda engine: 1.0)
    """Engine id -> how many times `token_s` its tokens take."""
    rebuilds: bool = True
    """False: an apply aborts live requests whatever is asked, as engines do that cannot rebuild a cache."""
    shares: bool = False
    """Siblings of a group find its prompt in the cache."""
    caches: bool = True
    """False: nothing of a context is kept from one turn to the next."""
    pace: Callable[[EngineInfo, Prefixes], Pace] | None = None
    """How its requests come by their tokens; None: each alone, by `token_s` and `prefill_token_s`."""


@dataclass(slots=True)
class _Running:
    request: TurnRequest
    wanted: int
    slowness: float
    moving: bool = False
    """The present version samples for it; not while it is held for a version or weights change."""
    mishap: Mishap | None = None
    started: bool = False
    context: int = 0
    """Tokens before those that are sampled now."""
    taken: Taken = NOTHING
    """Of them, what had to be computed."""
    spans: list[Span] = field(default_factory=list)
    prefilled: int = 0
    rebuilt: int = 0

    @property
    def settled(self) -> int:
        return sum(span.n_tokens for span in self.spans)

    @property
    def key(self) -> Key:
        return (self.request.id.traj, self.request.id.attempt)

    def add(self, version: Version, n_tokens: int) -> None:
        if n_tokens and self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version=version, n_tokens=self.spans[-1].n_tokens + n_tokens)
        elif n_tokens:
            self.spans.append(Span(version=version, n_tokens=n_tokens))


class SimEngine:
    def __init__(self, info: EngineInfo, model: EngineModel) -> None:
        self.info = info
        self._model = model
        self._version = info.version
        self._held: dict[Version, Manifest] = {}
        self._running: dict[RequestId, _Running] = {}
        self._sampled: dict[Purpose, int] = {}
        self._prefixes = Prefixes(shares=model.shares)
        self._pace = (
            EachAlone(model.token_s, model.prefill_token_s) if model.pace is None else model.pace(info, self._prefixes)
        )
        self._rebuilt = 0
        self._duplicates = 0
        self._calls: Counter[Command] = Counter()
        self._applying = False
        self.asleep = False
        """Its memory is another's: requests are held, nothing is sampled and no cache is there."""
        self._exchange: Exchange[RequestId, Generation] = Exchange(self._orphan)
        self._ended = Signal()
        self.lost: Failure | None = None

    async def _fault(self, command: Command) -> Failure | Mishap | None:
        nth = self._calls[command]
        self._calls[command] += 1
        fault = self._model.fault(self.info.id, command, nth)
        if fault == "dead":
            await asyncio.Event().wait()
            raise InvariantBroken(f"a dead {command} of {self.info.id} was answered")
        return self.lost if fault is None else fault

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Generation:
        fault = await self._fault("generate")
        if isinstance(fault, Failure):
            return _failed(fault)
        if request.pin is not None and request.pin < self._version:
            return _failed(_past(self.info.id, request, self._version))
        model = self._model
        slowness = model.slowness(self.info.id) * (SLOW if fault in ("slow", "late") else 1.0)
        running = _Running(request, min(model.length(request), request.max_tokens), slowness, mishap=fault)
        self._running[request.id] = running
        self._sample(running)
        return await self._exchange.ask(request.id)

    def _sample(self, running: _Running) -> None:
        """Begin or go on to sample, if the version allows it and no weights change just now."""
        request = running.request
        allowed = self._version >= request.min_version and request.pin in (None, self._version)
        if self.lost is not None or self._applying or self.asleep or not allowed or running.moving:
            return
        n = running.context = request.context.n_tokens + running.settled
        prompt = _prompt_tokens(request.context) if self._model.shares else 0
        taken = running.taken = self._prefixes.take(running.key, n, prompt=prompt)
        running.started = running.moving = True
        left = running.wanted - running.settled
        finish: Finish = "stop"
        if running.mishap == "partial":
            left, finish = left // 2, "aborted"
        work = Work(
            read=taken.new + taken.rebuilt, context=n, wanted=left, slowness=running.slowness, priority=request.priority
        )
        self._pace.start(request.id, work, partial(self._finish, request.id, finish))

    def _stand_still(self, running: _Running) -> None:
        """Sample nothing more for it for now; what it has keeps its version, and what was read of it stays."""
        if not running.moving:
            return
        running.moving = False
        stopped, taken = self._pace.stop(running.request.id), running.taken
        running.add(self._version, stopped.tokens)
        # what was computed once comes before what is new, and is read before it
        read = taken.new + taken.rebuilt - (0 if stopped.tokens else stopped.unread)
        again = min(read, taken.rebuilt)
        running.rebuilt += again + stopped.reread
        running.prefilled += read - again
        self._prefixes.keep(running.key, running.context + stopped.tokens - stopped.unread)

    def _finish(self, rid: RequestId, finish: Finish) -> None:
        running = self._running.pop(rid)
        self._stand_still(running)
        if finish == "stop":  # all that is wanted is there, whatever rounding says of the last token
            running.add(self._version, running.wanted - running.settled)
            self._prefixes.keep(running.key, running.request.context.n_tokens + running.settled)
        if self.asleep or not self._model.caches:
            self._prefixes.drop(running.key)
        n = running.settled
        purpose = running.request.purpose
        times = 2 if running.mishap == "twice" else 1
        self._sampled[purpose] = self._sampled.get(purpose, 0) + times * n
        if finish == "stop" and n >= running.request.max_tokens:
            finish = "length"
        self._rebuilt += running.rebuilt
        answer = Generation(
            tokens=Tokens(n_tokens=n, spans=tuple(running.spans)), finish=finish,
            prefilled_tokens=running.prefilled, rebuilt_tokens=running.rebuilt,
        )  # fmt: skip
        self._exchange.answer([(rid, answer)] * times)
        self._ended.notify()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        if self.lost is None:
            for rid in requests:
                if rid in self._running and self._running[rid].mishap not in ("deaf", "late"):
                    self._finish(rid, "aborted")

    def forget(self, traj: TrajId, attempt: int) -> None:
        self._prefixes.forget((traj, attempt))

    def _orphan(self, rid: RequestId, answer: Generation) -> None:
        self._duplicates += answer.tokens.n_tokens

    # --- weights -----------------------------------------------------------------------------------------------------

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        bytes_ = manifest.location if isinstance(manifest.location, Bytes) else None
        if bytes_ is not None and self._model.pushed:
            await bytes_.there.wait()
            if bytes_.overtaken:
                return failure(
                    "store", "missing", f"version {manifest.version} was overtaken before it was in the store"
                )
        if self._model.pull is not None:
            if bytes_ is not None and bytes_.gone:
                return _gone(manifest.version)
            why = await self._model.pull(manifest.version)
            if why is not None:
                return why
        await asyncio.sleep(self._model.prefetch_s)
        fault = await self._fault("prefetch")
        if isinstance(fault, Failure):
            return fault
        if bytes_ is not None and bytes_.gone:
            return _gone(manifest.version)
        self._held[manifest.version] = manifest
        return None

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        nth = self._calls["apply"]
        fault = await self._fault("apply")
        if isinstance(fault, Failure):
            return fault
        manifest = self._held.get(version)
        if manifest is None:
            return failure("engine", "refused", f"version {version} was not prefetched")
        await self._wait_for_pinned(pinned_deadline_s)
        live = [running for running in self._running.values() if running.started]
        self._applying = True
        try:
            for running in live:
                self._stand_still(running)
            await asyncio.sleep(self._model.apply_s)
            if self.lost is not None:
                return self.lost
            self._serve(version, kept if self._model.rebuilds else "abort")
        finally:
            self._applying = False
            for running in self._running.values():
                self._sample(running)
        wrong = "flipped-" if self._model.flipped(self.info.id, nth) else ""
        exposed_s = self._model.apply_s if live and not self.asleep else 0.0
        fingerprint = Fingerprint(digest=wrong + manifest.fingerprint.digest)
        return Applied(fingerprint=fingerprint, exposed_s=exposed_s, live_requests=len(live))

    async def _wait_for_pinned(self, deadline_s: float) -> None:
        """Let requests pinned to the served version end; at the deadline abort what is left of them."""
        try:
            async with asyncio.timeout_at(deadline_s):
                while self._pinned():
                    await self._ended.wait()
        except TimeoutError:
            await self.abort(self._pinned())

    def _pinned(self) -> list[RequestId]:
        return [rid for rid, running in self._running.items() if running.request.pin == self._version]

    def _serve(self, version: Version, kept: Literal["rebuild", "abort"]) -> None:
        """Requests may have come and ended since the apply began; what is here now meets the new version."""
        if kept == "abort":
            for rid in [rid for rid, running in self._running.items() if running.started]:
                self._finish(rid, "aborted")
        self._version = version
        self._held = {held: manifest for held, manifest in self._held.items() if held > version}
        self._prefixes.invalidate()
        past = [r for r in self._running.values() if r.request.pin is not None and r.request.pin < version]
        for running in past:
            if running.started:  # deaf to the abort that came before: what it has sampled stays in the book
                self._finish(running.request.id, "aborted")
                continue
            del self._running[running.request.id]
            why = _past(self.info.id, running.request, version)
            self._exchange.answer([(running.request.id, _failed(why))])

    # --- the rest of the port ------------------------------------------------------------------------------------------

    def book(self) -> EngineBook:
        live = {rid: self._progress(running) for rid, running in self._running.items()}
        sampled = dict(self._sampled)
        for rid, progress in live.items():
            purpose = self._running[rid].request.purpose
            sampled[purpose] = sampled.get(purpose, 0) + progress.n_tokens
        for rid, answer in self._exchange.pending.items():
            if answer.tokens.spans:
                live[rid] = Live(n_tokens=answer.tokens.n_tokens, oldest_version=answer.tokens.spans[0].version)
        return EngineBook(sampled=sampled, live=live, rebuilt_tokens=self._rebuilt, duplicates=self._duplicates)

    def _progress(self, running: _Running) -> Live:
        new = self._pace.tokens(running.request.id)
        first = running.spans[0].version if running.spans else self._version if new else None
        return Live(n_tokens=running.settled + new, oldest_version=first)

    def lose(self, why: Failure) -> None:
        """The process is gone: nothing more is sampled, every asker is told, the book stays as it was last reported."""
        if self.lost is not None:
            return
        self.lost = why
        for running in self._running.values():
            self._stand_still(running)
        self._exchange.answer([(rid, _failed(why)) for rid in self._exchange.waiting])

    async def limit(self, limits: Limits) -> None:
        """Simulated engines take whatever comes."""

    async def sleep(self) -> None:
        """Give the memory away: no cache is left, requests are held until `wake`. Weights may be applied meanwhile."""
        if self.asleep or self.lost is not None:
            return
        self.asleep = True
        for running in self._running.values():
            self._stand_still(running)
        self._prefixes.invalidate()
        await asyncio.sleep(self._model.sleep_s)

    async def wake(self, degrees: Degrees | None = None) -> None:
        """Take the memory back and go on with what was held. Degrees stay as they are."""
        if self.asleep and self.lost is None:
            await asyncio.sleep(self._model.wake_s)
            self.asleep = False
            for running in self._running.values():
                self._sample(running)


def _prompt_tokens(context: Segment) -> int:
    """Tokens before the first that was sampled."""
    return sum(piece.n_tokens for piece in takewhile(lambda piece: not piece.spans, context.pieces))


def _failed(why: Failure) -> Generation:
    return Generation(tokens=Tokens(n_tokens=0), finish="failed", failure=why)


def _gone(version: Version) -> Failure:
    return failure("store", "missing", f"the bytes of version {version} are gone with their owner")


def _past(engine: str, request: TurnRequest, version: Version) -> Failure:
    return failure("engine", "refused", f"{engine} serves {version}, the request is pinned to {request.pin}")
