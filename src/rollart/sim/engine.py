"""A simulated engine: turns take time by a rate, weights take time to apply, and every token has a version.

One event per turn or per rate change, never per token. Invariant: at every instant its book equals what it has answered
plus what live requests have so far, as for a real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollart.control.exchange import Exchange
from rollart.control.signal import Signal
from rollart.core.errors import failure
from rollart.core.types import (
    Applied,
    Degrees,
    EngineBook,
    EngineInfo,
    Failure,
    Fingerprint,
    Finish,
    Generation,
    Limits,
    Live,
    Manifest,
    Purpose,
    RequestId,
    Span,
    Tokens,
    TurnRequest,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Rates of one engine, in seconds."""

    token_s: float = 0.0
    """One sampled token of one request."""
    prefill_token_s: float = 0.0
    prefetch_s: float = 0.0
    apply_s: float = 0.0
    length: Callable[[TurnRequest], int] = field(default=lambda request: request.max_tokens)
    """Tokens that a turn would sample if nothing stopped it; less than max_tokens ends in `stop`."""


@dataclass(slots=True)
class _Running:
    request: TurnRequest
    wanted: int
    since_s: float
    """When the present version began to sample for it."""
    timer: asyncio.TimerHandle | None = None
    spans: list[Span] = field(default_factory=list)
    rebuilt: int = 0

    @property
    def settled(self) -> int:
        return sum(span.n_tokens for span in self.spans)


