"""From the trainer's weights to what every engine serves: publish once, prefetch aside, apply between steps.

Invariants: an engine serves complete versions only, never a mix, and its fingerprint equals the trainer's after every
apply; versions on an engine only rise; a slow engine skips to the newest version and delays nobody else.
Source: RollArt's cross-cluster weight path (M7, M9); `sync_order` is defined in the design, section 4.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from rollart.control.elastic import Seat
from rollart.control.fleet import Fleet
from rollart.control.signal import Signal
from rollart.control.waits import GRACE_S, WaitExpired, Waits
from rollart.core.errors import RunFailed, StoreError, TrainerLost, describe, failure
from rollart.core.events import Recorder
from rollart.core.resources import EngineInfo
from rollart.core.types import Failure, Fingerprint, Manifest, Version
from rollart.ports import Engine, WeightStore

T = TypeVar("T")

TRIES = 3
"""Fetches and applies of one version that may fail before the engine counts as lost. One that serves other weights than
were published is lost at once."""
VERSIONS_KEPT = 2
"""Published versions that stay fetchable: a slow engine finishes one while the next is offered."""


class VersionBook:
    """The weight store's book, kept in the control process: which versions are complete, and how to get to one."""

    def __init__(self) -> None:
        self._manifests: dict[Version, Manifest] = {}

    async def offer(self, manifest: Manifest) -> None:
        self._manifests[manifest.version] = manifest

    async def chain(self, have: Version | None, want: Version) -> tuple[Manifest, ...]:
        """Deltas from `have` to `want`, oldest first, or from the nearest snapshot below.

        Raises StoreError when a version on the way is not kept (any more).
        """
        chain: list[Manifest] = []
        version: Version | None = want
        while version is not None and version != have:
            manifest = self._manifests.get(version)
            if manifest is None:
                kept = ", ".join(map(str, sorted(self._manifests)))
                raise StoreError(
                    f"version {version} is not in the store, which keeps [{kept}]; fetch the newest of them"
                )
            chain.append(manifest)
            version = manifest.base
        return tuple(reversed(chain))

    async def retire(self, below: Version) -> None:
        """Forget versions below `below`, but for what a kept delta is based on."""
        needed: set[Version | None] = set()
        for version in sorted(self._manifests, reverse=True):
            if version >= below or version in needed:
                needed.add(self._manifests[version].base)
            else:
                del self._manifests[version]


def same_weights(served: Fingerprint, published: Fingerprint, info: EngineInfo) -> bool:
    """Whether an engine serves what the trainer published: bit for bit, or as far as it can be asked.

    `probe`: it was handed the same bytes, and scores the fixed prompts as the trainer does, within `info.mismatch`.
    """
    if info.fingerprint == "bitwise":
        return served.digest == published.digest
    gap = _gap(served, published)
    return served.digest == published.digest and gap is not None and gap <= info.mismatch


def _gap(served: Fingerprint, published: Fingerprint) -> float | None:
    """Mean |difference| of the scores of the fixed prompts; None where there are no two of each to compare."""
    ours, theirs = served.probe, published.probe
    if not ours or len(ours) != len(theirs):
        return None
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _apart(served: Fingerprint, published: Fingerprint) -> str:
    """How far an engine that is asked so is off."""
    gap = _gap(served, published)
    return "" if gap is None else f"; its log-probabilities of fixed prompts are {gap:.2g} off on average"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRules:
    order: Literal["early", "paper"]
    weights_s: float
    pinned_s: float


