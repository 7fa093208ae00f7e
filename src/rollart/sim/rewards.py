"""Reward services on virtual time: without limit, on devices of their own, or as instances that come and go with the load.

Owns who is scored when: calls wait in one queue, first come first served, for a place; a place serves one call at a time.
Invariants: never more calls in service than places; a call answers once, at its deadline at the latest, and one that is given
up frees its place in that instant; scores and service times come from the model, so they do not depend on who waits. A call
costs O(1) and at most two events; instances that idle out cost none.

Source: RollArt (arXiv 2512.22560), reward offload: a pool with a limit, cold starts and a time that instances are kept warm; a
call that finds no warm instance is bound to the one that it starts, as function services do it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rollart.config.virtual import EnvRewards, LocalRewards, RewardConfig, ServerlessRewards
from rollart.core.errors import ConfigError, failure
from rollart.core.types import Failure, Trajectory
from rollart.sim.envs import ScorerModel, Tries
from rollart.sim.fault_draws import Outages
from rollart.sim.lines import Line
from rollart.sim.workload import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFigures:
    """What a service has done up to an instant."""

    calls: int
    timeouts: int
    """Calls that were given up at their deadline, waiting or in service."""
    busy_s: float
    """Of scoring, all places together; transport and cold starts are not in it."""
    queue_s: float
    """That calls waited for a place, in all."""
    cold_starts: int
    cold_s: float
    """That calls waited for instances to come up."""
    instance_s: float
    """Places times the seconds that they were there: what is paid for. 0 for a service without limit."""
    cost: float
    """Of what is paid for by use, relative to an H20's second; a local service's devices are counted with their pool."""

    @property
    def utilisation(self) -> float:
        """Share of the places' time in which they scored; 0 for a service without limit."""
        return self.busy_s / self.instance_s if self.instance_s else 0.0


class _Places(Protocol):
    def take(self, now_s: float) -> float | None:
        """Take a place: the instant from which it serves; None when none is to be had."""
        ...

    def give(self, serves_s: float) -> None:
        """A place is free; one that was still coming up serves from then on."""
        ...

    @property
    def cold_starts(self) -> int: ...

    def there_s(self, now_s: float) -> float:
        """Places times seconds so far."""
        ...


class _Fixed:
    """A fixed number of places, there from the start."""

    cold_starts = 0

    def __init__(self, places: float) -> None:
        self._places = places
        self._free = places

    def take(self, now_s: float) -> float | None:
        if self._free < 1:
            return None
        self._free -= 1
        return now_s

    def give(self, serves_s: float) -> None:
        self._free += 1

    def there_s(self, now_s: float) -> float:
        return self._places * now_s if math.isfinite(self._places) else 0.0


class _Elastic:
    """Instances that come up for calls and go when they idle; the last used is taken first, so that the others can go."""

    def __init__(self, most: int, cold_s: float, keep_s: float) -> None:
        self._most = most
        self._cold_s = cold_s
        self._keep_s = keep_s
        self._up = 0
        self._idle_since: deque[float] = deque()
        """Rising; later than now for one that comes up though its call was given up."""
        self._gone_s = 0.0
        """Of instances that are gone, less the starts of those that are up."""
        self.cold_starts = 0

    def take(self, now_s: float) -> float | None:
        self._expire(now_s)
        if self._idle_since:
            return max(now_s, self._idle_since.pop())
        if self._up >= self._most:
            return None
        self._up += 1
        self._gone_s -= now_s
        self.cold_starts += 1
        return now_s + self._cold_s

    def give(self, serves_s: float) -> None:
        place = len(self._idle_since)
        while place and self._idle_since[place - 1] > serves_s:
            place -= 1
        self._idle_since.insert(place, serves_s)

    def there_s(self, now_s: float) -> float:
        self._expire(now_s)
        return self._gone_s + self._up * now_s

    def _expire(self, now_s: float) -> None:
        while self._idle_since and self._idle_since[0] + self._keep_s < now_s:
            self._gone_s += self._idle_since.popleft() + self._keep_s
            self._up -= 1