class SimEngine:
    def __init__(self, info: EngineInfo, model: EngineModel, digest: Callable[[Version], str]) -> None:
        self.info = info
        self._model = model
        self._digest = digest
        self._version = info.version
        self._held: dict[Version, Manifest] = {}
        self._running: dict[RequestId, _Running] = {}
        self._sampled: dict[Purpose, int] = {}
        self._cached: dict[tuple[str, int], int] = {}
        self._rebuilt = 0
        self._duplicates = 0
        self._exchange: Exchange[RequestId, Generation] = Exchange(self._orphan)
        self._ended = Signal()
        self.lost: Failure | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Generation:
        if self.lost is not None:
            return _failed(self.lost)
        if request.pin is not None and request.pin < self._version:
            why = f"{self.info.id} serves {self._version}, the request is pinned to {request.pin}"
            return _failed(failure("engine", "refused", why))
        now = asyncio.get_running_loop().time()
        prefill_s = self._prefill(request) * self._model.prefill_token_s
        running = _Running(request, min(self._model.length(request), request.max_tokens), now + prefill_s)
        self._running[request.id] = running
        self._schedule(running)
        return await self._exchange.ask(request.id)

    def _prefill(self, request: TurnRequest) -> int:
        """Tokens of the context that are not cached."""
        key = (request.id.traj, request.id.attempt)
        n, cached = request.context.n_tokens, self._cached.get(key, 0)
        self._cached[key] = n
        return n - cached

    def _schedule(self, running: _Running) -> None:
        loop = asyncio.get_running_loop()
        left = (running.wanted - running.settled) * self._model.token_s
        when = max(running.since_s, loop.time()) + left
        running.timer = loop.call_at(when, self._finish, running.request.id, "stop")

    def _sampled_since(self, running: _Running) -> int:
        """Tokens under the present version so far."""
        left = running.wanted - running.settled
        if self._model.token_s == 0:
            return 0  # all of them come in the instant in which the turn ends
        elapsed = asyncio.get_running_loop().time() - running.since_s
        return max(0, min(left, int(elapsed / self._model.token_s + 1e-9)))

    def _finish(self, rid: RequestId, finish: Finish) -> None:
        running = self._running.pop(rid)
        if running.timer is not None:
            running.timer.cancel()
        new = running.wanted - running.settled if finish == "stop" else self._sampled_since(running)
        if new:
            running.spans.append(Span(version=self._version, n_tokens=new))
        n = running.settled
        purpose = running.request.purpose
        self._sampled[purpose] = self._sampled.get(purpose, 0) + n
        if finish == "stop" and n >= running.request.max_tokens:
            finish = "length"
        tokens = Tokens(n_tokens=n, spans=tuple(running.spans))
        self._rebuilt += running.rebuilt
        answer = Generation(tokens=tokens, finish=finish, rebuilt_tokens=running.rebuilt)
        self._exchange.answer([(rid, answer)])
        self._ended.notify()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        for rid in requests:
            if rid in self._running:
                self._finish(rid, "aborted")

    def _orphan(self, rid: RequestId, answer: Generation) -> None:
        self._duplicates += answer.tokens.n_tokens

    # --- weights -----------------------------------------------------------------------------------------------------

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        await asyncio.sleep(self._model.prefetch_s)
        if self.lost is not None:
            return self.lost
        self._held[manifest.version] = manifest
        return None

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        loop = asyncio.get_running_loop()
        if version not in self._held:
            return failure("engine", "refused", f"version {version} was not prefetched")
        while (pinned := self._pinned()) and loop.time() < pinned_deadline_s:
            try:
                async with asyncio.timeout_at(pinned_deadline_s):
                    await self._ended.wait()
            except TimeoutError:
                break
        await self.abort(pinned)
        live = list(self._running.values())
        for running in live:
            new = self._sampled_since(running)
            if new:
                running.spans.append(Span(version=self._version, n_tokens=new))
            if running.timer is not None:
                running.timer.cancel()
            running.since_s = float("inf")  # nothing is sampled while the weights change
        await asyncio.sleep(self._model.apply_s)
        if self.lost is not None:
            return self.lost
        self._version = version
        self._held = {v: m for v, m in self._held.items() if v > version}
        self._cached.clear()
        for running in live:
            if running.request.id not in self._running:
                continue
            if kept == "abort":
                self._finish(running.request.id, "aborted")
                continue
            rebuild = running.request.context.n_tokens + running.settled
            running.rebuilt += rebuild
            running.since_s = loop.time() + rebuild * self._model.prefill_token_s
            self._schedule(running)
        exposed_s = self._model.apply_s if live else 0.0
        return Applied(fingerprint=_fingerprint(self._digest(version)), exposed_s=exposed_s, live_requests=len(live))

    def _pinned(self) -> list[RequestId]:
        return [rid for rid, running in self._running.items() if running.request.pin is not None]

    # --- the rest of the port ------------------------------------------------------------------------------------------

    def book(self) -> EngineBook:
        live = {rid: self._progress(running) for rid, running in self._running.items()}
        sampled = dict(self._sampled)
        for rid, progress in live.items():
            purpose = self._running[rid].request.purpose
            sampled[purpose] = sampled.get(purpose, 0) + progress.n_tokens
        for rid, answer in self._exchange.pending.items():
            spans = answer.tokens.spans
            live[rid] = Live(n_tokens=answer.tokens.n_tokens, oldest_version=spans[0].version if spans else None)
        return EngineBook(sampled=sampled, live=live, rebuilt_tokens=self._rebuilt, duplicates=self._duplicates)

    def _progress(self, running: _Running) -> Live:
        new = self._sampled_since(running)
        first = running.spans[0].version if running.spans else self._version if new else None
        return Live(n_tokens=running.settled + new, oldest_version=first)

    def lose(self, why: Failure) -> None:
        """The process is gone: nothing more is sampled, every asker is told."""
        self.lost = why
        for rid in list(self._running):
            running = self._running.pop(rid)
            if running.timer is not None:
                running.timer.cancel()
        self._exchange.answer([(rid, _failed(why)) for rid in self._exchange.waiting])

    async def limit(self, limits: Limits) -> None:
        """Simulated engines take whatever comes."""

    async def sleep(self) -> None:
        """Memory is not modelled."""

    async def wake(self, degrees: Degrees | None = None) -> None:
        """Memory is not modelled."""


def _failed(why: Failure) -> Generation:
    return Generation(tokens=Tokens(n_tokens=0), finish="failed", failure=why)


def _fingerprint(digest: str) -> Fingerprint:
    return Fingerprint(digest=digest)
