"""The runtime's own ports, with a tiny model, in one process: the same proxies and actors as on Ray."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from rigs import ClusterRig, EngineRig, EnvRig, PortWorld, ScorerRig, TrainerRig

from rollart.config.real import model_of
from rollart.config.schema import (
    EngineConfig,
    EnvHostConfig,
    EvalConfig,
    InlineWorld,
    PythonEnv,
    PythonScorer,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
)
from rollart.core.resources import DEFAULT_DEGREES
from rollart.core.types import (
    Failure,
    GroupId,
    Manifest,
    Observation,
    Purpose,
    RequestId,
    Role,
    Sample,
    Sampling,
    Segment,
    Span,
    TaskInstance,
    Tokens,
    Trajectory,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.ports import Engine, Trainer
from rollart.runtime.actors import InlineActors
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.envs.remote import RemoteEnv
from rollart.runtime.envs.session import TurnText
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import build_tokenizer
from rollart.runtime.trainer.facade import RemoteTrainer, start_trainer
from rollart.runtime.weights import fingerprint, manifest, pack

ROLES: tuple[Role, ...] = ("train", "env", "score", "mixed")
ENVS = {"echo": "Echo", "stuck": "Stuck", "raising": "Raising", "unopenable": "Unopenable"}
CONFIG = RunConfig(
    world=InlineWorld(kind="inline"),
    model=ScratchModel(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, max_positions=512),
    tasks={
        name: TaskConfig(
            env=PythonEnv(kind="python", entry=f"odd_envs:{cls}"),
            size=8,
            max_turns=3,
            scorer=PythonScorer(kind="python", entry="odd_envs:score"),
        )
        for name, cls in ENVS.items()
    },
    schedule=Schedule(batch=8, group_size=4),
    engine=EngineConfig(max_live=32, kv_tokens=16384),
    envs=EnvHostConfig(sessions_per_host=256),
    eval=EvalConfig(concurrency=32),
)
TOKENIZER = build_tokenizer(CONFIG.tokenizer)


def cluster_of() -> tuple[LocalCluster, InlineActors]:
    actors = InlineActors()
    starting = lambda: start_trainer(CONFIG, TOKENIZER.vocab_size, actors)  # noqa: E731
    return LocalCluster(CONFIG, TOKENIZER.vocab_size, actors, starting), actors


@asynccontextmanager
async def started(role: Role) -> AsyncIterator[tuple[Any, LocalCluster]]:
    torch.set_num_threads(1)
    cluster, _ = cluster_of()
    lease = await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=60.0)
    assert not isinstance(lease, Failure)
    try:
        yield await cluster.start(lease), cluster
    finally:
        await cluster.release(lease.id)


def ids(n: int, seed: int = 0) -> Tokens:
    drawn = np.random.default_rng(seed).integers(1, TOKENIZER.vocab_size, n).astype(np.int32)
    return Tokens(n_tokens=n, payload=TokenPayload(ids=drawn))


def request(
    name: str, *, turn: int = 0, context: Segment | None = None, max_tokens: int = 8, purpose: Purpose = "train",
    pin: Version | None = None, min_version: Version = 0,
) -> TurnRequest:  # fmt: skip
    return TurnRequest(
        id=RequestId(TrajId(name), 0, turn, 0), model="policy", purpose=purpose, domain="t",
        context=context or Segment(pieces=(ids(16),)), max_tokens=max_tokens, sampling=Sampling(), pin=pin,
        min_version=min_version,
    )  # fmt: skip


async def publish(version: Version) -> Manifest:
    model = build_model(hf_config(model_of(CONFIG), TOKENIZER.vocab_size), seed=version)
    tensors = named_weights(model)
    index, buckets = pack(tensors, 10_000)
    return manifest(version, index, buckets, fingerprint(tensors))


@asynccontextmanager
async def engine() -> AsyncIterator[EngineRig]:
    async with started("mixed") as (port, _):
        assert isinstance(port, RemoteEngine)
        await port.prefetch(await publish(0))
        await port.apply(0, kept="rebuild", pinned_deadline_s=0.0)

        async def lose() -> None:
            InlineActors().kill(port._actor)

        yield EngineRig(engine=port, request=request, publish=publish, lose=lose, long_tokens=480, tick_s=0.002)


def problem(index: int) -> TaskInstance:
    return TaskInstance(task="echo", epoch=0, index=index, seed=index)


@asynccontextmanager
async def env() -> AsyncIterator[EnvRig]:
    async with started("env") as (port, _):
        assert isinstance(port, RemoteEnv)

        async def sessions() -> int:
            await asyncio.sleep(0.05)  # a close is sent and not waited for
            hosts = [host.actor._actor._host for host in port._hosts]
            return sum(host.facts().sessions for host in hosts)

        def act(observation: Observation) -> tuple[Tokens, ...]:
            action = TOKENIZER.encode("go\n")
            return (Tokens(n_tokens=len(action), payload=TokenPayload(ids=action)),)

        odd = {name: TaskInstance(task=name, epoch=0, index=0, seed=0) for name in ENVS}
        yield EnvRig(
            env=port, instance=problem, most_turns=3, act=act, sessions=sessions, step_s=0.5, stuck=odd["stuck"],
            raising=odd["raising"], unopenable=odd["unopenable"],
        )  # fmt: skip


def trajectory(name: str) -> Trajectory:
    return Trajectory(
        id=TrajId(name), attempt=0, group_id=GroupId("g"), instance=problem(0), member=0, segments=(), status="done",
        finish_cause="env_done", evidence=(TurnText("", name),),
    )  # fmt: skip


@asynccontextmanager
async def scorer() -> AsyncIterator[ScorerRig]:
    async with started("env") as (port, _):
        yield ScorerRig(
            scorer=port, good=trajectory("good"), broken=trajectory("broken"), slow=trajectory("slow"), score_s=0.5
        )


def samples(number: int) -> list[Sample]:
    sampled = np.array([3 + number, 5, 7], np.int32)
    payload = TokenPayload(ids=sampled, logprobs=np.full(3, -4.0, np.float32))
    pieces = (ids(6, number), Tokens(n_tokens=3, spans=(Span(version=0, n_tokens=3),), payload=payload))
    return [Sample(traj=TrajId(f"t{number}"), task="echo", segment=Segment(pieces=pieces), advantage=1.0)]


@asynccontextmanager
async def trainer() -> AsyncIterator[TrainerRig]:
    async with started("train") as (port, _), started("train") as (twin, _):
        yield TrainerRig(trainer=port, twin=twin, samples=samples)


@asynccontextmanager
async def cluster() -> AsyncIterator[ClusterRig]:
    port, actors = cluster_of()

    async def lose_engine(engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        actors.kill(engine._actor)

    async def lose_host(name: str) -> None:
        actors.kill(port._hosts[name][0])

    async def lose_trainer(trainer: Trainer) -> None:
        assert isinstance(trainer, RemoteTrainer)
        actors.kill(trainer._ranks[0])

    with tempfile.TemporaryDirectory() as folder:
        yield ClusterRig(
            cluster=port, roles=ROLES, lose_engine=lose_engine, lose_host=lose_host, lose_trainer=lose_trainer,
            request=request, instance=problem(0), samples=samples, folder=folder,
        )  # fmt: skip


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


INLINE = PortWorld(name="inline", run=run, engine=engine, env=env, scorer=scorer, trainer=trainer, cluster=cluster)
