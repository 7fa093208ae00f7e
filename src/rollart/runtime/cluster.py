"""This machine as a cluster: the cluster port of the local world and of the inline one.

Owns the actors. Invariants: every actor belongs to a lease and ends with it, or as soon as it counts as lost; an actor's
end that nobody asked for comes out of `changes` once, with its lease and its cause; what happens to one lease concerns no
other, so a worker can be started in place of one that was lost at any time, and any number of times.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollart.config.real import engine_of
from rollart.config.schema import EngineConfig, InlineWorld, RunConfig, VllmEngine
from rollart.core.errors import ClusterError, failure
from rollart.core.resources import Change, Degrees, EngineInfo, Lease
from rollart.core.types import Failure, Role
from rollart.ports import Port, Trainer
from rollart.runtime.actors import Actors, call
from rollart.runtime.compiled import WITHOUT_KERNEL
from rollart.runtime.engine.actor import EngineActor
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.actor import EnvHostActor
from rollart.runtime.envs.remote import RemoteEnv
from rollart.runtime.probe import MISMATCH
from rollart.runtime.room import kv_tokens_of
from rollart.runtime.trainer.facade import RemoteTrainer

CLOSE_S = 5.0
"""How long a host gets to close its environments, or vLLM to end, when it is released, before it is ended anyway."""

StartTrainer = Callable[[], Any]
"""Starts the training ranks; awaits to a `ports.Trainer` with `stop()`."""


class LocalCluster:
    """Implements `ports.Cluster` with actors. Roles share the machine's cores, so leases are not counted against them.

    `first_engine`, `first_host`: numbers of the first ones; names are never used again, also not by a run that is resumed.
    """

    def __init__(
        self, config: RunConfig, vocab_size: int, actors: Actors, start_trainer: StartTrainer, *,
        first_engine: int = 0, first_host: int = 0,
    ) -> None:  # fmt: skip
        self._config = config
        self._vocab_size = vocab_size
        self._actors = actors
        self._start_trainer = start_trainer
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        self._starting: dict[str, asyncio.Task[Port]] = {}
        self._stops: dict[str, Callable[[], Awaitable[None]]] = {}
        """By lease, of what was started or half-started."""
        self._released: set[str] = set()
        self._env = RemoteEnv(self._host_lost, seed=config.seed, sockets=actors.sockets)
        self._remote: dict[str, RemoteEngine] = {}
        """All that have started, those that are gone as well."""
        self._hosts: dict[str, tuple[Any, str]] = {}
        """Actor and lease of each host."""
        self._leases = 0
        self._trainers = 0
        self._engines = first_engine
        self._next_host = first_host

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        self._leases += 1
        return Lease(id=f"{role}-{self._leases}", role=role, pool=pool, devices=("local",), degrees=degrees)

    async def start(self, lease: Lease) -> Port | Failure:
        """See `ports.Cluster`. A start that is given up, or whose lease is released meanwhile, leaves nothing that runs once
        the lease is released."""
        starting = asyncio.get_running_loop().create_task(self._start(lease), name=f"start {lease.id}")
        self._starting[lease.id] = starting
        starting.add_done_callback(partial(self._has_started, lease.id))
        try:
            await asyncio.wait({starting})
        finally:
            starting.cancel()
        if starting.cancelled():
            return failure("cluster", "lost", f"{lease.id} was released while it started")
        try:
            return starting.result()
        except ClusterError as error:
            return failure("cluster", "start_failed", str(error))

    def _has_started(self, lease: str, starting: asyncio.Task[Port]) -> None:
        """One that was given up may still have failed: nobody asks any more."""
        del self._starting[lease]
        if not starting.cancelled():
            starting.exception()

    async def _start(self, lease: Lease) -> Port:
        if lease.role == "train":
            return await self._trainer(lease)
        if lease.role == "env":
            return await self._host(lease)
        if lease.role == "score":
            # scorers run where environments run, on whatever hosts are there when they are called
            return self._env
        return await self._engine(lease)

    async def release(self, lease: str) -> None:
        self._released.add(lease)
        starting = self._starting.get(lease)
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        stop = self._stops.pop(lease, None)
        if stop is not None:
            await stop()

    async def changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self._changes.get()

    def counts(self) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[float, ...]]]:
        """Batches sent and answers that came so far, by role; what each engine says that it has computed."""
        pairs = [engine.traffic for engine in self._remote.values()]
        engines = (sum(sent for sent, _ in pairs), sum(polls for _, polls in pairs))
        work = {name: engine.work for name, engine in self._remote.items()}
        return {"engine": engines, "env": self._env.traffic}, work

    # --- one role each -----------------------------------------------------------------------------------------------

    async def _trainer(self, lease: Lease) -> Trainer:
        name = f"trainer-{self._trainers}"
        self._trainers += 1
        trainer = await self._start_trainer()
        self._stops[lease.id] = trainer.stop
        if isinstance(trainer, RemoteTrainer):
            trainer.watch(partial(self._trainer_lost, name, lease.id))
        result: Trainer = trainer
        return result

    async def _engine(self, lease: Lease) -> RemoteEngine:
        config, name = self._config, f"engine-{self._engines}"
        self._engines += 1
        cls, own, more = _engine_of(config)
        actor = self._actors.start(cls, config.model, self._vocab_size, own, *more)
        info = EngineInfo(
            id=name, lease=lease.id, pool=lease.pool, role=lease.role, kv_tokens=kv_tokens_of(config),
            fingerprint="probe" if isinstance(own, VllmEngine) else "bitwise",
            mismatch=MISMATCH[own.dtype] if isinstance(own, VllmEngine) else 0.0, version=-1,
        )  # fmt: skip
        lost = partial(self._engine_lost, actor, lease.id)
        engine = RemoteEngine(info, actor, lost, sockets=self._actors.sockets)

        async def stop() -> None:
            engine.close()
            if isinstance(own, VllmEngine):
                await self._closed(name, actor)
            self._actors.kill(actor)

        self._stops[lease.id] = stop
        _started(await call("engine", actor.start.remote()))
        if isinstance(own, EngineConfig) and (lacks := await call("engine", actor.lacks.remote())):
            engine.info = replace(info, slower=_slower(lacks))
        engine.open()
        self._remote[name] = engine
        return engine

    async def _host(self, lease: Lease) -> RemoteEnv:
        """One more host of the one environment port."""
        config, name = self._config, f"host-{self._next_host}"
        self._next_host += 1
        actor = self._actors.start(EnvHostActor, config.tasks, config.tokenizer, config.envs)
        self._hosts[name] = (actor, lease.id)
        self._stops[lease.id] = partial(self._stop_host, name)
        _started(await call("env", actor.start.remote()))
        self._env.add(name, actor)
        self._say(Change(kind="joined", subject=name, role="env", lease=lease.id))
        return self._env

    async def _stop_host(self, name: str) -> None:
        actor, _ = self._hosts.pop(name)
        self._env.drop(name)
        try:
            await self._closed(name, actor)
        finally:
            self._actors.kill(actor)

    async def _closed(self, name: str, actor: Any) -> None:
        """Let an actor end what runs beside it, which its own end would not do in good order."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await call("cluster", actor.close.remote())
        except TimeoutError:
            logging.getLogger(__name__).warning(
                "%s had not closed what it runs %.0f s after it was told to", name, CLOSE_S
            )

    # --- ends that nobody asked for ----------------------------------------------------------------------------------

    def _engine_lost(self, actor: Any, lease: str, name: str, why: Failure) -> None:
        """A lost actor's process may still be there, silent or broken: it must not go on using a core."""
        self._actors.kill(actor)
        self._say(Change(kind="lost", subject=name, role="mixed", lease=lease, failure=why))

    def _host_lost(self, name: str, why: Failure, left: int) -> None:
        actor, lease = self._hosts[name]
        self._actors.kill(actor)
        self._say(Change(kind="lost", subject=name, role="env", lease=lease, failure=why, facts={"left": left}))

    def _trainer_lost(self, name: str, lease: str, why: Failure) -> None:
        """Its other ranks wait for the one that is gone; they end when the lease is released."""
        self._say(Change(kind="lost", subject=name, role="train", lease=lease, failure=why))

    def _say(self, change: Change) -> None:
        """What happens to a lease that is given back, nobody need know."""
        if change.lease not in self._released:
            self._changes.put_nowait(change)


def _engine_of(config: RunConfig) -> tuple[type, EngineConfig | VllmEngine, tuple[object, ...]]:
    """The engine's actor, its configuration and what else it is told. Paths are made whole here: an actor's process may have
    another folder."""
    engine = engine_of(config)
    if isinstance(engine, VllmEngine):
        from rollart.runtime.vllm.actor import VllmActor

        return VllmActor, engine.model_copy(update={"python": str(Path(engine.python).expanduser().absolute())}), ()
    return EngineActor, engine, (not isinstance(config.world, InlineWorld),)


def _slower(lacks: str | Failure) -> str:
    """Of an engine that has to do without the compiled kernel. A failure is told where the engine is next called."""
    if isinstance(lacks, Failure):
        return ""
    return f"engines decode without the compiled kernel: {lacks}; {WITHOUT_KERNEL}"


def _started(outcome: object) -> None:
    if isinstance(outcome, Failure):
        raise ClusterError(outcome.detail)
