"""The environment and scorer ports over env host actors: what control calls `Env` and `Scorer` on real machines.

Hosts come and go while it is used. Invariant: every call is answered, by its host or, as `env lost`, by that host's end;
while there is no host, `open` and `score` fail at once in a way that may be tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollart.control.exchange import Exchange
from rollart.core.errors import failure
from rollart.core.seeds import seed_of
from rollart.core.types import Failure, Observation, TaskInstance, Tokens, Trajectory, TrajId, TurnFn
from rollart.runtime.envs.host import CLOSE_S, Call, Close, Done, Open, Reset, Score, Step
from rollart.runtime.envs.session import evidence_text
from rollart.runtime.payload import TokenPayload
from rollart.runtime.wire import Wire

Result = Observation | float | Failure | None
LostFn = Callable[[str, Failure, int], None]
"""Host, why, hosts left."""


class RemoteHost:
    """One host: sends calls, hands back their results."""

    def __init__(
        self, name: str, actor: Any, on_lost: Callable[[str, Failure], None], *, sockets: Path | None = None
    ) -> None:
        self.name = name
        self.actor = actor
        self.sessions = 0
        self._on_lost = on_lost
        self._exchange: Exchange[tuple[str, int], Result] = Exchange(lambda key, result: None)
        self.wire: Wire[Call, list[Done]] = Wire(
            actor, where="env", on_poll=self._polled, on_lost=self._failed, sockets=sockets
        )

    async def ask(self, call: Call) -> Result:
        if self.wire.lost is not None:
            return _gone(self.wire.lost)
        self.wire.send(call)
        return await self._exchange.ask((call.session, call.seq))

    def end(self) -> None:
        """The actor is being ended: who still waits for it is told. A `Close` that has not been sent yet never is: the host
        closes every session itself before it ends (`EnvHost.close`)."""
        why = failure("env", "lost", f"{self.name} was released")
        self.wire.end(why)
        self._fail_waiting(why)

    def _polled(self, done: list[Done]) -> None:
        self._exchange.answer([((one.session, one.seq), one.result) for one in done])

    def _failed(self, why: Failure) -> None:
        self._fail_waiting(why)
        self._on_lost(self.name, why)

    def _fail_waiting(self, why: Failure) -> None:
        self._exchange.answer([(key, _gone(why)) for key in self._exchange.waiting])


class RemoteEnv:
    """Implements `ports.Env` and `ports.Scorer` over the hosts that are there; a session goes to the one with the fewest.

    `sockets`: see `Wire`.
    """

    def __init__(self, on_lost: LostFn, *, seed: int, sockets: Path | None = None) -> None:
        self._hosts: list[RemoteHost] = []
        self._on_lost = on_lost
        self._seed = seed
        self._sockets = sockets
        self._scored = 0

    def add(self, name: str, actor: Any) -> None:
        """A host has started; in the running loop."""
        host = RemoteHost(name, actor, self._lost, sockets=self._sockets)
        self._hosts.append(host)
        host.wire.open()

    @property
    def traffic(self) -> tuple[int, int]:
        """Batches that were sent to the hosts that are there, and answers of theirs that came."""
        pairs = [host.wire.traffic for host in self._hosts]
        return sum(sent for sent, _ in pairs), sum(polls for _, polls in pairs)

    def drop(self, name: str) -> None:
        """A host is being ended; its sessions answer `env lost`. Hosts that are not there are ignored."""
        for host in self._hosts:
            if host.name == name:
                host.end()
        self._hosts = [host for host in self._hosts if host.name != name]

    def _lost(self, name: str, why: Failure) -> None:
        self._hosts = [host for host in self._hosts if host.name != name]
        self._on_lost(name, why, len(self._hosts))

    def _least(self) -> RemoteHost | Failure:
        if not self._hosts:
            return failure("env", "lost", "no environment host is there")
        return min(self._hosts, key=lambda host: host.sessions)

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> RemoteSession | Failure:
        host = self._least()
        if isinstance(host, Failure):
            return host
        chance = seed_of(self._seed, "chance", traj, attempt)
        session = RemoteSession(host, f"{traj}#{attempt}", instance.seed, chance)
        host.sessions += 1
        try:
            why = await host.ask(Open(session=session.id, seq=0, budget_s=_left(deadline_s), task=instance.task))
        except asyncio.CancelledError:
            # nobody holds this session: its slot would stay taken for ever
            await session.close()
            raise
        if isinstance(why, Failure):
            await session.close()
            return why
        return session

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        host = self._least()
        if isinstance(host, Failure):
            return _of_scorer(host)
        self._scored += 1
        text = evidence_text(trajectory.evidence)
        call = Score(
            session=f"score:{trajectory.id}#{trajectory.attempt}", seq=self._scored, budget_s=_left(deadline_s),
            task=trajectory.instance.task, text=text, metrics=trajectory.metrics,
        )  # fmt: skip
        result = await host.ask(call)
        if isinstance(result, Failure):
            return _of_scorer(result)
        if isinstance(result, float):
            return result
        return failure("scorer", "raised", f"a score of type {type(result).__name__} came back; a score is a float")


class RemoteSession:
    """Implements `ports.Session`."""

    def __init__(self, host: RemoteHost, name: str, seed: int, chance_seed: int) -> None:
        self.host = host.name
        self.id = name
        self._host = host
        self._seed = seed
        self._chance_seed = chance_seed
        self._seq = 0
        self._closed = False

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        call = Reset(
            session=self.id,
            seq=self._next(),
            budget_s=_left(deadline_s),
            seed=self._seed,
            chance_seed=self._chance_seed,
        )
        return _observation(await self._host.ask(call))

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        ids = [piece.payload.ids for piece in action if isinstance(piece.payload, TokenPayload)]
        call = Step(
            session=self.id, seq=self._next(), budget_s=_left(deadline_s),
            ids=np.concatenate(ids) if len(ids) != 1 else ids[0],
        )  # fmt: skip
        return _observation(await self._host.ask(call))

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        return failure("env", "refused", "text environments are driven by reset and step", retryable=False)

    async def close(self) -> None:
        """Tell the host; nobody waits, the host closes within its own budget."""
        if not self._closed:
            self._closed = True
            self._host.sessions -= 1
            self._host.wire.send(Close(session=self.id, seq=self._next(), budget_s=CLOSE_S))


def _gone(why: Failure) -> Failure:
    """However a host was lost, its sessions went with it."""
    return why if why.kind == "lost" else failure("env", "lost", f"the host failed: {why.detail}")


def _left(deadline_s: float) -> float:
    return max(0.0, deadline_s - asyncio.get_running_loop().time())


def _of_scorer(why: Failure) -> Failure:
    """A host that is lost takes its scorers along: what it was asked to score is unscored, its environment did not fail."""
    return why if why.where == "scorer" else failure("scorer", "lost", why.detail, retryable=why.retryable)


def _observation(result: Result) -> Observation | Failure:
    if isinstance(result, Observation | Failure):
        return result
    return failure("env", "raised", f"a {type(result).__name__} came back from the host; a call answers an observation")