class Weights:
    def __init__(
        self, record: Recorder, waits: Waits, fleet: Fleet, trainer: Seat, store: WeightStore, rules: WeightRules,
        *, on_missing: Callable[[Failure], None],
    ) -> None:  # fmt: skip
        self._record = record
        self._waits = waits
        self._fleet = fleet
        self._trainer = trainer
        self._store = store
        self._rules = rules
        self._on_missing = on_missing
        self._changed = Signal()
        self._pins: dict[Version, float] = {}
        self._gone: set[Version] = set()
        """Of these the versions whose bytes are gone: engines that serve one stay, others cannot get there."""
        self.published: Version = -1
        self._allowed: Version = -1
        self._missing: Failure | None = None
        """Set: the bytes of the newest version are gone, so no engine that lacks it will ever serve it."""
        self._failed = 0
        self._failure: Failure | None = None
        """Fetches that failed since the newest version was published, and why the last did."""

    # --- the trainer's side ------------------------------------------------------------------------------------------

    async def publish(self, step: int, version: Version, *, again: Version | None = None) -> None:
        """Offer the trainer's weights as `version`; under `early` engines apply it as soon as they hold it.

        again: the version that these weights were published as before. Raises TrainerLost when the trainer is gone or does
        not answer.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            manifest = await self._waits.on(
                self._trainer.port.publish(version),
                what="the trainer to publish",
                deadline_s=started + self._rules.weights_s,
            )
        except WaitExpired as expired:
            raise TrainerLost(f"the trainer does not publish: {expired}") from expired
        await self._store.offer(manifest)
        await self._store.retire(min([version - VERSIONS_KEPT + 1, *self._pins]))
        self.published = version
        self._missing = None
        self._failed, self._failure = 0, None
        if self._rules.order == "early":
            self._allowed = version
        self._record(
            "published", step=step, version=version, seconds=round(loop.time() - started, 6), bytes=manifest.n_bytes,
            buckets=manifest.buckets, digest=manifest.fingerprint.digest, **({} if again is None else {"again": again}),
        )  # fmt: skip
        self._changed.notify()

    async def sync(self) -> None:
        """RollArt's suspend, update, resume: let engines apply what is published, and wait until all have.

        Raises TrainerLost when its bytes went with the trainer.
        """
        self._allowed = self.published
        self._changed.notify()
        await self.everywhere(self.published)

    async def everywhere(self, version: Version) -> None:
        """Wait until every engine serves `version` or a newer one. Raises TrainerLost when the newest cannot be had."""
        deadline = asyncio.get_running_loop().time() + self._rules.weights_s + self._rules.pinned_s
        while late := [name for name in self._fleet.engines if not self._serves(name, version)]:
            if self._missing is not None:
                raise TrainerLost(self._missing.detail)
            try:
                await self._waits.on(self._fleet.changed.wait(), what="engines to apply weights", deadline_s=deadline)
            except WaitExpired as expired:
                why = failure("engine", "timeout", f"{expired}: {', '.join(late)}")
                raise RunFailed(f"version {version} is not served everywhere", why) from expired

    @property
    def trouble(self) -> str:
        """What became of transfers of the newest version; empty: none failed."""
        if self._failure is None:
            return ""
        return f"{self._failed} transfers of weights failed since version {self.published}, the last: {describe(self._failure)}"

    async def unservable(self) -> Failure:
        """Returns, with the reason, when no engine serves anything and none can have the newest version."""
        while self._missing is None or len(self._fleet.router):
            await self._fleet.changed.wait()
        return self._missing

    def _serves(self, engine: str, version: Version) -> bool:
        served = self._fleet.router.version(engine)
        return served is not None and served >= version

    # --- evaluation's side -------------------------------------------------------------------------------------------

    def pin(self, version: Version) -> None:
        """Keep engines that serve `version` on it, for `pinned_s` at most: an evaluation samples under it."""
        self._pins[version] = asyncio.get_running_loop().time() + self._rules.pinned_s

    def unpin(self, version: Version) -> None:
        self._pins.pop(version, None)
        self._gone.discard(version)
        self._changed.notify()

    # --- the engines' side -------------------------------------------------------------------------------------------

    async def follow(self, engine: Engine) -> None:
        """Bring published versions to one engine, in its own time, until the engine is lost.

        Versions that were overtaken before they were asked for are skipped, but not one that an evaluation is pinned to. What
        is held is served even if a newer one is on its way: that may take longer than a step.
        """
        name, have = engine.info.id, engine.info.version
        held: Manifest | None = None
        while name in self._fleet.engines:
            holds = have if held is None else held.version
            # one that serves nothing yet holds nobody's version up
            allowed = self.published if have < 0 else self._allowed
            may_apply = have < holds <= allowed and not self._pinned(have)
            if held is not None and may_apply:
                have = await self._apply(engine, have, held)
            elif holds < self.published:
                held = await self._fetch(engine, have, self._next(holds)) or held
            else:
                await self._wait(have)

    def _next(self, holds: Version) -> Version:
        pins = self._pins.keys() - self._gone
        return min((pin for pin in pins if pin > holds and self._pinned(pin)), default=self.published)

    def _pinned(self, version: Version) -> bool:
        return self._pins.get(version, 0.0) > asyncio.get_running_loop().time()

    async def _wait(self, have: Version) -> None:
        """Wait for news, or for the end of a pin."""
        until = self._pins[have] if self._pinned(have) else None
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _fetch(self, engine: Engine, have: Version, want: Version) -> Manifest | None:
        """Prefetch `want`; returns its manifest, or None when the engine does not hold it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome: Failure | None = None
        for _ in range(TRIES):
            outcome = None
            chain = await self._store.chain(have if have >= 0 else None, want)
            for manifest in chain:
                outcome = outcome or await self._bounded(engine.prefetch(manifest), "engines to fetch weights")
            if outcome is None:
                seconds = round(loop.time() - started, 6)
                self._record("prefetched", engine=engine.info.id, version=want, seconds=seconds)
                return chain[-1]
            self._failed, self._failure = self._failed + 1, outcome
            if want < self.published and not self._pinned(want):  # perhaps retired meanwhile: go for the newer one
                return None
            if (outcome.where, outcome.kind) == (
                "store",
                "missing",
            ):  # whoever kept the bytes is gone; no engine could have them
                if want < self.published:
                    self._gone.add(want)
                else:
                    self._missing = outcome
                    self._fleet.changed.notify()
                    self._on_missing(outcome)
                    await self._wait(have)
                return None
        assert outcome is not None
        self._fleet.lost(engine.info.id, outcome)
        return None

    async def _apply(self, engine: Engine, have: Version, manifest: Manifest) -> Version:
        """Serve the held version; returns what the engine then serves."""
        loop = asyncio.get_running_loop()
        name, want = engine.info.id, manifest.version
        why = failure("engine", "raised", "no apply was tried")
        for _ in range(TRIES):
            started = loop.time()
            applied = await self._bounded(
                engine.apply(want, kept="rebuild", pinned_deadline_s=self._pins.get(have, started)),
                "engines to apply weights",
                extra_s=self._rules.pinned_s,
            )
            if isinstance(applied, Failure):
                why = applied
                continue
            matches = same_weights(applied.fingerprint, manifest.fingerprint, engine.info)
            self._record(
                "applied", engine=name, version=want, seconds=round(loop.time() - started, 6),
                exposed_s=round(applied.exposed_s, 6), live=applied.live_requests, digest=applied.fingerprint.digest,
                matches=matches,
            )  # fmt: skip
            if matches:
                self._fleet.applied(name, want)
                return want
            # no second try: it samples with these weights already, and what it samples must not be trained
            why = failure(
                "engine", "raised", f"{name} serves {applied.fingerprint.digest[:12]}.. as version {want}, the trainer "
                f"published {manifest.fingerprint.digest[:12]}..{_apart(applied.fingerprint, manifest.fingerprint)}",
                retryable=False,
            )  # fmt: skip
            break
        self._fleet.lost(name, why)
        return have

    async def _bounded(self, call: Awaitable[T | Failure], what: str, *, extra_s: float = 0.0) -> T | Failure:
        deadline = asyncio.get_running_loop().time() + self._rules.weights_s + extra_s
        try:
            return await self._waits.on(call, what=what, deadline_s=deadline + GRACE_S)
        except WaitExpired as expired:
            return failure("engine", "timeout", str(expired))
