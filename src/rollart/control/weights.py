"""From the trainer's weights to what every engine serves: publish once, prefetch aside, apply between steps.

Invariants: an engine serves complete versions only, never a mix, and its fingerprint equals the trainer's after every
apply; versions on an engine only rise; a slow engine skips to the newest version and delays nobody else.
Source: RollArt's cross-cluster weight path (M7, M9); `sync_order` is defined in the design, section 4.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, TypeVar

from rollart.control.fleet import Fleet
from rollart.control.signal import Signal
from rollart.control.waits import GRACE_S, WaitExpired, Waits
from rollart.core.errors import failure
from rollart.core.events import Recorder
from rollart.core.types import Failure, Manifest, Version
from rollart.ports import Engine, Trainer, WeightStore

T = TypeVar("T")

TRIES = 3
"""Fetches and applies of one version that may fail before the engine counts as lost."""
VERSIONS_KEPT = 2
"""Published versions that stay fetchable: a slow engine finishes one while the next is offered."""


class VersionBook:
    """The weight store's book, kept in the control process: which versions are complete, and how to get to one."""

    def __init__(self) -> None:
        self._manifests: dict[Version, Manifest] = {}

    async def offer(self, manifest: Manifest) -> None:
        self._manifests[manifest.version] = manifest

    async def chain(self, have: Version | None, want: Version) -> tuple[Manifest, ...]:
        """Deltas from `have` to `want`, oldest first, or from the nearest snapshot below."""
        chain: list[Manifest] = []
        version: Version | None = want
        while version is not None and version != have:
            manifest = self._manifests[version]
            chain.append(manifest)
            version = manifest.base
        return tuple(reversed(chain))

    async def retire(self, below: Version) -> None:
        for version in [version for version in self._manifests if version < below]:
            del self._manifests[version]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRules:
    order: Literal["early", "paper"]
    weights_s: float
    pinned_s: float


class Weights:
    def __init__(
        self, record: Recorder, waits: Waits, fleet: Fleet, trainer: Trainer, store: WeightStore, rules: WeightRules
    ) -> None:
        self._record = record
        self._waits = waits
        self._fleet = fleet
        self._trainer = trainer
        self._store = store
        self._rules = rules
        self._changed = Signal()
        self._pins: dict[Version, float] = {}
        self.published: Version = -1
        self._allowed: Version = -1

    # --- the trainer's side ------------------------------------------------------------------------------------------

    async def publish(self, step: int, version: Version) -> None:
        """Offer the trainer's weights as `version`; under `early` engines apply it as soon as they hold it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        manifest = await self._waits.on(
            self._trainer.publish(version), what="the trainer to publish", deadline_s=started + self._rules.weights_s
        )
        await self._store.offer(manifest)
        await self._store.retire(version - VERSIONS_KEPT + 1)
        self.published = version
        if self._rules.order == "early":
            self._allowed = version
        self._record(
            "published", step=step, version=version, seconds=round(loop.time() - started, 6), bytes=manifest.n_bytes,
            buckets=manifest.buckets, digest=manifest.fingerprint.digest,
        )  # fmt: skip
        self._changed.notify()

    async def sync(self) -> None:
        """RollArt's suspend, update, resume: let engines apply what is published, and wait until all have."""
        self._allowed = self.published
        self._changed.notify()
        await self.everywhere(self.published)

    async def everywhere(self, version: Version) -> None:
        """Wait until every engine serves `version` or a newer one."""
        deadline = asyncio.get_running_loop().time() + self._rules.weights_s + self._rules.pinned_s
        while not all(self._serves(name, version) for name in self._fleet.engines):
            await self._waits.on(self._fleet.changed.wait(), what="engines to apply weights", deadline_s=deadline)

    def _serves(self, engine: str, version: Version) -> bool:
        served = self._fleet.router.version(engine)
        return served is not None and served >= version

    # --- evaluation's side -------------------------------------------------------------------------------------------

    def pin(self, version: Version) -> None:
        """Keep engines that serve `version` on it, for `pinned_s` at most: an evaluation samples under it."""
        self._pins[version] = asyncio.get_running_loop().time() + self._rules.pinned_s

    def unpin(self, version: Version) -> None:
        self._pins.pop(version, None)
        self._changed.notify()

    # --- the engines' side -------------------------------------------------------------------------------------------

    async def follow(self, engine: Engine) -> None:
        """Bring every published version to one engine, in its own time, until the engine is lost."""
        name, have, held = engine.info.id, engine.info.version, engine.info.version
        while name in self._fleet.engines:
            if held < self.published:
                held = await self._fetch(engine, have, self.published)
            elif have < held <= self._allowed and not self._pinned(have):
                have = await self._apply(engine, have, held)
            else:
                await self._wait(have)

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

    async def _fetch(self, engine: Engine, have: Version, want: Version) -> Version:
        """Prefetch `want`; returns what the engine then holds."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome: Failure | None = None
        for _ in range(TRIES):
            outcome = None
            for manifest in await self._store.chain(have if have >= 0 else None, want):
                outcome = outcome or await self._bounded(engine.prefetch(manifest), "engines to fetch weights")
            if outcome is None:
                seconds = round(loop.time() - started, 6)
                self._record("prefetched", engine=engine.info.id, version=want, seconds=seconds)
                return want
            if want < self.published:  # retired under the engine's hands: go for the newer one
                return have
        assert outcome is not None
        self._fleet.lost(engine.info.id, outcome)
        return have

    async def _apply(self, engine: Engine, have: Version, want: Version) -> Version:
        loop = asyncio.get_running_loop()
        name = engine.info.id
        why = failure("engine", "raised", "no apply was tried")
        for _ in range(TRIES):
            started = loop.time()
            (manifest,) = (await self._store.chain(None, want))[-1:]
            applied = await self._bounded(
                engine.apply(want, kept="rebuild", pinned_deadline_s=started + self._rules.pinned_s),
                "engines to apply weights",
                extra_s=self._rules.pinned_s,
            )
            if isinstance(applied, Failure):
                why = applied
                continue
            matches = applied.fingerprint == manifest.fingerprint
            self._record(
                "applied", engine=name, version=want, seconds=round(loop.time() - started, 6),
                exposed_s=round(applied.exposed_s, 6), live=applied.live_requests, digest=applied.fingerprint.digest,
                matches=matches,
            )  # fmt: skip
            if matches:
                self._fleet.applied(name, want)
                return want
            why = failure(
                "engine", "raised", f"{name} serves {applied.fingerprint.digest[:12]}.. as version {want}, the trainer "
                f"published {manifest.fingerprint.digest[:12]}..", retryable=False,
            )  # fmt: skip
            await self._bounded(engine.prefetch(manifest), "engines to fetch weights")
        self._fleet.lost(name, why)
        return have

    async def _bounded(self, call: Awaitable[T | Failure], what: str, *, extra_s: float = 0.0) -> T | Failure:
        deadline = asyncio.get_running_loop().time() + self._rules.weights_s + extra_s
        try:
            return await self._waits.on(call, what=what, deadline_s=deadline + GRACE_S)
        except WaitExpired as expired:
            return failure("engine", "timeout", str(expired))
