"""Simulated environments and scorers: latencies, rewards and faults by function of the trajectory, on virtual time."""

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
    metrics: Callable[[TrajId, int], dict[str, float]] = field(default=lambda traj, attempt: {})


class SimEnv:
    def __init__(self, model: EnvModel, host: str = "host-0") -> None:
        self._model = model
        self.host = host
        self.open_sessions = 0
        self.lost: Failure | None = None

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> SimSession | Failure:
        session = SimSession(self, self._model, traj, attempt)
        done = await session.call("open", deadline_s)
        if isinstance(done, Failure):
            return done
        self.open_sessions += 1
        return session


class SimSession:
    def __init__(self, env: SimEnv, model: EnvModel, traj: TrajId, attempt: int) -> None:
        self.host = env.host
        self._env = env
        self._model = model
        self._traj = traj
        self._attempt = attempt
        self._turn = 0
        self._closed = False
        self._dead: Failure | None = None

    async def call(self, name: Call, deadline_s: float) -> Failure | None:
        """Spend the call's latency, or fail as the model says; a call that passed its deadline was the last."""
        loop = asyncio.get_running_loop()
        if self._dead is not None and name != "close":
            return self._dead
        fault = self._model.fault(self._traj, self._attempt, name, self._turn)
        if fault == "dead":
            await loop.create_future()
        latency = self._model.latency_s(self._traj, self._attempt, name, self._turn)
        if fault == "hang" or loop.time() + latency > deadline_s:
            await asyncio.sleep(deadline_s - loop.time())
            self._dead = failure("env", "timeout", f"{name} of {self._traj} passed its deadline")
            return self._dead
        await asyncio.sleep(latency)
        return fault if isinstance(fault, Failure) else self._env.lost

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        why = await self.call("reset", deadline_s)
        return why or Observation(tokens=Tokens(n_tokens=self._model.prompt_tokens))

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        why = await self.call("step", deadline_s)
        if why is not None:
            return why
        self._turn += 1
        if self._turn < self._model.turns(self._traj, self._attempt):
            return Observation(tokens=Tokens(n_tokens=self._model.observation_tokens), reward=0.0)
        return Observation(
            tokens=Tokens(n_tokens=0),
            terminated=True,
            reward=self._model.reward(self._traj, self._attempt),
            metrics=self._model.metrics(self._traj, self._attempt),
        )

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        return failure("env", "refused", "simulated environments are driven by reset and step", retryable=False)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._env.open_sessions -= 1
            await self.call("close", float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    latency_s: Callable[[Trajectory], float] = field(default=lambda trajectory: 0.0)
    score: Callable[[Trajectory], float | Failure] = field(default=lambda trajectory: 1.0)


class SimScorer:
    def __init__(self, model: ScorerModel) -> None:
        self._model = model

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        loop = asyncio.get_running_loop()
        latency_s = self._model.latency_s(trajectory)
        if loop.time() + latency_s > deadline_s:
            await asyncio.sleep(deadline_s - loop.time())
            return failure("scorer", "timeout", f"scoring {trajectory.id} passed its deadline")
        await asyncio.sleep(latency_s)
        return self._model.score(trajectory)
