"""The trainer's loop: take a batch, turn it into samples, step, publish.

Consumes: complete groups from the buffer. Gives: versions to the engines. Invariant: version v + 1 is trained on one batch
that was released at version v; a batch is kept until a checkpoint holds what was trained on it, so a trainer that is lost
at any moment is brought back to where it was. Rollout goes on all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rollart.config.schema import Algorithm
from rollart.control.buffer import Batch, Buffer
from rollart.control.colocation import Colocation
from rollart.control.fleet import Fleet
from rollart.control.recovery import Recovery
from rollart.control.waits import WaitExpired, Waits
from rollart.control.weights import Weights
from rollart.core.errors import RunFailed, TrainerLost, failure
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.seeds import rng
from rollart.core.types import Sample, Version
from rollart.learn.advantages import build_samples, needs_whole_batch
from rollart.learn.credit import total_weight

T = TypeVar("T")

TAKEN_OUT = ("masked_tokens", "rejected_tokens", "old_tokens")
"""Metrics of an optimiser step that count tokens which corrections took out of its loss, each in one of them."""
GROUPS_PER_TURN = 8
"""Groups made into samples before the loop's other coroutines get a turn: a large batch must not hold the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRules:
    steps: int
    steps_per_batch: int
    paper: bool
    algorithm: Algorithm
    batch_s: float
    train_s: float
    seed: int


class Training:
    def __init__(
        self, record: Recorder, waits: Waits, ledger: Ledger, buffer: Buffer, fleet: Fleet, weights: Weights,
        recovery: Recovery, colocation: Colocation, *, rules: TrainRules,
        after_step: Callable[[int, Version], Awaitable[Version]],
    ) -> None:  # fmt: skip
        self._record = record
        self._waits = waits
        self._ledger = ledger
        self._buffer = buffer
        self._fleet = fleet
        self._weights = weights
        self._recovery = recovery
        self._colocation = colocation
        self._rules = rules
        self._after_step = after_step
        self._masked = 0
        """Tokens of the batch trained last that were taken out of its loss."""

    async def run(self, *, first_step: int, version: Version) -> Version:
        """Train to the last step; returns the last version. One batch, `steps_per_batch` steps, one version."""
        for step in range(first_step, self._rules.steps):
            batch, version = await self._take(step, version)
            self._fleet.min_version = self._buffer.min_version
            self._fleet.changed.notify()
            if self._rules.paper:
                version = await self._recovery.served(version)
            version = await self._recovery.through(version, partial(self._step, batch))
            self._recovery.trained(batch)
            self._buffer.trained(batch, masked=self._masked)
            self.close_books()
            version = await self._after_step(step, version)
        return version

    async def _take(self, step: int, version: Version) -> tuple[Batch, Version]:
        """The next batch. While it is waited for, weights that engines cannot fetch are published again."""
        while True:
            deadline = asyncio.get_running_loop().time() + self._rules.batch_s
            batch = await self._buffer.take(
                step, version, deadline_s=deadline, unless=lambda: self._recovery.wanted is not None,
                trouble=lambda: self._weights.trouble,
            )  # fmt: skip
            if batch is not None:
                return batch, version
            version = await self._recovery.publish_again(version)

    async def _step(self, batch: Batch, version: Version) -> Version:
        """Train on the batch with the weights of `version` and publish; returns the version that comes of it.

        A step is finished when its weights are published: what a trainer did that was lost before that is done again.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._record("step_started", step=batch.step, version=version)
        async with self._colocation.training():
            metrics = await self.optimise(batch)
            seconds = round(loop.time() - started, 6)
        await self._weights.publish(batch.step, version + 1)
        self._record(
            "step_finished", step=batch.step, version=version, seconds=seconds,
            trained_tokens=batch.n_sampled - self._masked, masked_tokens=self._masked, metrics=dict(metrics),
        )  # fmt: skip
        return version + 1

    async def optimise(self, batch: Batch) -> Mapping[str, float]:
        """The batch's optimiser steps; returns the last one's metrics. Raises TrainerLost."""
        trainer, step = self._recovery.seat.port, batch.step
        metrics: Mapping[str, float] = {}
        masked = 0.0
        samples = await self._samples(batch)
        parts = _parts(batch, samples, self._rules.steps_per_batch)
        if self._rules.algorithm.needs_old(len(parts)):
            await self._bounded(trainer.logprobs(samples))
        for part in parts:
            await self._bounded(trainer.begin(step, total_weight=total_weight(part)))
            await self._bounded(trainer.accumulate(part))
            metrics = await self._bounded(trainer.finish())
            masked += sum(metrics.get(name, 0.0) for name in TAKEN_OUT)
            self._must_move(step, metrics)
        self._masked = round(masked)
        return metrics

    async def _samples(self, batch: Batch) -> list[Sample]:
        """The trainer's rows, made of a few groups per turn of the loop, unless they depend on one another."""
        algorithm, chance = self._rules.algorithm, rng(self._rules.seed, "shuffle", batch.step)
        size = len(batch.groups) if needs_whole_batch(algorithm) else GROUPS_PER_TURN
        oldest = self._buffer.oldest_unmasked(batch.version, algorithm.mask_older_than)
        samples: list[Sample] = []
        for start in range(0, len(batch.groups), size):
            groups = [group.done for group in batch.groups[start : start + size]]
            samples += build_samples(groups, algorithm, chance, min_version=oldest)
            await asyncio.sleep(0)
        return samples

    def _must_move(self, step: int, metrics: Mapping[str, float]) -> None:
        """Weights that stay the same under a gradient and a learning rate are a wrong training in silence."""
        if not metrics["weights_changed"] and metrics["lr"] > 0 and metrics["grad_norm"] > 0:
            raise RunFailed(
                f"step {step} left every weight as it was",
                failure("trainer", "frozen_weights", f"lr {metrics['lr']}, gradient norm {metrics['grad_norm']}"),
            )

    def close_books(self) -> None:
        """Both books of the token ledger, compared and recorded."""
        books, own = self._fleet.books(), self._ledger
        sampled = own.check(books)
        live = sum(request.n_tokens for book in books.values() for request in book.live.values())
        self._record(
            "ledger", sampled=sum(sampled.values()), trained=own.trained,
            dropped={reason: n for reason, n in own.dropped.items() if n}, buffered=own.buffered,
            in_flight=own.in_flight + live, eval=own.eval, engines=sampled,
        )  # fmt: skip

    async def _bounded(self, call: Awaitable[T]) -> T:
        deadline = asyncio.get_running_loop().time() + self._rules.train_s
        try:
            return await self._waits.on(call, what="the trainer", deadline_s=deadline)
        except WaitExpired as expired:
            raise TrainerLost(f"the trainer does not answer: {expired}") from expired


def _parts(batch: Batch, samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The samples of each of `parts` runs of whole groups; a group is never torn, its advantages belong together."""
    size = -(-len(batch.groups) // parts)
    part_of = {trajectory.id: index // size for index, group in enumerate(batch.groups) for trajectory in group.done}
    out: list[list[Sample]] = [[] for _ in range(parts)]
    for sample in samples:
        out[part_of[sample.traj]].append(sample)
    return [part for part in out if part]
