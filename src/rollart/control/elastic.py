"""Who holds which lease: starts a run's workers, starts others in place of those that are lost, releases all at the end.

Invariant: every lease that was acquired is released exactly once, however its worker ended and however the run ends. A
role that cannot be kept up ends the run with the failure of its last worker, unless others of that role go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple

from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import RunFailed, failure
from rollart.core.events import Recorder
from rollart.core.resources import DEFAULT_DEGREES, Lease
from rollart.core.types import Failure, Role
from rollart.ports import Cluster, Trainer
from rollart.sched.failure import Restarts

POOL = "default"
"""The one pool of worlds that have no others."""
RELEASE_S = 30.0
"""How long a lost worker may take to be cleared away before another is started all the same."""


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

    async def start(self, role: Role) -> Worker:
        """Start a worker. Raises RunFailed with the reason when it cannot be had."""
        started = await self._try(role)
        if isinstance(started, Failure):
            what = "no device for" if started.kind == "no_room" else "could not start"
            raise RunFailed(f"{what} role {role}", started)
        return started

    async def start_all(self, roles: list[Role]) -> list[Worker]:
        """Start several at once."""
        # not a task group: a start that fails must leave the leases of the others known, so that they are released
        started = await asyncio.gather(*(self.start(role) for role in roles), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in started if isinstance(outcome, Worker)]

    async def again(self, role: Role, lease: str, why: Failure) -> Worker | None:
        """Start another worker in place of the one on `lease`, which was lost.

        None: it was tried too often, and others of that role go on without it. Raises RunFailed when there are none.
        """
        while True:
            await self._release(lease)
            pause_s = self.restarts.lost(role)
            if pause_s is None:
                self._without(role, why)
                return None
            await asyncio.sleep(pause_s)
            started = await self._try(role)
            if isinstance(started, Worker):
                return started
            lease, why = "", started

    async def release_all(self) -> None:
        for lease in reversed(list(self._leases)):
            del self._leases[lease]
            await self._cluster.release(lease)

    def _without(self, role: Role, why: Failure) -> None:
        left = Counter(self._leases.values())[role]
        text = f"role {role} was lost {self.restarts.most + 1} times with no step trained (failure.restarts="
        if not left:
            raise RunFailed(f"{text}{self.restarts.most}), and none is left", why)
        self._record("advisory", code="worker_given_up", text=f"{text}{self.restarts.most}); {left} go on without it")

    async def _try(self, role: Role) -> Worker | Failure:
        deadline = asyncio.get_running_loop().time() + self._start_s
        lease: Lease | Failure | None = None
        try:
            lease = await self._waits.on(
                self._cluster.acquire(role, POOL, DEFAULT_DEGREES, deadline_s=deadline),
                what=f"devices for role {role}", deadline_s=deadline,
            )  # fmt: skip
            if isinstance(lease, Failure):
                return lease
            self._leases[lease.id] = role
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
        """Clear a lost worker away."""
        if self._leases.pop(lease, None) is None:
            return
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        try:
            await self._waits.on(self._cluster.release(lease), what="a lost worker to be released", deadline_s=deadline)
        except WaitExpired as expired:
            self._record("advisory", code="release_slow", text=f"{lease}: {expired}; it is left to its fate")
