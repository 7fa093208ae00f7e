"""The ports of a replayed run: the simulated engine, trainer and environments, each behind the process that it runs in.

Invariant: what each port decides is the simulated port's affair (versions, books, faults); what is here is only when: every
call goes over the wire to the worker's process, waits there for its turn, and comes back to control's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rollart.core.resources import Degrees, EngineInfo, Limits
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Generation,
    Live,
    Manifest,
    Observation,
    RequestId,
    Sample,
    TaskInstance,
    Tokens,
    Trajectory,
    TrajId,
    TurnFn,
    TurnRequest,
    Version,
)
from rollart.learn.batching import Prompt, computed_tokens, prompt_tokens, read_tokens, split_by_prompt
from rollart.perf.measured import Calibrated
from rollart.sim.engine import SimEngine
from rollart.sim.envs import SimEnv, SimSession
from rollart.sim.host import Process
from rollart.sim.threads import Threads
from rollart.sim.trainer import SimTrainer
from rollart.sim.wires import SimWire

T = TypeVar("T")

HALF = 0.5
"""Of what control does for a turn: one half when the engine has answered, one when the environment has; of what it does for
a trajectory beside its turns: one half when it is open, one when it is reset."""


class ReplayEngine:
    """Implements `ports.Engine`."""

    def __init__(self, inner: SimEngine, process: Process, wire: SimWire, calibrated: Calibrated) -> None:
        self.inner = inner
        self._process = process
        self.wire = wire
        self._law = calibrated.weights
        self._turn_s = HALF * calibrated.control.turn_s
        self._on_the_way: dict[RequestId, Live] = {}
        """Turns that have ended and that control does not have yet."""

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    @info.setter
    def info(self, info: EngineInfo) -> None:
        self.inner.info = info

    async def generate(self, request: TurnRequest) -> Generation:
        came_s = await self.wire.there()
        answer = await self.inner.generate(request)
        if answer.tokens.spans:
            oldest = answer.tokens.spans[0].version
            self._on_the_way[request.id] = Live(n_tokens=answer.tokens.n_tokens, oldest_version=oldest)
        try:
            await self.wire.back(came_s, self._turn_s)
        finally:
            self._on_the_way.pop(request.id, None)
        return answer

    async def abort(self, requests: Sequence[RequestId]) -> None:
        await self.wire.there()
        await self.inner.abort(requests)

    def forget(self, traj: TrajId, attempt: int) -> None:
        self.wire.post()
        self.inner.forget(traj, attempt)

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        await self._process.work(self._law.prefetch_s)
        return await self.inner.prefetch(manifest)

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        await self._process.work(self._law.apply_s)
        return await self.inner.apply(version, kept=kept, pinned_deadline_s=pinned_deadline_s)

    def book(self) -> EngineBook:
        book = self.inner.book()
        return replace(book, live={**book.live, **self._on_the_way})

    async def limit(self, limits: Limits) -> None:
        await self.inner.limit(limits)

    async def sleep(self) -> None:
        await self.inner.sleep()

    async def wake(self, degrees: Degrees | None = None) -> None:
        await self.inner.wake(degrees)


class ReplayTrainer:
    """Implements `ports.Trainer`: a rank per process, the samples split over them as for a real one."""

    def __init__(
        self, inner: SimTrainer, ranks: Sequence[Process], control: Process, calibrated: Calibrated, micro_tokens: int
    ) -> None:
        self.inner = inner
        self._ranks = tuple(ranks)
        self._control = control
        self._laws = calibrated
        self._micro_tokens = micro_tokens
        self._passes = self._computed = 0
        """Of the step that is open."""

    async def _all(self, work_s: Sequence[float]) -> None:
        """Every rank does its part; all are done when the last one is."""
        await asyncio.gather(*(rank.work(part_s) for rank, part_s in zip(self._ranks, work_s, strict=True)))

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        await self._control.work(self._laws.control.step_s)
        self._passes = self._computed = 0
        await self.inner.begin(step, total_weight=total_weight)

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        law = self._laws.trainer
        lengths = [read_tokens(sample.segment) for sample in samples]
        prompts = [_prompt(sample) for sample in samples]
        parts = split_by_prompt(
            lengths, prompts, ranks=len(self._ranks), micro_batch_tokens=self._micro_tokens
        )  # fmt: skip
        computed = [sum(computed_tokens(batch, lengths, prompts) for batch in batches) for batches in parts]
        await self._all(
            [law.pass_s * len(batches) + law.token_s * tokens for batches, tokens in zip(parts, computed, strict=True)]
        )
        self._passes += len(parts[0])
        self._computed += sum(computed)
        return await self.inner.accumulate(samples)

    async def finish(self) -> Mapping[str, float]:
        await self._all([self._laws.trainer.step_s] * len(self._ranks))
        metrics = await self.inner.finish()
        return {**metrics, "micro_batches": float(self._passes), "computed_tokens": float(self._computed)}

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        return await self.inner.logprobs(samples)

    async def publish(self, version: Version) -> Manifest:
        await self._all([self._laws.weights.publish_s] * len(self._ranks))
        return await self.inner.publish(version)

    async def resize(self, leases: Sequence[str]) -> None:
        await self.inner.resize(leases)

    async def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        await self.inner.checkpoint(path, mode)


def _prompt(sample: Sample) -> Prompt:
    """The rows of a group begin with one prompt; a later segment begins with a context of its own."""
    group = sample.traj.rpartition("/")[0]
    return (group if sample.index == 0 else (sample.traj, sample.index)), prompt_tokens(sample.segment)


@dataclass(frozen=True, slots=True)
class HostSeat:
    """One environment host: its process, its wire, what a call costs it and control."""

    process: Process
    wire: SimWire
    threads: Threads
    call_s: float
    woken_s: float
    """More, of a call that has waited for something."""
    turn_s: float
    """Control, for a step's answer."""
    open_s: float
    """Control, for each of opening and resetting."""


