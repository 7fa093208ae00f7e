"""This machine as a cluster: the cluster port of the local world and of the inline one.

Owns the actors. Invariants: every actor belongs to a lease and ends with it, or as soon as it counts as lost; an actor's
end that nobody asked for comes out of `changes` once, with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from rollart.config.schema import RunConfig
from rollart.core.errors import ClusterError, failure
from rollart.core.resources import Change, Degrees, EngineInfo, Lease
from rollart.core.types import Failure, Role
from rollart.ports import Port, Trainer
from rollart.runtime.actors import Actors, call
from rollart.runtime.engine.actor import EngineActor
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.actor import EnvHostActor
from rollart.runtime.envs.remote import RemoteEnv

CLOSE_S = 5.0
"""How long hosts get to close their environments at the end, before they are ended anyway."""

StartTrainer = Callable[[], Any]
"""Starts the training ranks; awaits to a `ports.Trainer` with `stop()`."""


class LocalCluster:
    """Implements `ports.Cluster` with actors. Roles share the machine's cores, so leases are not counted against them."""

    def __init__(self, config: RunConfig, vocab_size: int, actors: Actors, start_trainer: StartTrainer) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._actors = actors
        self._start_trainer = start_trainer
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        self._releases: dict[str, Callable[[], Any]] = {}
        self._hosts: asyncio.Future[RemoteEnv | Failure] | None = None
        self._leases = 0
        self._engines = 0
        self._ending = False

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        self._leases += 1
        return Lease(id=f"{role}-{self._leases}", role=role, pool=pool, devices=("local",))

    async def start(self, lease: Lease) -> Port | Failure:
        try:
            if lease.role == "train":
                return await self._trainer(lease)
            if lease.role == "env":
                return await self._env(lease)
            if lease.role == "score":
                return await self._the_hosts()
            return await self._engine(lease)
        except ClusterError as error:
            return failure("cluster", "start_failed", str(error))

    async def release(self, lease: str) -> None:
        self._ending = True
        stop = self._releases.pop(lease, None)
        if stop is not None:
            await stop()

    async def changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self._changes.get()

    # --- one role each -----------------------------------------------------------------------------------------------

    async def _trainer(self, lease: Lease) -> Trainer:
        trainer = await self._start_trainer()
        self._releases[lease.id] = trainer.stop
        result: Trainer = trainer
        return result

    async def _engine(self, lease: Lease) -> RemoteEngine:
        config, name = self._config, f"engine-{self._engines}"
        self._engines += 1
        actor = self._actors.start(EngineActor, config.model, self._vocab_size, config.engine)
        info = EngineInfo(
            id=name, lease=lease.id, pool=lease.pool, role=lease.role, kv_tokens=config.engine.kv_tokens,
            fingerprint="bitwise", version=-1,
        )  # fmt: skip
        engine = RemoteEngine(info, actor, partial(self._engine_lost, actor))

        async def stop() -> None:
            engine.close()
            self._actors.kill(actor)

        self._releases[lease.id] = stop
        _started(await call("engine", actor.start.remote()))
        engine.open()
        return engine

    async def _env(self, lease: Lease) -> RemoteEnv:
        """Start the hosts; what waits to score on them is told, too, how that went."""
        try:
            env = await self._start_hosts(lease)
        except ClusterError as error:
            self._tell_scorers(failure("cluster", "start_failed", str(error)))
            raise
        self._tell_scorers(env)
        return env

    async def _start_hosts(self, lease: Lease) -> RemoteEnv:
        config = self._config
        actors = {
            f"host-{i}": self._actors.start(EnvHostActor, config.tasks, config.tokenizer, config.envs)
            for i in range(config.envs.hosts)
        }
        env = RemoteEnv(actors, partial(self._host_lost, actors), seed=config.seed)

        async def stop() -> None:
            env.stop()
            closing = [call("env", actor.close.remote()) for actor in actors.values()]
            try:
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.gather(*closing)
            except TimeoutError:
                logging.getLogger(__name__).warning(
                    "environments were still open %.0f s after they were told to close", CLOSE_S
                )
            for actor in actors.values():
                self._actors.kill(actor)

        self._releases[lease.id] = stop
        for actor in actors.values():
            _started(await call("env", actor.start.remote()))
        env.start()
        return env

    async def _the_hosts(self) -> RemoteEnv | Failure:
        """Scorers run where environments run."""
        # one asker that gives up must not take the answer from the others
        return await asyncio.shield(self._hosts_future())

    def _tell_scorers(self, hosts: RemoteEnv | Failure) -> None:
        if self._hosts_future().done():
            self._hosts = None
        self._hosts_future().set_result(hosts)

    def _hosts_future(self) -> asyncio.Future[RemoteEnv | Failure]:
        if self._hosts is None:
            self._hosts = asyncio.get_running_loop().create_future()
        return self._hosts

    # --- ends that nobody asked for ----------------------------------------------------------------------------------

    def _engine_lost(self, actor: Any, name: str, why: Failure) -> None:
        """A lost actor's process may still be there, silent or broken: it must not go on using a core."""
        self._actors.kill(actor)
        self._say(Change(kind="lost", subject=name, role="mixed", failure=why))

    def _host_lost(self, actors: Mapping[str, Any], name: str, why: Failure, left: int) -> None:
        self._actors.kill(actors[name])
        self._say(Change(kind="lost", subject=name, role="env", failure=why, facts={"left": left}))

    def _say(self, change: Change) -> None:
        if not self._ending:
            self._changes.put_nowait(change)


def _started(outcome: object) -> None:
    if isinstance(outcome, Failure):
        raise ClusterError(outcome.detail)
