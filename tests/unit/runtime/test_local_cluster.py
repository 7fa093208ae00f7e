"""The cluster of one machine: what is lost is ended and said, and another takes its place, whatever else goes on."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollart.config.schema import InlineWorld, PythonEnv, RunConfig, Schedule, ScratchModel, TaskConfig
from rollart.control.fleet import Fleet
from rollart.control.waits import Waits
from rollart.core.errors import ClusterError
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.resources import DEFAULT_DEGREES, Change, Lease
from rollart.core.types import Failure, RequestId, Role, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.actors import InlineActors, InlineHandle
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.compiled import WITHOUT_KERNEL
from rollart.runtime.engine.actor import EngineActor
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.actor import EnvHostActor
from rollart.runtime.envs.host import Score
from rollart.runtime.envs.remote import RemoteEnv
from rollart.runtime.payload import TokenPayload
from rollart.runtime.trainer.facade import TrainerActor, start_trainer

CONFIG = RunConfig(
    world=InlineWorld(kind="inline"),
    model=ScratchModel(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, max_positions=32),
    tasks={"t": TaskConfig(env=PythonEnv(kind="python", entry="nowhere:Nothing"), size=8, max_turns=3)},
    schedule=Schedule(batch=8, group_size=4),
)

REQUEST = TurnRequest(
    id=RequestId(TrajId("t"), 0, 0, 0), model="policy", purpose="train", domain="t", max_tokens=4, sampling=Sampling(),
    context=Segment(pieces=(Tokens(n_tokens=1, payload=TokenPayload(ids=np.ones(1, np.int32))),)), min_version=5,
)  # fmt: skip
"""Waits for a version that never comes."""


class Unstartable:
    def __init__(self, *args: object) -> None:
        raise OSError("no room for a host")


class NeverStarts:
    def __init__(self, *args: object) -> None:
        pass

    async def start(self, *args: object) -> None:
        await asyncio.Event().wait()


class Odd(InlineActors):
    """Starts another class in place of one, and knows what lives."""

    def __init__(self, cls: type | None = None, instead: type | None = None) -> None:
        self._cls, self._instead = cls, instead
        self.living: list[InlineHandle] = []

    def start(self, cls: type, *args: object) -> InlineHandle:
        handle = super().start(self._instead if self._instead and cls is self._cls else cls, *args)
        self.living.append(handle)
        return handle

    def kill(self, handle: InlineHandle) -> None:
        super().kill(handle)
        if handle in self.living:
            self.living.remove(handle)


async def no_trainer() -> None:
    raise ClusterError("no room for a trainer")


def cluster_on(actors: InlineActors, **first: int) -> LocalCluster:
    return LocalCluster(CONFIG, 8, actors, no_trainer, **first)


async def leased(cluster: LocalCluster, role: Role) -> Lease:
    lease = await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=1e9)
    assert not isinstance(lease, Failure)
    return lease


async def started(cluster: LocalCluster, role: Role) -> tuple[Any, Lease]:
    lease = await leased(cluster, role)
    port = await cluster.start(lease)
    assert not isinstance(port, Failure), port
    return port, lease


async def next_change(cluster: LocalCluster) -> Change:
    async with asyncio.timeout(10.0):
        return await anext(aiter(cluster.changes()))


def test_what_does_not_start_says_why_and_leaves_nothing() -> None:
    async def main() -> None:
        actors = Odd(EnvHostActor, Unstartable)
        cluster = cluster_on(actors)
        for role, why in (("env", "OSError: no room for a host"), ("train", "no room for a trainer")):
            lease = await leased(cluster, role)  # type: ignore[arg-type]
            outcome = await cluster.start(lease)
            assert isinstance(outcome, Failure)
            assert (outcome.where, outcome.kind, outcome.detail) == ("cluster", "start_failed", why)
            await cluster.release(lease.id)
        assert not actors.living

    asyncio.run(main())


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize(("role", "cls"), [("env", EnvHostActor), ("mixed", EngineActor), ("train", TrainerActor)])
def test_a_lease_that_is_released_while_it_starts_leaves_nothing(role: Role, cls: type, given_up: bool) -> None:
    async def main() -> None:
        actors = Odd(cls, NeverStarts)
        cluster = LocalCluster(CONFIG, 8, actors, partial(start_trainer, CONFIG, 8, actors))
        lease = await leased(cluster, role)
        starting = asyncio.ensure_future(cluster.start(lease))
        await asyncio.sleep(0.01)
        assert len(actors.living) == 1
        if given_up:
            starting.cancel()
            await asyncio.wait({starting})
        async with asyncio.timeout(5.0):
            await cluster.release(lease.id)
            await cluster.release(lease.id)
        assert not actors.living
        if not given_up:
            outcome = await starting
            assert isinstance(outcome, Failure)
            assert (outcome.where, outcome.kind) == ("cluster", "lost")

    asyncio.run(main())


def test_each_env_lease_adds_a_host_to_the_one_port_and_scorers_use_those_that_are_there() -> None:
    async def main() -> None:
        cluster = cluster_on(InlineActors(), first_host=4)
        scorer, score = await started(cluster, "score")
        one, two = await asyncio.gather(started(cluster, "env"), started(cluster, "env"))
        assert one[0] is two[0] is scorer
        joined = [await next_change(cluster) for _ in range(2)]
        assert [(one.kind, one.role, one.subject) for one in joined] == [
            ("joined", "env", "host-4"), ("joined", "env", "host-5"),
        ]  # fmt: skip
        assert [change.lease for change in joined] == [one[1].id, two[1].id]
        for lease in (score, one[1], two[1]):
            await cluster.release(lease.id)

    asyncio.run(main())


def test_an_actor_that_is_lost_is_ended_and_said_with_its_lease() -> None:
    """It may be silent and computing: told as lost, it must not go on using a core."""

    async def main() -> None:
        actors = Odd()
        cluster = cluster_on(actors, first_engine=7)
        engine, first = await started(cluster, "mixed")
        env, second = await started(cluster, "env")
        assert isinstance(engine, RemoteEngine)
        assert isinstance(env, RemoteEnv)
        why = Failure(where="engine", kind="lost", retryable=True, detail="silent")
        engine._wire.fail(why)
        env._hosts[0].wire.fail(why)
        changes = [await next_change(cluster) for _ in range(3)]
        assert [(one.kind, one.role, one.subject, one.lease) for one in changes] == [
            ("joined", "env", "host-0", second.id), ("lost", "mixed", "engine-7", first.id),
            ("lost", "env", "host-0", second.id),
        ]  # fmt: skip
        assert not actors.living
        for lease in (first, second):
            await cluster.release(lease.id)

    asyncio.run(main())


def test_the_release_of_one_worker_does_not_hide_the_loss_of_another() -> None:
    """Any number of times, and while others live on."""

    async def main() -> None:
        actors = Odd()
        cluster = cluster_on(actors)
        _, steady = await started(cluster, "mixed")
        for turn in range(1, 4):
            engine, lease = await started(cluster, "mixed")
            assert engine.info.id == f"engine-{turn}"
            actors.kill(engine._actor)
            change = await next_change(cluster)
            assert (change.subject, change.lease) == (engine.info.id, lease.id)
            await cluster.release(lease.id)
        assert len(actors.living) == 1
        await cluster.release(steady.id)
        assert cluster._changes.empty()

    asyncio.run(main())


def test_who_waits_for_a_worker_that_is_released_is_told() -> None:
    async def main() -> None:
        actors = Odd()
        cluster = cluster_on(actors)
        engine, first = await started(cluster, "mixed")
        env, second = await started(cluster, "env")
        waiting = [
            asyncio.ensure_future(engine.generate(REQUEST)),
            asyncio.ensure_future(env._hosts[0].ask(Score(session="s", seq=1, budget_s=60.0, task="t", text=""))),
        ]
        await asyncio.sleep(0)
        env._hosts[0].wire._outbox.clear()  # a message that was lost on its way
        for lease in (first, second):
            await cluster.release(lease.id)
        async with asyncio.timeout(5.0):
            turn, score = await asyncio.gather(*waiting)
        assert (turn.finish, turn.failure.kind) == ("failed", "lost")
        assert (score.where, score.kind) == ("env", "lost")
        assert not actors.living

    asyncio.run(main())


class WithoutKernel(EngineActor):
    def lacks(self) -> str:
        return "no compiler"


def test_why_engines_are_slower_than_they_need_be_is_recorded_once() -> None:
    async def main() -> None:
        actors = Odd(EngineActor, WithoutKernel)
        cluster, events = cluster_on(actors), list[Any]()
        record = Recorder((events.append,), lambda: 0.0)
        fleet = Fleet(record, Waits(record), Ledger(), seed=0, spawn=asyncio.ensure_future)
        for _ in range(2):
            engine, _ = await started(cluster, "mixed")
            fleet.add(engine)
        told = [event["data"] for event in events if event["kind"] == "advisory"]
        text = f"engines decode without the compiled kernel: no compiler; {WITHOUT_KERNEL}"
        assert told == [{"code": "engine_slower", "text": text}]
        for handle in actors.living:
            handle.end()

    asyncio.run(main())
