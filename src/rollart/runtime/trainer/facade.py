"""The trainer port over training ranks in processes of their own.

Owns the split of each call over the ranks. Invariants: every rank gets every call, with equally many micro-batches; samples
are checked here, before any rank begins, so a sample that cannot be trained leaves no rank waiting for the others; weights
go from rank 0 into the object store, one call per bucket, and never through this process. When a rank dies, the call
raises TrainerLost with its cause, and so does every later one at once: ranks are started together and end together.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.config.schema import RunConfig
from rollart.core.errors import ClusterError, TrainerError, TrainerLost, failure
from rollart.core.types import Failure, Manifest, Sample, Version
from rollart.runtime.actors import Actors, call
from rollart.runtime.encoding import decoded, encoded
from rollart.runtime.heap import keep_freed_memory
from rollart.runtime.trainer import ranks
from rollart.runtime.trainer.packing import micro_batches
from rollart.runtime.trainer.probing import trainer_scores
from rollart.runtime.trainer.rank import TrainerRank, TrainerSpec, spec_of
from rollart.runtime.trainer.rows import LossRow, SampleKey, loss_rows
from rollart.runtime.trainer.warm import Transcript, warm_start
from rollart.runtime.weights import WeightIndex, manifest

HOST = "127.0.0.1"
"""Where ranks meet: all are on this machine."""

PING_S = 1.0
"""How often idle ranks are asked whether they are there: what they published is gone with them, so engines may wait for it."""
GRACE_S = 5.0
"""After one rank failed: how long the others get to fail alike before they count as stuck in a collective."""

Batch = list[list[LossRow]]
Offer = tuple[WeightIndex, list[Any], str, tuple[float, ...]]
"""Index, one object reference per bucket, digest, log-probabilities of the fixed prompts."""


class Episode(Protocol):
    """A transcript as environments make it."""

    @property
    def ids(self) -> NDArray[Any]: ...

    @property
    def sampled(self) -> NDArray[np.bool_]: ...


class TrainerActor:
    """One rank in its process. Sample rows come as one encoded byte string: Ray would ship each small array by itself."""

    def __init__(self, spec: TrainerSpec, rank: int, put: Callable[[Any], Any]) -> None:
        if spec.alone:
            keep_freed_memory()
        torch.set_num_threads(spec.trainer.threads)
        self._spec = spec
        self._rank = rank
        self._put = put
        self._store: Any = None
        self._trainer: TrainerRank

    def listen(self) -> int:
        """Open the meeting place (rank 0 only); returns its port."""
        self._store = ranks.listen(HOST, self._spec.trainer.ranks, self._spec.timeout_s)
        port: int = self._store.port
        return port

    def pid(self) -> int:
        return os.getpid()

    def start(self, port: int) -> None:
        """Build the rank, together with the others."""
        world = self._spec.trainer.ranks
        if world > 1 and self._store is None:
            self._store = ranks.connect(HOST, port, world, self._spec.timeout_s)
        self._trainer = TrainerRank(self._spec, rank=self._rank, store=self._store)

    def begin(self, step: int, total_weight: float | None) -> None:
        self._trainer.begin(step, total_weight=total_weight)

    def accumulate(self, blob: bytes) -> dict[str, float]:
        batch: Batch = decoded(blob)
        return self._trainer.accumulate(batch)

    def finish(self) -> dict[str, float]:
        return self._trainer.finish()

    def logprobs(self, blob: bytes) -> dict[SampleKey, NDArray[np.float32]] | None:
        batch: Batch = decoded(blob)
        found = self._trainer.logprobs(batch)
        return None if self._rank else found

    def publish(self, version: Version) -> Offer | None:
        offer = self._trainer.publish(version)
        probe = trainer_scores(self._trainer) if self._spec.probe else ()
        if offer is None:
            return None
        return offer.index, [self._put(bucket) for bucket in offer.buckets], offer.digest, probe

    def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        self._trainer.checkpoint(path, mode)

    def end(self) -> None:
        """Free the weights, where the actor has no process that ends."""
        if hasattr(self, "_trainer"):
            self._trainer.close()

    def warm_start(self, blob: bytes, steps: int, batch: int, lr: float, seed: int) -> dict[str, float]:
        transcripts: list[Transcript] = decoded(blob)
        return warm_start(self._trainer, transcripts, steps=steps, batch=batch, lr=lr, seed=seed)


class RemoteTrainer:
    """Implements `ports.Trainer` over one actor per rank."""

    def __init__(self, spec: TrainerSpec, actors: Actors, ranks: Sequence[Any]) -> None:
        self.spec = spec
        self._actors = actors
        self._ranks = tuple(ranks)
        self._open = False
        self._lost = ""
        self._calls = 0
        """Calls under way; they find out by themselves that a rank is gone."""
        self._told: Callable[[Failure], None] = lambda why: None
        self._watching: asyncio.Task[None] | None = None

    def watch(self, told: Callable[[Failure], None]) -> None:
        """Tell, once, that a rank is lost, whether a call found it out or the ranks were idle; in the running loop."""
        self._told = told
        self._watching = asyncio.get_running_loop().create_task(self._ping(), name="watch trainer")

    async def _ping(self) -> None:
        while not self._lost:
            await asyncio.sleep(PING_S)
            for rank, actor in enumerate(self._ranks):
                if self._calls:
                    break
                outcome = await call("trainer", actor.pid.remote())
                # a call that has begun meanwhile finds out itself, and a resize ends ranks on purpose
                if isinstance(outcome, Failure) and not self._calls:
                    self._lose(f"training rank {rank} {outcome.kind}: {outcome.detail}")
                    break

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            self._told(failure("trainer", "lost", why))

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        await self._all("begin", step, total_weight)
        self._open = True

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Returns `tokens` and `trajectories` of this call. Raises TrainerError naming a trajectory that cannot be trained."""
        parts = await self._each("accumulate", [(blob,) for blob in self._blobs(samples)])
        return {name: sum(part[name] for part in parts) for name in ("tokens", "trajectories")}

    async def finish(self) -> Mapping[str, float]:
        self._open = False
        metrics: Mapping[str, float] = (await self._all("finish"))[0]
        return metrics

    async def logprobs(self, samples: Sequence[Sample]) -> Mapping[SampleKey, NDArray[np.float32]]:
        """Old log-probabilities by (trajectory, segment), float32 per trained token; the ranks keep them until `publish`."""
        found: Mapping[SampleKey, NDArray[np.float32]] = (
            await self._each("logprobs", [(blob,) for blob in self._blobs(samples)])
        )[0]
        return found

    async def publish(self, version: Version) -> Manifest:
        index, handles, digest, probe = (await self._all("publish", version))[0]
        return manifest(version, index, handles, digest, probe)

    async def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        """One file for all ranks. Raises TrainerError when it cannot be written or read."""
        await self._all("checkpoint", _absolute(path), mode)
        self._open = False if mode == "load" else self._open

    async def resize(self, leases: Sequence[str]) -> None:
        """Go on with one rank per lease, between steps. Old log-probabilities are forgotten."""
        if self._open:
            raise TrainerError(f"a trainer with a step open cannot go to {len(leases)} ranks; finish the step first")
        if not leases:
            raise TrainerError("a trainer needs at least one lease; stop it instead")
        self._calls += 1
        try:
            with tempfile.TemporaryDirectory(prefix="rollart-resize-") as folder:
                path = f"{folder}/trainer.safetensors"
                await self.checkpoint(path, "save")
                _kill(self._actors, self._ranks)
                self.spec = replace(self.spec, trainer=self.spec.trainer.model_copy(update={"ranks": len(leases)}))
                self._ranks = tuple(await _start_ranks(self.spec, self._actors))
                await self.checkpoint(path, "load")
        finally:
            self._calls -= 1

    async def warm_start(
        self, transcripts: Iterable[Episode], *, steps: int, batch: int, lr: float, seed: int
    ) -> Mapping[str, float]:
        """See `warm.warm_start`: `loss`, `tokens`, `steps`, `seconds`."""
        plain = [Transcript(np.asarray(one.ids), np.asarray(one.sampled)) for one in transcripts]
        blob = encoded(plain)
        done: Mapping[str, float] = (await self._all("warm_start", blob, steps, batch, lr, seed))[0]
        return done

    async def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order: by them the owner can find what is left of this trainer."""
        return await self._all("pid")

    async def stop(self) -> None:
        """End the ranks. Idempotent."""
        self._lost = self._lost or "it was stopped"
        if self._watching is not None:
            self._watching.cancel()
        _kill(self._actors, self._ranks)

    def _blobs(self, samples: Sequence[Sample]) -> list[bytes]:
        """Each rank's micro-batches."""
        spec = self.spec
        rows = loss_rows(samples, spec.algorithm, spec.sampling, longest=spec.longest_response)
        parts = micro_batches(rows, ranks=spec.trainer.ranks, micro_batch_tokens=spec.trainer.micro_batch_tokens)
        return [encoded(of_rank) for of_rank in parts]

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        return await self._each(method, [arguments] * len(self._ranks))

    async def _each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Call every rank with its own arguments."""
        if self._lost:
            raise TrainerLost(f"the trainer is gone: {self._lost}")
        self._calls += 1
        try:
            return await _together(
                [getattr(actor, method).remote(*args) for actor, args in zip(self._ranks, arguments, strict=True)]
            )
        except TrainerLost as error:
            self._lose(str(error))
            raise
        finally:
            self._calls -= 1


async def start_trainer(config: RunConfig, vocab_size: int, actors: Actors) -> RemoteTrainer:
    """Start `trainer.ranks` ranks. Raises ClusterError with the cause, leaving none behind."""
    spec = spec_of(config, vocab_size)
    return RemoteTrainer(spec, actors, await _start_ranks(spec, actors))


async def _start_ranks(spec: TrainerSpec, actors: Actors) -> list[Any]:
    started = [actors.start(TrainerActor, spec, rank, actors.put) for rank in range(spec.trainer.ranks)]
    try:
        port = (await _together([started[0].listen.remote()]))[0] if spec.trainer.ranks > 1 else 0
        await _together([actor.start.remote(port) for actor in started])
    # boundary: however a start ends early, by being given up too, it leaves no rank behind
    except BaseException as error:
        _kill(actors, started)
        if isinstance(error, TrainerError):
            raise ClusterError(f"the trainer did not start: {error}") from error
        raise
    return started


async def _together(refs: Sequence[Any], *, grace_s: float = GRACE_S) -> list[Any]:
    """All ranks' answers in order.

    Raises TrainerError when a call failed on all ranks alike, which then are where they were; TrainerLost when a rank is gone,
    or failed alone and left the others waiting for it.
    """
    tasks = [asyncio.ensure_future(call("trainer", ref)) for ref in refs]
    waiting: set[asyncio.Future[Any]] = set(tasks)
    failed = ""
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=grace_s if failed else None, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TrainerLost(f"{failed}; {len(waiting)} other ranks wait for it")
        for rank, task in enumerate(tasks):
            if task in done and isinstance(outcome := task.result(), Failure):
                text = f"training rank {rank} {outcome.kind}: {outcome.detail}"
                if outcome.kind == "lost":
                    raise TrainerLost(text)
                failed = failed or text
    if failed:
        raise TrainerError(failed)
    return [task.result() for task in tasks]


def _absolute(path: str) -> str:
    """Actors need not run in this process's folder."""
    return str(Path(path).absolute())


def _kill(actors: Actors, started: Iterable[Any]) -> None:
    for actor in started:
        actors.kill(actor)
