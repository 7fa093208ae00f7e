"""The cluster of one machine: what did not start is told to all who wait for it, what is lost is ended."""

from __future__ import annotations

import asyncio

from rollart.config.schema import InlineWorld, PythonEnv, RunConfig, Schedule, ScratchModel, TaskConfig
from rollart.core.resources import DEFAULT_DEGREES, Change
from rollart.core.types import Failure, Role
from rollart.ports import Port
from rollart.runtime.actors import InlineActors, InlineHandle
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.actor import EnvHostActor
from rollart.runtime.envs.remote import RemoteEnv

CONFIG = RunConfig(
    world=InlineWorld(kind="inline"),
    model=ScratchModel(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, max_positions=32),
    tasks={"t": TaskConfig(env=PythonEnv(kind="python", entry="nowhere:Nothing"), size=8, max_turns=3)},
    schedule=Schedule(batch=8, group_size=4),
)


class Unstartable:
    def __init__(self, *args: object) -> None:
        raise OSError("no room for a host")


class NoHosts(InlineActors):
    def start(self, cls: type, *args: object) -> InlineHandle:
        return super().start(Unstartable if cls is EnvHostActor else cls, *args)


def cluster_on(actors: InlineActors) -> LocalCluster:
    return LocalCluster(CONFIG, 8, actors, lambda: None)


async def started(cluster: LocalCluster, role: Role) -> Port | Failure:
    lease = await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=1e9)
    assert not isinstance(lease, Failure)
    return await cluster.start(lease)


def test_scorers_are_told_that_their_hosts_did_not_start() -> None:
    async def main() -> None:
        cluster = cluster_on(NoHosts())
        async with asyncio.timeout(5.0):
            outcomes = await asyncio.gather(*(started(cluster, role) for role in ("score", "env", "score")))
        assert [one.detail for one in outcomes if isinstance(one, Failure)] == ["OSError: no room for a host"] * 3

    asyncio.run(main())


def test_a_start_that_is_given_up_leaves_the_hosts_to_others() -> None:
    async def main() -> None:
        cluster = cluster_on(InlineActors())
        waiting = [asyncio.ensure_future(started(cluster, "score")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        env = await started(cluster, "env")
        assert await waiting[1] is env
        assert isinstance(env, RemoteEnv)
        await cluster.release("env-3")

    asyncio.run(main())


def test_an_actor_that_is_lost_is_ended() -> None:
    """It may be silent and computing: told as lost, it must not go on using a core."""

    async def main() -> None:
        cluster = cluster_on(InlineActors())
        engine, env = await started(cluster, "mixed"), await started(cluster, "env")
        assert isinstance(engine, RemoteEngine)
        assert isinstance(env, RemoteEnv)
        host = env._hosts[0]
        why = Failure(where="engine", kind="lost", retryable=True, detail="silent")
        engine._wire.fail(why)
        host.wire.fail(why)
        changes = cluster.changes()
        lost = [await anext(aiter(changes)) for _ in range(2)]
        assert [(one.kind, one.role, one.subject) for one in lost if isinstance(one, Change)] == [
            ("lost", "mixed", engine.info.id), ("lost", "env", host.name),
        ]  # fmt: skip
        for handle in (engine._actor, host.actor):
            assert handle._ended
        for lease in ("mixed-1", "env-2"):
            await cluster.release(lease)

    asyncio.run(main())