class RewardService:
    """Implements the `Scorer` port. `devices`: those of pools with role score, for a local service.

    A scorer that the model calls dead holds its place until its caller gives it up. In an outage every call fails at once.
    """

    def __init__(
        self, config: RewardConfig, model: ScorerModel, *, devices: int = 0, outages: Outages | None = None
    ) -> None:
        """Raises ConfigError for a local service without devices."""
        self._config = config
        self._model = model
        self._tries = Tries(model)
        self._outages = outages
        self._places = _places(config, devices)
        self._waiting: Line[float] = Line(self._release)
        """Given: the instant from which a place serves."""
        self._transport_s = config.transport_s if isinstance(config, ServerlessRewards) else 0.0
        self._calls = self._timeouts = 0
        self._busy_s = self._queue_s = self._cold_wait_s = 0.0

    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure:
        self._calls += 1
        if self._away_from() <= asyncio.get_running_loop().time():
            await asyncio.sleep(0)
            return _away(trajectory)
        serves_s = await self._place(deadline_s)
        if serves_s is None:
            self._timeouts += 1
            return failure("scorer", "timeout", f"{trajectory.id} was not scored: its deadline passed in the queue")
        loop = asyncio.get_running_loop()
        begins_s = serves_s + self._transport_s
        away_s = self._away_from()
        try:
            if self._model.dead(trajectory):
                await loop.create_future()
            ends_s = begins_s + self._tries.latency_s(trajectory)
            await asyncio.sleep(min(ends_s, deadline_s, away_s) - loop.time())
        finally:
            now = loop.time()
            self._busy_s += max(0.0, now - begins_s)
            self._release(max(now, serves_s))
        if away_s <= min(ends_s, deadline_s):
            return _away(trajectory)
        if ends_s > deadline_s:
            self._timeouts += 1
            return failure("scorer", "timeout", f"scoring {trajectory.id} passed its deadline")
        return self._tries.scored(trajectory)

    def _away_from(self) -> float:
        """When the outage begins that is under way or comes next."""
        return math.inf if self._outages is None else self._outages.next(asyncio.get_running_loop().time()).begin_s

    async def _place(self, deadline_s: float) -> float | None:
        """A place for one call: from when it serves, or None at the deadline."""
        loop = asyncio.get_running_loop()
        came_s = loop.time()
        serves_s = self._places.take(came_s)
        if serves_s is None:
            try:
                serves_s = await self._waiting.wait(deadline_s)
            finally:
                self._queue_s += loop.time() - came_s
        if serves_s is None:
            return None
        self._cold_wait_s += max(0.0, serves_s - loop.time())
        return max(serves_s, loop.time())

    def _release(self, serves_s: float) -> None:
        """A place that serves from then on goes to the first that waits, or is free."""
        if not self._waiting.give(serves_s):
            self._places.give(serves_s)

    def figures(self, now_s: float) -> RewardFigures:
        """Up to `now_s`, loop time; places of a local service are there from 0 on."""
        there_s = self._places.there_s(now_s)
        rate = self._config.cost_per_s if isinstance(self._config, ServerlessRewards) else 0.0
        return RewardFigures(
            calls=self._calls, timeouts=self._timeouts, busy_s=self._busy_s, queue_s=self._queue_s,
            cold_starts=self._places.cold_starts, cold_s=self._cold_wait_s, instance_s=there_s, cost=rate * self._busy_s,
        )  # fmt: skip


def _away(trajectory: Trajectory) -> Failure:
    return failure("scorer", "lost", f"the reward service is away, {trajectory.id} is not scored")


def _places(config: RewardConfig, devices: int) -> _Places:
    match config:
        case EnvRewards():
            return _Fixed(math.inf)
        case LocalRewards():
            if devices < 1:
                raise ConfigError(
                    f"rewards.kind=local has {devices} devices; give a pool of cluster.pools the role score, or use "
                    "rewards.kind=serverless"
                )
            return _Fixed(devices * config.concurrency)
        case ServerlessRewards():
            return _Elastic(config.max_concurrency, config.cold_start_s, config.keep_warm_s)


def scoring(draws: Mapping[str, Draws]) -> ScorerModel:
    """Service times and rewards of tasks, as their workloads draw them."""
    return ScorerModel(
        latency_s=lambda trajectory: draws[trajectory.instance.task].score_s(trajectory.id, trajectory.attempt),
        again_s=lambda trajectory, nth: draws[trajectory.instance.task].score_s(trajectory.id, trajectory.attempt, nth),
        score=lambda trajectory: draws[trajectory.instance.task].reward(trajectory.id, trajectory.attempt),
    )
