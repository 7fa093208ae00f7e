"""A simulated trainer: takes its time and remembers what it was given, so that a fingerprint says what was trained.

Invariant: `digest` is a function of the ordered samples of all optimiser steps since the run began; weights that were
trained on a sample twice, or missed one, have another digest. A lost trainer raises TrainerLost from every call, those
under way included.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import TrainerError, TrainerLost
from rollart.core.types import Failure, Fingerprint, Manifest, Sample, Version
from rollart.sim.disk import SimDisk, Weights
from rollart.sim.pushes import Bytes, Pushes

WEIGHT_BYTES = 1 << 20
"""Size of the pretended weights; only reports show it."""

TrainerCall = Literal["begin", "accumulate", "finish", "logprobs", "publish", "save", "load"]
TrainerMishap = Literal["lost", "raised", "hang"]
"""lost: it dies half-way through the call; raised: its code is broken; hang: the call is never answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """Seconds of one call each, and how it misbehaves."""

    begin_s: float = 0.0
    accumulate_s: float = 0.0
    finish_s: float = 0.0
    publish_s: float = 0.0
    push_s: float = 0.0
    """Seconds in which published bytes are then on their way into the store, beside what the trainer does next
    (`pushes.py`)."""
    save_s: float = 0.0
    load_s: float = 0.0
    changes_weights: bool = True
    step_s: Callable[[Sequence[Sample]], float] | None = None
    """Seconds of an optimiser step over these samples, beside `finish_s`."""
    logprobs_s: Callable[[Sequence[Sample]], float] | None = None
    """Seconds of a forward pass over them; None: `begin_s`."""
    weight_bytes: int = WEIGHT_BYTES
    buckets: int = 1
    remembers: bool = True
    """Keeps all samples of all steps, for who wants to compare them; else their digest only."""
    masked_share: float = 0.0
    """Of the sampled tokens of a step, rounded down: what corrections take out of its loss."""
    fault: Callable[[str, TrainerCall, int], TrainerMishap | None] = field(default=lambda trainer, call, nth: None)
    """(trainer id, call, how many of that call it had before) -> what goes wrong with this one."""
    bytes_die: bool = False
    """Published bytes that no engine has fetched are gone with the trainer that published them; else those alone that were
    still on their way into the store."""


class SimTrainer:
    def __init__(self, model: TrainerModel, *, name: str = "trainer-0", disk: SimDisk | None = None) -> None:
        self.name = name
        self.lost: Failure | None = None
        self.phase: TrainerCall | Literal["idle"] = "idle"
        self._model = model
        self._disk = disk if disk is not None else SimDisk()
        self._incarnation = self._disk.incarnation
        self._open: list[Sample] = []
        self._weights = Weights(digest="weights-0")
        self._calls: Counter[TrainerCall] = Counter()
        self._under_way: dict[asyncio.Future[None], None] = {}
        self._published: list[Bytes] = []
        self._pushes = Pushes(model.push_s)
        self.die: Callable[[str], None] = self._die_alone
        """Set by the cluster, which has to be told too."""

    @property
    def batches(self) -> list[list[Sample]]:
        """What its weights were trained on, an optimiser step each."""
        return [list(batch) for batch in self._weights.batches]

    @property
    def weights(self) -> Weights:
        return self._weights

    # --- what may go wrong -------------------------------------------------------------------------------------------

    def lose(self, why: Failure) -> None:
        """Every call that is under way raises now, every later one when it comes. Idempotent."""
        if self.lost is not None:
            return
        self.lost = why
        for call in self._under_way:
            if not call.done():
                call.set_exception(TrainerLost(why.detail))
        for published in self._published:
            if self._model.bytes_die or not published.there.is_set():
                published.lose()

    def _die_alone(self, detail: str) -> None:
        self.lose(Failure(where="trainer", kind="lost", retryable=True, detail=detail))

    async def _spend(self, call: TrainerCall, seconds: float) -> None:
        """The time of one call, or its end half-way."""
        nth = self._calls[call]
        self._calls[call] += 1
        fault = self._model.fault(self.name, call, nth)
        if self.lost is not None:
            raise TrainerLost(self.lost.detail)
        if fault == "raised":
            raise TrainerError(f"{call} of {self.name}: its code raised")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._under_way[done] = None
        self.phase = call
        timer: asyncio.Handle | None = None
        if fault is None:
            timer = loop.call_later(seconds, _done, done) if seconds > 0 else loop.call_soon(_done, done)
        elif fault == "lost":
            timer = loop.call_later(seconds / 2, self.die, f"{self.name} died in {call}")
        try:
            await done
        finally:
            if timer is not None:
                timer.cancel()
            self.phase = "idle"
            del self._under_way[done]

    # --- the port ----------------------------------------------------------------------------------------------------

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        await self._spend("begin", self._model.begin_s)
        self._open = []

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        await self._spend("accumulate", self._model.accumulate_s)
        self._open.extend(samples)
        return {}

    async def finish(self) -> Mapping[str, float]:
        model = self._model
        await self._spend("finish", model.finish_s + (model.step_s(self._open) if model.step_s else 0.0))
        batch, old, moves = tuple(self._open), self._weights, model.changes_weights
        self._open = []
        self._weights = Weights(
            batches=(*old.batches, batch) if model.remembers else (),
            moves=old.moves + moves,
            digest=_trained_on(old, batch) if moves else old.digest,
        )
        masked = int(model.masked_share * sum(sample.segment.n_sampled for sample in batch))
        return {
            "loss": 0.0, "grad_norm": 1.0, "lr": 1e-3, "weights_changed": float(moves), "masked_tokens": float(masked),
        }  # fmt: skip

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        model = self._model
        await self._spend("logprobs", model.logprobs_s(samples) if model.logprobs_s else model.begin_s)
        return None

    async def publish(self, version: Version) -> Manifest:
        await self._spend("publish", self._model.publish_s)
        self._published.append(self._pushes.begin())
        return Manifest(
            version=version,
            shards={"weights/0/0-1/float32": self._model.weight_bytes},
            buckets=self._model.buckets,
            fingerprint=Fingerprint(digest=self._weights.digest),
            location=self._published[-1],
        )

    async def resize(self, leases: Sequence[str]) -> None:
        """Ranks are not modelled."""

    async def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        """Keep the weights on the disk, or take them from it. Raises TrainerError when there is nothing at `path`."""
        model = self._model
        await self._spend(mode, model.save_s if mode == "save" else model.load_s)
        if mode == "load":
            if path not in self._disk.parts:
                raise TrainerError(f"{path} holds no trainer state")
            self._weights, self._open = self._disk.parts[path], []
        elif self._disk.incarnation == self._incarnation:
            self._disk.parts[path] = self._weights


def _done(call: asyncio.Future[None]) -> None:
    if not call.done():
        call.set_result(None)


def _trained_on(old: Weights, batch: Sequence[Sample]) -> str:
    """The digest of weights after one more optimiser step."""
    state = hashlib.blake2b(old.digest.encode(), digest_size=8)
    for sample in batch:
        state.update(f"\x1f{sample.traj}\x1f{sample.index}\x1f{sample.advantage}".encode())
    return f"weights-{old.moves + 1}-{state.hexdigest()}"