class ReplayEnv:
    """Implements `ports.Env` over all hosts."""

    def __init__(self, inner: SimEnv, last: Callable[[TrajId, int], int]) -> None:
        """`last`: tokens of the observation with which an attempt ends."""
        self.inner = inner
        self._last = last
        self.seats: dict[str, HostSeat] = {}

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> ReplaySession | Failure:
        session = await self.inner.open(instance, traj=traj, attempt=attempt, deadline_s=deadline_s)
        if isinstance(session, Failure):
            return session
        seat = self.seats[session.host]
        came_s = await seat.wire.there()
        await seat.threads.run(lambda: seat.process.work(seat.call_s))
        await seat.wire.back(came_s, seat.open_s)
        return ReplaySession(session, seat, self._last(traj, attempt))


class ReplaySession:
    """Implements `ports.Session`."""

    def __init__(self, inner: SimSession, seat: HostSeat, last_tokens: int) -> None:
        self.host = inner.host
        self._last_tokens = last_tokens
        self._inner = inner
        self._seat = seat

    async def _call(self, call: Callable[[], Coroutine[Any, Any, T]], control_s: float) -> T:
        """A call's way to the host, its wait for a thread, what it computes and what it waits for, and the way back."""
        seat = self._seat

        async def in_thread() -> T:
            await seat.process.work(seat.call_s)
            begun_s = asyncio.get_running_loop().time()
            found = await call()
            if asyncio.get_running_loop().time() > begun_s:
                await seat.process.work(seat.woken_s)
            return found

        came_s = await seat.wire.there()
        found = await seat.threads.run(in_thread)
        await seat.wire.back(came_s, control_s)
        return found

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        return await self._call(lambda: self._inner.reset(deadline_s=deadline_s), self._seat.open_s)

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        found = await self._call(lambda: self._inner.step(action, deadline_s=deadline_s), self._seat.turn_s)
        if isinstance(found, Observation) and found.terminated:
            return replace(found, tokens=Tokens(n_tokens=self._last_tokens))
        return found

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        return await self._inner.run(turn)

    async def close(self) -> None:
        """Nobody waits for it; the host has the work."""
        self._seat.wire.post()
        self._seat.process.do(self._seat.call_s, _nothing)
        await self._inner.close()


def _nothing() -> None:
    """Of work that nobody waits for."""
