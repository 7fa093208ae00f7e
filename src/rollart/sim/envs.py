"""Simulated environments and scorers: latencies, rewards and faults by function of the trajectory, on virtual time.

Invariant: a call to an environment answers once: in time, at its deadline, or in the instant in which its host is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import failure
from rollart.core.types import Failure, Observation, TaskInstance, Tokens, Trajectory, TrajId, TurnFn

Call = Literal["open", "reset", "step", "close"]
Fault = Failure | Literal["hang", "dead"]
"""A typed failure; a call that never returns; a host that does not even answer that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvModel:
    """How environments behave. Every function gets (trajectory id, attempt, turn) and must depend on them alone."""

    latency_s: Callable[[TrajId, int, Call, int], float] = field(default=lambda traj, attempt, call, turn: 0.0)
    fault: Callable[[TrajId, int, Call, int], Fault | None] = field(default=lambda traj, attempt, call, turn: None)
    turns: Callable[[TrajId, int], int] = field(default=lambda traj, attempt: 1)
    reward: Callable[[TrajId, int], float | None] = field(default=lambda traj, attempt: 1.0)
    """Given with the last observation (0 before it); None: the environment gives none at the end."""
    prompt_tokens: int = 16
    observation_tokens: int = 8
    tokens: Callable[[TrajId, int, int], int] | None = None
    """Tokens of the observation before that turn, in place of the two numbers."""
    metrics: Callable[[TrajId, int], dict[str, float]] = field(default=lambda traj, attempt: {})


class SimHost:
    """One env host: its sessions live and die with it."""

    __slots__ = ("calls", "lost", "name", "sessions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions = 0
        self.calls: dict[asyncio.Future[Failure | None], None] = {}
        """Calls under way, in the order in which they came; an answer that is set ends the call."""
        self.lost: Failure | None = None

    def lose(self, why: Failure) -> None:
        self.lost = why
        for answer in self.calls:
            if not answer.done():
                answer.set_result(why)

    async def spend(self, seconds: float, outcome: Failure | None) -> Failure | None:
        """`outcome` after some seconds, or the host's own end before them."""
        if self.lost is not None:
            return self.lost
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Failure | None] = loop.create_future()
        self.calls[answer] = None
        timer = loop.call_later(seconds, _answer, answer, outcome) if seconds > 0 else None
        if timer is None:
            loop.call_soon(_answer, answer, outcome)
        try:
            return await answer
        finally:
            if timer is not None:
                timer.cancel()
            del self.calls[answer]


def _answer(future: asyncio.Future[Failure | None], outcome: Failure | None) -> None:
    if not future.done():
        future.set_result(outcome)


class SimEnv:
    """All env hosts behind one port; a session goes to the host with the fewest."""

    def __init__(self, model: EnvModel, *, hosts: int = 1) -> None:
        self._model = model
        self.hosts: dict[str, SimHost] = {}
        self._left: list[SimHost] = []
        """Hosts that are gone; what is open on them still has to be closed."""
        for index in range(hosts):
            self.add(f"host-{index}")

    @property
    def open_sessions(self) -> int:
        return sum(host.sessions for host in (*self.hosts.values(), *self._left))

    def add(self, name: str) -> None:
        self.hosts[name] = SimHost(name)

    def lose(self, name: str, why: Failure) -> None:
        """A host is gone: calls to its sessions fail, now and later. Hosts that are not there are ignored."""
        host = self.hosts.pop(name, None)
        if host is not None:
            self._left.append(host)
            host.lose(why)

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> SimSession | Failure:
        if not self.hosts:
            await asyncio.sleep(0)
            return failure("env", "lost", f"no host is there to open {traj} on")
        session = SimSession(min(self.hosts.values(), key=_sessions), self._model, traj, attempt)
        done = await session.call("open", deadline_s)
        if isinstance(done, Failure):
            return done
        session.opened()
        return session


def _sessions(host: SimHost) -> int:
    return host.sessions + len(host.calls)


class SimSession:
    def __init__(self, host: SimHost, model: EnvModel, traj: TrajId, attempt: int) -> None:
        self.host = host.name
        self._on = host
        self._model = model
        self._traj = traj
        self._attempt = attempt
        self._turn = 0
        self._open = False
        self._dead: Failure | None = None

    def opened(self) -> None:
        self._open = True
        self._on.sessions += 1

    async def call(self, name: Call, deadline_s: float) -> Failure | None:
        """Spend the call's latency, or fail as the model says; a call that passed its deadline was the last."""
        now = asyncio.get_running_loop().time()
        if self._dead is not None and name != "close":
            return self._dead
        fault = self._model.fault(self._traj, self._attempt, name, self._turn)
        if fault == "dead":
            await asyncio.get_running_loop().create_future()
        latency_s = self._model.latency_s(self._traj, self._attempt, name, self._turn)
        if fault == "hang" or now + latency_s > deadline_s:
            late = failure("env", "timeout", f"{name} of {self._traj} passed its deadline")
            self._dead = await self._on.spend(deadline_s - now, late)
            return self._dead
        return await self._on.spend(latency_s, fault if isinstance(fault, Failure) else None)

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        why = await self.call("reset", deadline_s)
        return why or Observation(tokens=Tokens(n_tokens=self._observed(self._model.prompt_tokens)))

    def _observed(self, usual: int) -> int:
        own = self._model.tokens
        return usual if own is None else own(self._traj, self._attempt, self._turn)

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        why = await self.call("step", deadline_s)
        if why is not None:
            return why
        self._turn += 1
        if self._turn < self._model.turns(self._traj, self._attempt):
            return Observation(tokens=Tokens(n_tokens=self._observed(self._model.observation_tokens)), reward=0.0)
        return Observation(
            tokens=Tokens(n_tokens=0),
            terminated=True,
            reward=self._model.reward(self._traj, self._attempt),
            metrics=self._model.metrics(self._traj, self._attempt),
        )

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        return failure("env", "refused", "simulated environments are driven by reset and step", retryable=False)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._on.sessions -= 1
            await self.call("close", float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    latency_s: Callable[[Trajectory], float] = field(default=lambda trajectory: 0.0)
    score: Callable[[Trajectory], float | Failure] = field(default=lambda trajectory: 1.0)
    dead: Callable[[Trajectory], bool] = field(default=lambda trajectory: False)
    """This call is never answered, not even at its deadline."""


class SimScorer:
    def __init__(self, model: ScorerModel) -> None:
        self._model = model

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        loop = asyncio.get_running_loop()
        latency_s = self._model.latency_s(trajectory)
        if self._model.dead(trajectory):
            await loop.create_future()
        if loop.time() + latency_s > deadline_s:
            await asyncio.sleep(deadline_s - loop.time())
            return failure("scorer", "timeout", f"scoring {trajectory.id} passed its deadline")
        await asyncio.sleep(latency_s)
        return self._model.score(trajectory)
