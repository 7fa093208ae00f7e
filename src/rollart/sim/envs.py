"""Simulated environments and scorers: latencies, rewards and faults by function of the trajectory, on virtual time.

Invariant: a call to an environment answers once: in time, at its deadline, or in the instant in which its host is lost. What
a call takes on an idle world is the model's; images pulled at the same time only make it longer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import failure
from rollart.core.types import Failure, Observation, TaskInstance, Tokens, Trajectory, TrajId, TurnFn
from rollart.sim.lines import Line
from rollart.sim.shares import FairShare
from rollart.sim.storms import Links, Pull

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
    pull: Callable[[TrajId, int], Pull | None] | None = None
    """The image that has to be there first, over a link that all hosts share; None: it is there."""
    sessions_per_host: int = 0
    """Further ones wait until one is closed, first come first served; 0: no limit."""


class SimHost:
    """One env host: its sessions live and die with it."""

    __slots__ = ("calls", "lost", "name", "room", "sessions")

    def __init__(self, name: str, *, room: float = math.inf) -> None:
        self.name = name
        self.sessions = 0
        self.room = room
        """Sessions that it takes beside those that are open or being opened."""
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

    async def draw(self, share: FairShare, amount: float, deadline_s: float, late: Failure) -> Failure | None:
        """So much of something shared; `late` at the deadline, or the host's own end before it."""
        if self.lost is not None:
            return self.lost
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Failure | None] = loop.create_future()
        self.calls[answer] = None
        job = share.start(amount, lambda: _answer(answer, None))
        timer = loop.call_at(deadline_s, _answer, answer, late) if math.isfinite(deadline_s) else None
        try:
            return await answer
        finally:
            share.stop(job)
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
        self.links = Links()
        self._line: Line[SimHost] = Line(self.leave)
        for index in range(hosts):
            self.add(f"host-{index}")

    @property
    def open_sessions(self) -> int:
        return sum(host.sessions for host in (*self.hosts.values(), *self._left))

    def add(self, name: str) -> None:
        host = SimHost(name, room=self._model.sessions_per_host or math.inf)
        self.hosts[name] = host
        while host.room and self._line.give(host):
            host.room -= 1

    def leave(self, host: SimHost) -> None:
        """A session's place on a host is free; the first that waits takes it."""
        if host.lost is not None or not self._line.give(host):
            host.room += 1

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
        host = min(self.hosts.values(), key=_sessions)
        if host.room:
            host.room -= 1
        else:
            given = await self._line.wait(deadline_s)
            if given is None:
                return failure("env", "timeout", f"no host had room for {traj} before the deadline of its set-up")
            host = given
        session = SimSession(self, host, self._model, traj, attempt)
        try:
            done = await session.open(deadline_s)
        finally:
            if not session.is_open:
                self.leave(host)
        return done or session


def _sessions(host: SimHost) -> tuple[bool, int]:
    """Hosts with room first, of them the one with the least to do."""
    return not host.room, host.sessions + len(host.calls)


class SimSession:
    def __init__(self, env: SimEnv, host: SimHost, model: EnvModel, traj: TrajId, attempt: int) -> None:
        self.host = host.name
        self._env = env
        self._on = host
        self._model = model
        self._traj = traj
        self._attempt = attempt
        self._turn = 0
        self.is_open = False
        self._dead: Failure | None = None

    async def open(self, deadline_s: float) -> Failure | None:
        """The image first, if it has to be pulled, then whatever the model says of setting up."""
        pull = None if self._model.pull is None else self._model.pull(self._traj, self._attempt)
        if pull is not None:
            late = failure("env", "timeout", f"the image of {self._traj} was not there before its deadline")
            link = self._env.links.share(pull.link)
            why = await self._on.draw(link, pull.n_bytes, deadline_s, late)
            if why is not None:
                return why
        why = await self.call("open", deadline_s)
        if why is None:
            self.is_open = True
            self._on.sessions += 1
        return why

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
        outcome = fault if isinstance(fault, Failure) else None
        return await self._on.spend(latency_s, outcome)

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
        if self.is_open:
            self.is_open = False
            self._on.sessions -= 1
            self._env.leave(self._on)
            await self.call("close", float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    latency_s: Callable[[Trajectory], float] = field(default=lambda trajectory: 0.0)
    again_s: Callable[[Trajectory, int], float] | None = None
    """(trajectory, tries before, at least 1) -> the same of a further try; None: as long as the first."""
    score: Callable[[Trajectory], float | Failure] = field(default=lambda trajectory: 1.0)
    dead: Callable[[Trajectory], bool] = field(default=lambda trajectory: False)
    """This call is never answered, not even at its deadline."""


class Tries:
    """How long each try of a call takes: a call that comes again is another one, of the same trajectory."""

    def __init__(self, model: ScorerModel) -> None:
        self._model = model
        self._before: dict[tuple[TrajId, int], int] = {}
        """Attempts that were not scored so far -> how often that was tried."""

    def latency_s(self, trajectory: Trajectory) -> float:
        """Of the try that begins now."""
        key = trajectory.id, trajectory.attempt
        nth = self._before.get(key, 0)
        self._before[key] = nth + 1
        again_s = self._model.again_s
        return again_s(trajectory, nth) if nth and again_s is not None else self._model.latency_s(trajectory)

    def scored(self, trajectory: Trajectory) -> float | Failure:
        """The answer of a try that came to its end."""
        reward = self._model.score(trajectory)
        if not isinstance(reward, Failure):
            self._before.pop((trajectory.id, trajectory.attempt), None)
        return reward


class SimScorer:
    def __init__(self, model: ScorerModel) -> None:
        self._model = model
        self._tries = Tries(model)

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        loop = asyncio.get_running_loop()
        latency_s = self._tries.latency_s(trajectory)
        if self._model.dead(trajectory):
            await loop.create_future()
        if loop.time() + latency_s > deadline_s:
            await asyncio.sleep(deadline_s - loop.time())
            return failure("scorer", "timeout", f"scoring {trajectory.id} passed its deadline")
        await asyncio.sleep(latency_s)
        return self._tries.scored(trajectory)
