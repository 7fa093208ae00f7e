"""A simulated world: all ports on virtual time, from rates, cost models and fault functions.

The same control code runs here as on real devices; nothing in this package knows of the loops that drive it. Invariant:
each lease stands for one worker, and what happens to it concerns no other: its loss, its release, its failure to start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from rollart.control.weights import VersionBook
from rollart.core.errors import failure
from rollart.core.events import Sink
from rollart.core.resources import Change, Degrees, EngineInfo, Lease
from rollart.core.snapshot import Resumed
from rollart.core.types import Failure, Role, TaskSpec, Trajectory
from rollart.ports import Checkpoints, Port, Scorer, World
from rollart.sim.disk import SimDisk
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.envs import EnvModel, ScorerModel, SimEnv, SimScorer
from rollart.sim.slots import Slots
from rollart.sim.trainer import SimTrainer, TrainerModel

__all__ = ["SimCluster", "SimTrainer", "TrainerModel", "world"]

StartFault = Failure | Literal["hang"]
"""A worker that does not start, and says so or does not."""


Takes = Callable[[Role, str, Degrees], Mapping[str, Sequence[int]]]
"""(role, pool, degrees) -> how many devices of which pools each part of one worker takes."""

KV_TOKENS = 1 << 20
"""What an engine says of its cache where none is modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An engine on the devices of its lease."""

    model: EngineModel
    kv_tokens: int


class Fate(Protocol):
    """What becomes of workers by themselves, in a world whose machines fail."""

    async def up(self, lease: Lease, nth: int) -> Failure | None:
        """Wait until what is started on `lease`, the `nth` of its role, is up; or why it never will be."""
        ...

    def started(self, lease: Lease, name: str, lose: Callable[[str], None]) -> None:
        """A worker lives; `lose` ends it, for the reason that it is given."""
        ...

    def ended(self, lease: str) -> None: ...


@dataclass(kw_only=True)
class SimCluster:
    """Leases without end or of the devices of `slots`, and whatever a scenario does to what runs on them."""

    engine: EngineModel = field(default_factory=EngineModel)
    """Of every engine, where `engine_of` is not set."""
    engine_of: Callable[[Lease], Fitted] | None = None
    """The engine of a lease, which knows its pool, degrees and devices."""
    slots: Slots | None = None
    """None: as many devices as are asked for."""
    takes: Takes = field(default=lambda role, pool, degrees: {})
    scoring: Callable[[], Scorer] | None = None
    """Makes the scorer; None: one of `scorer`."""
    env: EnvModel = field(default_factory=EnvModel)
    trainer: TrainerModel = field(default_factory=TrainerModel)
    scorer: ScorerModel = field(default_factory=ScorerModel)
    start_s: Callable[[Role, int], float] = field(default=lambda role, nth: 0.0)
    """(role, starts of it before) -> how long this one takes."""
    start_fault: Callable[[Role, int], StartFault | None] = field(default=lambda role, nth: None)
    """(role, starts of it before) -> why this one does not start."""
    fate: Fate | None = None
    """None: nothing happens but what a scenario does."""
    first_engine: int = 0
    """Number of the first engine: ids are never used again, also not by a later incarnation of the run."""
    first_host: int = 0
    disk: SimDisk = field(default_factory=SimDisk)
    engines: list[SimEngine] = field(default_factory=list)
    trainers: list[SimTrainer] = field(default_factory=list)
    envs: list[SimEnv] = field(default_factory=list)
    """The one environment port, once its first host has started."""
    released: list[str] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)
    """Host -> its lease, in the order in which they started, those gone as well."""
    _leases: int = 0
    _starts: Counter[Role] = field(default_factory=Counter)
    _stops: dict[str, Callable[[Failure], None]] = field(default_factory=dict)
    _leases_of: dict[str, str] = field(default_factory=dict)
    _changes: asyncio.Queue[Change] = field(default_factory=asyncio.Queue)

    @property
    def held(self) -> list[str]:
        """Leases that were not given back."""
        return [lease for lease in (f"lease-{n + 1}" for n in range(self._leases)) if lease not in self.released]

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        lease = f"lease-{self._leases + 1}"
        devices: tuple[str, ...] = ("virtual",)
        if self.slots is not None:
            taken = self.slots.take(lease, self.takes(role, pool, degrees))
            if isinstance(taken, Failure):
                return taken
            devices = taken or devices
        self._leases += 1
        return Lease(id=lease, role=role, pool=pool, devices=devices, degrees=degrees)

    async def release(self, lease: str) -> None:
        """What runs on it ends; nobody is told, the holder knows."""
        if lease not in self.released:
            self.released.append(lease)
            if self.slots is not None:
                self.slots.give_back(lease)
        if self.fate is not None:
            self.fate.ended(lease)
        stop = self._stops.pop(lease, None)
        if stop is not None:
            stop(failure("cluster", "lost", f"{lease} was given back"))

    async def start(self, lease: Lease) -> Port | Failure:
        nth = self._starts[lease.role]
        self._starts[lease.role] += 1
        fault = self.start_fault(lease.role, nth)
        seconds = self.start_s(lease.role, nth)
        if fault == "hang":
            await asyncio.get_running_loop().create_future()
        if seconds:
            await asyncio.sleep(seconds)
        if isinstance(fault, Failure):
            return fault
        never = None if self.fate is None else await self.fate.up(lease, nth)
        if never is not None:
            return never
        if lease.role == "train":
            return self._trainer(lease)
        if lease.role == "env":
            return self._host(lease)
        if lease.role == "score":
            return SimScorer(self.scorer) if self.scoring is None else self.scoring()
        return self._engine(lease)

    def _trainer(self, lease: Lease) -> SimTrainer:
        index = len(self.trainers)
        trainer = SimTrainer(self.trainer, name=f"trainer-{index}", disk=self.disk)
        self.trainers.append(trainer)
        trainer.die = lambda detail: self.lose_trainer(detail, index=index)
        self._stops[lease.id] = trainer.lose
        self._leases_of[trainer.name] = lease.id
        if self.fate is not None:
            self.fate.started(lease, trainer.name, trainer.die)
        return trainer

    def _host(self, lease: Lease) -> SimEnv:
        """One more host of the one environment port."""
        if not self.envs:
            self.envs.append(SimEnv(self.env, hosts=0))
        env, name = self.envs[0], f"host-{self.first_host + len(self.hosts)}"
        self.hosts[name] = lease.id
        env.add(name)
        self._stops[lease.id] = lambda why: env.lose(name, why)
        self._changes.put_nowait(Change(kind="joined", subject=name, role="env", lease=lease.id))
        if self.fate is not None:
            self.fate.started(lease, name, partial(self.lose_host, name))
        return env

    def _engine(self, lease: Lease) -> SimEngine:
        fitted = Fitted(model=self.engine, kv_tokens=KV_TOKENS) if self.engine_of is None else self.engine_of(lease)
        info = EngineInfo(
            id=f"engine-{self.first_engine + len(self.engines)}",
            lease=lease.id,
            pool=lease.pool,
            role=lease.role,
            degrees=lease.degrees,
            kv_tokens=fitted.kv_tokens,
            fingerprint="bitwise",
            version=-1,
        )
        engine = SimEngine(info, fitted.model)
        self._stops[lease.id] = engine.lose
        if self.fate is not None:
            self.fate.started(lease, info.id, partial(self.lose_engine, len(self.engines)))
        self.engines.append(engine)
        return engine

    async def changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self._changes.get()

    # --- what a scenario does ----------------------------------------------------------------------------------------

    def lose_engine(self, index: int, detail: str = "process died", *, told_after_s: float = 0.0) -> None:
        """Its requests fail now; that it is lost is said some time later."""
        info = self.engines[index].info
        why = failure("engine", "lost", f"{info.id}: {detail}")
        self.engines[index].lose(why)
        self._say(Change(kind="lost", subject=info.id, role=info.role, lease=info.lease, failure=why), told_after_s)

    def lose_trainer(
        self, detail: str = "process died", *, index: int | None = None, told_after_s: float = 0.0
    ) -> None:
        """The newest trainer, or that of `index`: calls under way and later ones raise TrainerLost."""
        trainer = self.trainers[-1 if index is None else index]
        why = failure("trainer", "lost", detail)
        lease = self._leases_of[trainer.name]
        self._say(Change(kind="lost", subject=trainer.name, role="train", lease=lease, failure=why), told_after_s)
        trainer.lose(why)

    def lose_host(self, host: int | str, detail: str = "process died", *, told_after_s: float = 0.0) -> None:
        """A host by its name or by its place among all that have started: calls to its sessions fail now."""
        name = host if isinstance(host, str) else list(self.hosts)[host]
        why = failure("env", "lost", detail)
        self.envs[0].lose(name, why)
        left = len(self.envs[0].hosts)
        lost = Change(kind="lost", subject=name, role="env", lease=self.hosts[name], failure=why, facts={"left": left})
        self._say(lost, told_after_s)

    def _say(self, change: Change, after_s: float) -> None:
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self._changes.put_nowait, change)
        else:
            self._changes.put_nowait(change)


def world(
    tasks: tuple[TaskSpec, ...],
    cluster: SimCluster,
    *,
    sinks: tuple[Sink, ...] = (),
    kept: list[Trajectory] | None = None,
    keep: Callable[[Trajectory], None] = lambda trajectory: None,
    checkpoints: Checkpoints | None = None,
    resumed: Resumed | None = None,
) -> World:
    """A world around a simulated cluster. Terminal trajectories go to `kept`, or else to `keep`."""
    return World(
        name="virtual",
        cluster=cluster,
        store=VersionBook(),
        tasks=tasks,
        sinks=sinks,
        keep=kept.append if kept is not None else keep,
        checkpoints=checkpoints,
        resumed=resumed,
    )
