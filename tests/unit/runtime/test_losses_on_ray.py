"""Workers that are killed, on a real Ray: what was theirs is told as gone, and others take their place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.config.schema import (
    EngineConfig,
    LocalWorld,
    MaxDigitEnv,
    Optimizer,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
    TrainerConfig,
)
from rollart.core.errors import TrainerLost
from rollart.core.resources import DEFAULT_DEGREES, Change, Lease
from rollart.core.types import (
    Applied,
    Failure,
    Manifest,
    RequestId,
    Role,
    Sample,
    Sampling,
    Segment,
    Span,
    TaskInstance,
    Tokens,
    TrajId,
    TurnRequest,
)
from rollart.runtime.actors import RayActors, start_ray, stop_ray
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.remote import RemoteEnv
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import build_tokenizer
from rollart.runtime.trainer.facade import RemoteTrainer, start_trainer

pytestmark = pytest.mark.ray

CONFIG = RunConfig(
    tasks={"digits": TaskConfig(env=MaxDigitEnv(kind="max_digit"))},
    model=ScratchModel(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, max_positions=64),
    optimizer=Optimizer(lr=0.01),
    schedule=Schedule(batch=8, group_size=4),
    trainer=TrainerConfig(bucket_bytes=10_000, micro_batch_tokens=64),
    engine=EngineConfig(max_live=4, kv_tokens=256),
)
VOCAB = build_tokenizer(CONFIG.tokenizer).vocab_size


@pytest.fixture(scope="module")
def actors() -> Iterator[RayActors]:
    start_ray(LocalWorld(object_store_mb=80), namespace="rollart-losses")
    yield RayActors()
    stop_ray()


def samples(step: int) -> list[Sample]:
    rng = np.random.default_rng(step)
    found = []
    for number in range(8):
        prompt, drawn = (rng.integers(1, VOCAB, n).astype(np.int32) for n in (6, 3))
        payload = TokenPayload(ids=drawn, logprobs=np.full(3, -3.0, np.float32))
        pieces = (
            Tokens(n_tokens=6, payload=TokenPayload(ids=prompt)),
            Tokens(n_tokens=3, spans=(Span(version=0, n_tokens=3),), payload=payload),
        )
        found.append(
            Sample(traj=TrajId(f"t{number}"), task="digits", segment=Segment(pieces=pieces), advantage=rng.normal())
        )
    return found


def request(name: str) -> TurnRequest:
    context = Segment(pieces=(Tokens(n_tokens=4, payload=TokenPayload(ids=np.ones(4, np.int32))),))
    return TurnRequest(
        id=RequestId(TrajId(name), 0, 0, 0), model="policy", purpose="train", domain="digits", context=context,
        max_tokens=4, sampling=Sampling(),
    )  # fmt: skip


async def started(cluster: LocalCluster, role: Role) -> tuple[Any, Lease]:
    lease = await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=1e9)
    assert isinstance(lease, Lease)
    port = await cluster.start(lease)
    assert not isinstance(port, Failure), port
    return port, lease


async def lost(cluster: LocalCluster) -> Change:
    """The next loss."""
    async with asyncio.timeout(20.0):
        async for change in cluster.changes():
            if change.kind == "lost":
                return change
    raise AssertionError


async def steps(trainer: RemoteTrainer, *numbers: int) -> None:
    for number in numbers:
        await trainer.begin(number, total_weight=8.0)
        await trainer.accumulate(samples(number))
        await trainer.finish()


async def serve(engine: RemoteEngine, manifest: Manifest) -> None:
    assert await engine.prefetch(manifest) is None
    applied = await engine.apply(manifest.version, kept="rebuild", pinned_deadline_s=0.0)
    assert isinstance(applied, Applied)
    assert applied.fingerprint == manifest.fingerprint


def cluster_on(actors: RayActors) -> LocalCluster:
    return LocalCluster(CONFIG, VOCAB, actors, lambda: start_trainer(CONFIG, VOCAB, actors))


def test_a_trainer_that_is_killed_is_restarted_and_what_it_had_published_is_gone(
    actors: RayActors, tmp_path: Path
) -> None:
    """It dies while it saves: the file in place is whole, and the weights come out the same, bit for bit."""
    early, late = str(tmp_path / "early.safetensors"), str(tmp_path / "late.safetensors")

    async def main() -> None:
        cluster = cluster_on(actors)
        (trainer, first), (engine, serving) = await asyncio.gather(started(cluster, "train"), started(cluster, "mixed"))
        await steps(trainer, 0)
        await trainer.checkpoint(early, "save")
        await serve(engine, await trainer.publish(0))
        await steps(trainer, 1, 2)
        unfetched = await trainer.publish(1)
        owner = (await trainer.pids())[0]
        await trainer.checkpoint(late, "save")
        saving = [asyncio.ensure_future(trainer.checkpoint(late, "save")) for _ in range(100)]
        await asyncio.wait(saving, return_when=asyncio.FIRST_COMPLETED)
        os.kill(owner, signal.SIGKILL)
        async with asyncio.timeout(20.0):
            outcomes = await asyncio.gather(*saving, return_exceptions=True)
        assert all(one is None or isinstance(one, TrainerLost) for one in outcomes)
        assert isinstance(outcomes[-1], TrainerLost)
        change = await lost(cluster)
        assert (change.role, change.subject, change.lease) == ("train", "trainer-0", first.id)
        await cluster.release(first.id)

        trainer, second = await started(cluster, "train")
        async with asyncio.timeout(20.0):
            why = await engine.prefetch(unfetched)
        assert isinstance(why, Failure)
        assert (why.where, why.kind) == ("store", "missing")
        turn = await engine.generate(request("on old weights"))
        assert [span.version for span in turn.tokens.spans] == [0]
        await trainer.checkpoint(late, "load")
        again = await trainer.publish(2)
        assert again.fingerprint == unfetched.fingerprint
        await serve(engine, again)
        await trainer.checkpoint(early, "load")
        await steps(trainer, 1, 2)
        assert (await trainer.publish(3)).fingerprint == unfetched.fingerprint
        for lease in (serving, second):
            await cluster.release(lease.id)

    asyncio.run(main())


def test_an_engine_and_a_host_that_are_killed_are_replaced(actors: RayActors) -> None:
    async def main() -> None:
        cluster = cluster_on(actors)
        (engine, serving), (env, hosting) = await asyncio.gather(started(cluster, "mixed"), started(cluster, "env"))
        assert isinstance(env, RemoteEnv)
        instance = TaskInstance(task="digits", epoch=0, index=0, seed=0)
        deadline = asyncio.get_running_loop().time() + 60.0
        session = await env.open(instance, traj=TrajId("a"), attempt=0, deadline_s=deadline)
        assert not isinstance(session, Failure)
        actors.kill(env._hosts[0].actor)
        actors.kill(engine._actor)
        changes = [await lost(cluster) for _ in range(2)]
        assert {(one.role, one.subject, one.lease) for one in changes} == {
            ("env", "host-0", hosting.id), ("mixed", "engine-0", serving.id),
        }  # fmt: skip
        for why in (
            await session.reset(deadline_s=deadline),
            await env.open(instance, traj=TrajId("b"), attempt=0, deadline_s=deadline),
        ):
            assert isinstance(why, Failure)
            assert (why.where, why.kind, why.retryable) == ("env", "lost", True)
        await session.close()
        assert (await engine.generate(request("late"))).finish == "failed"
        for lease in (serving, hosting):
            await cluster.release(lease.id)
        same, another = await started(cluster, "env")
        assert same is env
        opened = await env.open(instance, traj=TrajId("b"), attempt=1, deadline_s=deadline)
        assert not isinstance(opened, Failure)
        assert opened.host == "host-1"
        await cluster.release(another.id)

    asyncio.run(main())
