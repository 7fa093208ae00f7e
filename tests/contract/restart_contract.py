"""What holds of workers that are lost and started again, in every world."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import pytest
from rigs import ClusterRig

from rollart.core.errors import TrainerLost
from rollart.core.resources import DEFAULT_DEGREES, Change, Lease
from rollart.core.types import Applied, Failure, Manifest, Observation, Role, TrajId
from rollart.ports import Engine, Session, Trainer

LIMIT_S = 60.0


def soon() -> float:
    return asyncio.get_running_loop().time() + LIMIT_S


async def started(rig: ClusterRig, role: Role) -> tuple[Any, Lease]:
    lease = await rig.cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=soon())
    assert isinstance(lease, Lease)
    port = await rig.cluster.start(lease)
    assert not isinstance(port, Failure), port
    return port, lease


async def next_change(rig: ClusterRig, kind: str) -> Change:
    async with asyncio.timeout(LIMIT_S):
        async for change in rig.cluster.changes():
            if change.kind == kind:
                return change
    raise AssertionError("the world has nothing more to say")


async def serve(engine: Engine, manifest: Manifest) -> None:
    assert await engine.prefetch(manifest) is None
    applied = await engine.apply(manifest.version, kept="rebuild", pinned_deadline_s=0.0)
    assert isinstance(applied, Applied)
    assert applied.fingerprint == manifest.fingerprint


async def steps(rig: ClusterRig, trainer: Trainer, *numbers: int) -> None:
    for number in numbers:
        await trainer.begin(number, total_weight=None)
        await trainer.accumulate(rig.samples(number))
        await trainer.finish()


async def an_engine_in_a_lost_ones_place_serves_what_was_published_before(rig: ClusterRig) -> None:
    trainer, training = await started(rig, "train")
    manifest = await trainer.publish(0)
    names = []
    for turn in range(3):
        engine, lease = await started(rig, "mixed")
        names.append(engine.info.id)
        assert engine.info.lease == lease.id
        assert engine.info.version < 0
        await serve(engine, manifest)
        answer = await engine.generate(rig.request(f"turn {turn}", max_tokens=5))
        assert [(span.version, span.n_tokens) for span in answer.tokens.spans] == [(0, 5)]
        await rig.lose_engine(engine)
        change = await next_change(rig, "lost")
        assert (change.subject, change.lease) == (engine.info.id, lease.id)
        await rig.cluster.release(lease.id)
    assert len(set(names)) == 3
    await rig.cluster.release(training.id)


async def the_release_of_a_lost_engine_touches_no_other(rig: ClusterRig) -> None:
    (other, steady), (engine, lease) = await started(rig, "mixed"), await started(rig, "mixed")
    trainer, training = await started(rig, "train")
    await serve(other, await trainer.publish(0))
    await rig.lose_engine(engine)
    await next_change(rig, "lost")
    await rig.cluster.release(lease.id)
    assert (await other.generate(rig.request("goes on", max_tokens=5))).finish == "length"
    await rig.lose_engine(other)
    assert (await next_change(rig, "lost")).lease == steady.id
    for one in (steady, training):
        await rig.cluster.release(one.id)


async def each_host_joins_the_one_port_and_is_announced(rig: ClusterRig) -> None:
    (one, first), (same, second) = await started(rig, "env"), await started(rig, "env")
    assert same is one
    changes = [await next_change(rig, "joined") for _ in range(2)]
    assert [(change.role, change.lease) for change in changes] == [("env", first.id), ("env", second.id)]
    assert len({change.subject for change in changes}) == 2
    sessions = [await one.open(rig.instance, traj=TrajId(f"s{n}"), attempt=0, deadline_s=soon()) for n in range(4)]
    assert {session.host for session in sessions} == {change.subject for change in changes}
    for session in sessions:
        await session.close()
    for lease in (first, second):
        await rig.cluster.release(lease.id)


async def a_host_in_a_lost_ones_place_takes_new_sessions_and_the_old_ones_are_lost(rig: ClusterRig) -> None:
    env, first = await started(rig, "env")
    host = (await next_change(rig, "joined")).subject
    session: Session = await env.open(rig.instance, traj=TrajId("s"), attempt=0, deadline_s=soon())
    assert session.host == host
    assert isinstance(await session.reset(deadline_s=soon()), Observation)
    await rig.lose_host(host)
    change = await next_change(rig, "lost")
    assert (change.role, change.subject, change.lease) == ("env", host, first.id)
    for why in (
        await session.reset(deadline_s=soon()),
        await env.open(rig.instance, traj=TrajId("s"), attempt=1, deadline_s=soon()),
    ):
        assert isinstance(why, Failure)
        assert (why.where, why.kind, why.retryable) == ("env", "lost", True)
    await session.close()
    await rig.cluster.release(first.id)
    same, second = await started(rig, "env")
    assert same is env
    joined = await next_change(rig, "joined")
    assert (joined.lease, joined.subject == host) == (second.id, False)
    again: Session = await env.open(rig.instance, traj=TrajId("s"), attempt=2, deadline_s=soon())
    assert again.host == joined.subject
    assert isinstance(await again.reset(deadline_s=soon()), Observation)
    await again.close()
    await rig.cluster.release(second.id)


async def a_call_to_a_host_that_is_lost_meanwhile_answers(rig: ClusterRig) -> None:
    env, lease = await started(rig, "env")
    host = (await next_change(rig, "joined")).subject
    sessions = [await env.open(rig.instance, traj=TrajId(f"s{n}"), attempt=0, deadline_s=soon()) for n in range(4)]
    calls = [asyncio.ensure_future(session.reset(deadline_s=soon())) for session in sessions]
    await asyncio.sleep(0)
    await rig.lose_host(host)
    async with asyncio.timeout(LIMIT_S):
        outcomes = await asyncio.gather(*calls)
    lost = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert lost
    assert {(one.where, one.kind) for one in lost} == {("env", "lost")}
    await rig.cluster.release(lease.id)


async def a_lost_trainer_says_so_in_every_call(rig: ClusterRig) -> None:
    trainer, lease = await started(rig, "train")
    await steps(rig, trainer, 0)
    await rig.lose_trainer(trainer)
    with pytest.raises(TrainerLost):
        await trainer.begin(1, total_weight=None)
    with pytest.raises(TrainerLost):
        await trainer.publish(0)
    with pytest.raises(TrainerLost):
        await trainer.checkpoint(f"{rig.folder}/trainer", "save")
    change = await next_change(rig, "lost")
    assert (change.role, change.lease) == ("train", lease.id)
    await rig.cluster.release(lease.id)


async def a_trainer_in_a_lost_ones_place_goes_on_from_the_checkpoint_as_the_lost_one_did(rig: ClusterRig) -> None:
    path = f"{rig.folder}/trainer"
    trainer, lease = await started(rig, "train")
    await steps(rig, trainer, 0)
    kept = await trainer.publish(0)
    await trainer.checkpoint(path, "save")
    await steps(rig, trainer, 1, 2)
    once = await trainer.publish(1)
    await rig.lose_trainer(trainer)
    with pytest.raises(TrainerLost):
        await steps(rig, trainer, 3)
    await rig.cluster.release(lease.id)
    other, again = await started(rig, "train")
    await other.checkpoint(path, "load")
    assert (await other.publish(2)).fingerprint == kept.fingerprint != once.fingerprint
    await steps(rig, other, 1, 2)
    assert (await other.publish(3)).fingerprint == once.fingerprint
    await rig.cluster.release(again.id)


CONTRACTS = [
    contract
    for name, contract in inspect.getmembers(sys.modules[__name__], inspect.iscoroutinefunction)
    if contract.__module__ == __name__ and list(inspect.signature(contract).parameters) == ["rig"]
]
