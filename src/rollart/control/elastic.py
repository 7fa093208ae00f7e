"""Who holds which lease: starts a run's workers, starts others in place of those that are lost, releases all at the end.

Invariant: every lease that was acquired is released exactly once, however its worker ended and however the run ends. A
role that cannot be kept up ends the run with the failure of its last worker, unless others of that role go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollart.config.placement import Placement
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import RunFailed, describe, failure, times
from rollart.core.events import Recorder
from rollart.core.resources import Lease
from rollart.core.types import Failure, Role
from rollart.ports import Cluster, Trainer
from rollart.sched.failure import Restarts

RELEASE_S = 30.0
"""How long a worker may take to be cleared away; then the run goes on, or ends, all the same."""


class Worker(NamedTuple):
    """What runs on a lease."""

    port: Any
    lease: str


class Seat:
    """The trainer that there is now. Whoever holds the seat is not told when another one sits down in it."""

    __slots__ = ("lease", "port")

    def __init__(self, port: Trainer, lease: str) -> None:
        self.port = port
        self.lease = lease


class Elastic:
    def __init__(self, record: Recorder, waits: Waits, cluster: Cluster, *, start_s: float, restarts: Restarts) -> None:
        self._record = record
        self._waits = waits
        self._cluster = cluster
        self._start_s = start_s
        self.restarts = restarts
        self._leases: dict[str, Role] = {}
        self._places: dict[str, Placement] = {}
        """Lease -> where its worker was to be: another in its place comes there."""
        self._seats: dict[str, str] = {}
        """Lease -> the seat of its worker: whoever takes a lost worker's place sits on the same."""
        self._losing: set[str] = set()
        """Leases of lost workers that are about to be replaced."""
        self._seats_made = 0
        self._starting: Counter[Role] = Counter()

    async def start(self, place: Placement) -> Worker:
        """Start a worker. Raises RunFailed with the reason when it cannot be had."""
        self._seats_made += 1
        role = place.role
        started = await self._try(place, f"{role} {self._seats_made}")
        if isinstance(started, Failure):
            what = "no device for" if started.kind == "no_room" else "could not start"
            raise RunFailed(f"{what} role {role}", started)
        return started

    async def start_all(self, places: Sequence[Placement]) -> list[Worker]:
        """Start several at once."""
        # not a task group: a start that fails must leave the leases of the others known, so that they are released
        started = await asyncio.gather(*(self.start(place) for place in places), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in started if isinstance(outcome, Worker)]

    def losing(self, lease: str) -> bool:
        """Note that the worker on `lease` is lost. False: that is known already, or nothing of this run runs on it."""
        if lease not in self._leases or lease in self._losing:
            return False
        self._losing.add(lease)
        return True

    async def again(self, role: Role, lease: str, why: Failure) -> Worker | None:
        """Start another worker in place of the one on `lease`, which was lost.

        None: it was tried too often, or none is ever to be had, and others of that role go on without it. Raises RunFailed
        when there are none.
        """
        most = self.restarts.most
        given_up = f"a worker of role {role} was lost {times(most + 1)} with no step trained (failure.restarts={most})"
        seat = self._seats.get(lease, role)
        place = self._places.get(lease, Placement(role=role))
        self._starting[role] += 1
        try:
            while True:
                await self._release(lease)
                pause_s = self.restarts.lost(seat)
                if pause_s is None:
                    break
                await asyncio.sleep(pause_s)
                started = await self._try(place, seat)
                if isinstance(started, Worker):
                    return started
                lease, why = "", started
                if not started.retryable:
                    given_up = f"a worker of role {role} was lost and nobody takes its place"
                    break
        finally:
            self._starting[role] -= 1
        self._without(role, given_up, why)
        return None

    async def release_all(self) -> None:
        """Release what is held, the last first, whatever becomes of each."""
        for lease in reversed(list(self._leases)):
            try:
                await self._release(lease)
            # boundary: a world's release is its own code; the other leases must be given back, and the run's end stands
            except Exception as error:  # noqa: BLE001
                text = f"{lease} could not be released: {type(error).__name__}: {error}"
                self._record("advisory", code="release_failed", text=text)

    def _without(self, role: Role, given_up: str, why: Failure) -> None:
        left = Counter(self._leases.values())[role] + self._starting[role]
        if not left:
            raise RunFailed(f"{given_up}, and none is left", why)
        text = f"{given_up} ({describe(why)}); {left} go on without it"
        self._record("advisory", code="worker_given_up", text=text)

    async def _try(self, place: Placement, seat: str) -> Worker | Failure:
        role = place.role
        deadline = asyncio.get_running_loop().time() + self._start_s
        lease: Lease | Failure | None = None
        try:
            lease = await self._waits.on(
                self._cluster.acquire(role, place.pool, place.degrees, deadline_s=deadline),
                what=f"devices for role {role}", deadline_s=deadline,
            )  # fmt: skip
            if isinstance(lease, Failure):
                return lease
            self._leases[lease.id] = role
            self._seats[lease.id] = seat
            self._places[lease.id] = place
            port: object = await self._waits.on(
                self._cluster.start(lease), what=f"role {role} to start", deadline_s=deadline
            )
        except WaitExpired:
            port = failure("cluster", "timeout", f"role {role} did not start in {self._start_s} s")
        if isinstance(port, Failure):
            if isinstance(lease, Lease):
                await self._release(lease.id)
            return port
        assert isinstance(lease, Lease)
        return Worker(port, lease.id)

    async def _release(self, lease: str) -> None:
        """Clear a worker away."""
        if self._leases.pop(lease, None) is None:
            return
        self._seats.pop(lease, None)
        self._places.pop(lease, None)
        self._losing.discard(lease)
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        try:
            await self._waits.on(self._cluster.release(lease), what="a worker to be released", deadline_s=deadline)
        except WaitExpired as expired:
            self._record("advisory", code="release_slow", text=f"{lease}: {expired}; it is left to its fate")
