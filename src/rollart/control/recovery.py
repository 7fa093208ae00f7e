"""Bringing a lost trainer back: another one loads the last checkpoint and repeats the steps since.

Invariant: what comes back was trained on the same batches in the same order as what was lost, each once; it is published
under a number of its own, and staleness goes on as if nothing had happened (`sched.staleness.Lineage`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollart.control.buffer import Batch, Buffer
from rollart.control.colocation import Colocation
from rollart.control.elastic import Elastic, Seat
from rollart.control.waits import WaitExpired, Waits
from rollart.control.weights import Weights
from rollart.core.errors import InvariantBroken, RunFailed, TrainerLost, describe, failure
from rollart.core.events import Recorder
from rollart.core.types import Failure, Version

T = TypeVar("T")


class Recovery:
    """Owns the trainer's seat, where its last checkpoint is, and the batches that it was trained on since."""

    def __init__(
        self, record: Recorder, waits: Waits, elastic: Elastic, seat: Seat, weights: Weights, buffer: Buffer,
        colocation: Colocation, *, optimise: Callable[[Batch], Awaitable[object]], train_s: float, enabled: bool,
    ) -> None:  # fmt: skip
        self._record = record
        self._waits = waits
        self._elastic = elastic
        self.seat = seat
        self._weights = weights
        self._buffer = buffer
        self._colocation = colocation
        self._optimise = optimise
        self._train_s = train_s
        self._enabled = enabled
        self._kept: list[Batch] = []
        self._path = ""
        """Of the trainer's part of the last checkpoint; empty: there is none to go on from."""
        self._step = 0
        """Steps that it holds."""
        self.under_way = False
        """The trainer is being brought back, or kept: no batch can be trained meanwhile."""
        self.wanted: Failure | None = None
        """Set: engines cannot fetch the newest weights, so they must be published again."""

    def doubt(self, why: Failure) -> None:
        """The newest weights are not to be had any more; most likely the trainer, who kept them, is gone."""
        self.wanted = why
        self._buffer.changed.notify()

    def lost(self, error: TrainerLost) -> None:
        """The world says that the trainer is gone. Whoever calls it finds out; while nobody does, engines must not be
        left without its weights."""
        self.doubt(_lost(error))

    def trained(self, batch: Batch) -> None:
        """A step is done and published."""
        self._elastic.restarts.trained()
        if self._enabled:
            self._kept.append(batch)

    def kept(self, path: str, step: int) -> None:
        """A checkpoint holds everything that was trained so far: `step` steps."""
        if self._enabled:
            self._path, self._step = path, step
        self._kept.clear()

    async def through(self, version: Version, work: Callable[[Version], Awaitable[T]]) -> T:
        """Do `work` with a trainer that has the weights of the version that it is given, as often as trainers are lost."""
        while True:
            try:
                return await work(version)
            except TrainerLost as error:
                version = await self.recover(version, error)

    async def publish_again(self, version: Version) -> Version:
        """Offer the present weights under the next number."""
        try:
            await self.offer(version, version + 1)
        except TrainerLost as error:
            return await self.recover(version, error)
        return version + 1

    async def served(self, version: Version) -> Version:
        """Wait until every engine serves these weights; returns the number under which they do."""

        async def everywhere(version: Version) -> Version:
            await self._weights.sync()
            return version

        return await self.through(version, everywhere)

    async def beside(
        self, version: Version, work: Awaitable[T], *, again: Callable[[Version], Awaitable[Version]] | None = None
    ) -> tuple[T, Version]:
        """Do `work` that only samples, while no training would notice that engines cannot have the weights of `version`.

        Where none serves any more, they are offered again, by `again` or `publish_again`. Returns what came of the work, and
        the number that the weights have then.
        """
        offer, offering, done = again or self.publish_again, False, False

        async def watch() -> None:
            nonlocal version, offering
            while not done:
                await self._weights.unservable()
                offering = True
                version = await offer(version)
                offering = False

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(), name="weights that no engine serves")
            outcome = await work
            done = True
            if not offering:  # which is brought to its end: another trainer must not be left without the weights
                watching.cancel()
        return outcome, version

    async def from_nothing(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` that needs no earlier trainer, with another trainer if one is lost over it."""
        while True:
            try:
                return await work()
            except TrainerLost as error:
                await self._replace(error)

    async def load(self, path: str) -> None:
        """Bring the trainer to a checkpoint."""
        await self._bounded(self.seat.port.checkpoint(path, "load"))

    async def keep(self, path: str) -> None:
        """Write the trainer's part of a checkpoint."""
        await self._bounded(self.seat.port.checkpoint(path, "save"))

    async def recover(self, version: Version, error: TrainerLost) -> Version:
        """Another trainer, at the weights of `version`; returns the number under which they are published now.

        Raises RunFailed when there is nothing to start from, or trainers are lost time and again.
        """
        started = asyncio.get_running_loop().time()
        self.under_way = True
        in_a_step = self._colocation.trains  # which failed, and is done again on the devices that it had
        try:
            while True:
                if not self._path:
                    raise RunFailed(
                        "the trainer is lost and there is no checkpoint to go on from", _lost(error)
                    ) from error
                await self._replace(error)
                try:
                    async with self._colocation.training(keeps=in_a_step):
                        await self._repeat(version)
                    await self.offer(version, version + 1)
                except TrainerLost as another:
                    error = another
                    continue
                seconds = round(asyncio.get_running_loop().time() - started, 6)
                self._record("trainer_restarted", steps=len(self._kept), seconds=seconds)
                return version + 1
        finally:
            self.under_way = False

    async def _repeat(self, version: Version) -> None:
        """The steps since the last checkpoint, from the batches that were kept."""
        steps = self._buffer.lineage.batches(version)
        if steps != self._step + len(self._kept):
            raise InvariantBroken(
                f"version {version} was trained on {steps} batches, the last checkpoint holds {self._step} and "
                f"{len(self._kept)} were kept since: what was lost cannot be repeated"
            )
        await self.load(self._path)
        for batch in self._kept:
            await self._optimise(batch)

    async def _replace(self, error: TrainerLost) -> None:
        why = _lost(error)
        self._record("trainer_lost", failure=describe(why))
        worker = await self._elastic.again("train", self.seat.lease, why)
        if worker is None:
            raise RunFailed("the trainer is lost", why) from error
        self.seat.port, self.seat.lease = worker.port, worker.lease

    async def first(self, number: Version) -> Version:
        """Publish weights that nothing was trained into yet; above 0 where numbers were used up that do not stand.

        Returns their number, which is the next one where a trainer is lost that had published them: this one is at the same.
        """
        before = self._weights.published
        if before >= 0:
            await self.offer(before, before + 1)
            return before + 1
        await self._weights.publish(-1, number)
        if number > 0:
            self._buffer.lineage = self._buffer.lineage.again(0, number)
        return number

    async def offer(self, version: Version, number: Version) -> None:
        """Publish the weights of `version` again. Numbers are never reused: engines may hold parts of an old one."""
        self.wanted = None
        await self._weights.publish(-1, number, again=version)
        self._buffer.lineage = self._buffer.lineage.again(version, number)

    async def _bounded(self, call: Awaitable[T]) -> T:
        deadline = asyncio.get_running_loop().time() + self._train_s
        try:
            return await self._waits.on(call, what="the trainer", deadline_s=deadline)
        except WaitExpired as expired:
            raise TrainerLost(f"the trainer does not answer: {expired}") from expired


def _lost(error: TrainerLost) -> Failure:
    return failure("trainer", "lost", str(error))
