"""A simulated world: all ports on virtual time, from a few rates and fault functions.

The same control code runs here as on real devices; nothing in this package knows of the loops that drive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.control.weights import VersionBook
from rollart.core.errors import failure
from rollart.core.events import Sink
from rollart.core.resources import Change, Degrees, EngineInfo, Lease
from rollart.core.types import Failure, Fingerprint, Manifest, Role, Sample, TaskSpec, Trajectory, Version
from rollart.ports import Port, World
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.envs import EnvModel, ScorerModel, SimEnv, SimScorer

WEIGHT_BYTES = 1 << 20
"""Size of the pretended weights; only reports show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """Seconds of one call each."""

    accumulate_s: float = 0.0
    finish_s: float = 0.0
    publish_s: float = 0.0
    changes_weights: bool = True


class SimTrainer:
    """Trains nothing and takes its time. Keeps what it was given, for whoever looks."""

    def __init__(self, model: TrainerModel) -> None:
        self._model = model
        self.batches: list[list[Sample]] = []
        self._open: list[Sample] = []
        self._moves = 0

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        self._open = []

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        await asyncio.sleep(self._model.accumulate_s)
        self._open.extend(samples)
        return {}

    async def finish(self) -> Mapping[str, float]:
        await asyncio.sleep(self._model.finish_s)
        self.batches.append(self._open)
        self._moves += self._model.changes_weights
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-3, "weights_changed": float(self._model.changes_weights)}

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        return None

    async def publish(self, version: Version) -> Manifest:
        await asyncio.sleep(self._model.publish_s)
        return Manifest(
            version=version,
            shards={"weights/0/0-1/float32": WEIGHT_BYTES},
            buckets=1,
            fingerprint=Fingerprint(digest=f"weights-{self._moves}"),
        )

    async def resize(self, leases: Sequence[str]) -> None:
        """Ranks are not modelled."""

    async def checkpoint(self, path: str, mode: str) -> None:
        """There is nothing to keep."""


@dataclass(kw_only=True)
class SimCluster:
    """Leases without end, and whatever changes a scenario sends."""

    engine: EngineModel = field(default_factory=EngineModel)
    env: EnvModel = field(default_factory=EnvModel)
    trainer: TrainerModel = field(default_factory=TrainerModel)
    scorer: ScorerModel = field(default_factory=ScorerModel)
    engines: list[SimEngine] = field(default_factory=list)
    trainers: list[SimTrainer] = field(default_factory=list)
    envs: list[SimEnv] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    _leases: int = 0
    _changes: asyncio.Queue[Change] = field(default_factory=asyncio.Queue)

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        self._leases += 1
        return Lease(id=f"lease-{self._leases}", role=role, pool=pool, devices=("virtual",))

    async def release(self, lease: str) -> None:
        self.released.append(lease)

    async def start(self, lease: Lease) -> Port | Failure:
        if lease.role == "train":
            self.trainers.append(SimTrainer(self.trainer))
            return self.trainers[-1]
        if lease.role == "env":
            self.envs.append(SimEnv(self.env))
            return self.envs[-1]
        if lease.role == "score":
            return SimScorer(self.scorer)
        info = EngineInfo(
            id=f"engine-{len(self.engines)}",
            lease=lease.id,
            pool=lease.pool,
            role=lease.role,
            kv_tokens=1 << 20,
            fingerprint="bitwise",
            version=-1,
        )
        self.engines.append(SimEngine(info, self.engine))
        return self.engines[-1]

    async def changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self._changes.get()

    def lose_engine(self, index: int, detail: str = "process died", *, told_after_s: float = 0.0) -> None:
        """Its requests fail now; that it is lost is said some time later."""
        engine = self.engines[index]
        why = failure("engine", "lost", f"{engine.info.id}: {detail}")
        change = Change(kind="lost", subject=engine.info.id, role="mixed", failure=why)
        engine.lose(why)
        asyncio.get_running_loop().call_later(told_after_s, self._changes.put_nowait, change)

    def lose_trainer(self, detail: str) -> None:
        why = failure("trainer", "lost", detail)
        self._changes.put_nowait(Change(kind="lost", subject="trainer-0", role="train", failure=why))

    def lose_host(self, detail: str, *, left: int) -> None:
        why = failure("env", "lost", detail)
        for env in self.envs if left == 0 else ():
            env.lost = why
        self._changes.put_nowait(Change(kind="lost", subject="host-0", role="env", failure=why, facts={"left": left}))


def world(
    tasks: tuple[TaskSpec, ...],
    cluster: SimCluster,
    *,
    sinks: tuple[Sink, ...] = (),
    kept: list[Trajectory] | None = None,
) -> World:
    """A world around a simulated cluster. Terminal trajectories go to `kept`."""
    keep = kept.append if kept is not None else (lambda trajectory: None)
    return World(name="virtual", cluster=cluster, store=VersionBook(), tasks=tasks, sinks=sinks, keep=keep)
