"""The simulated world, for the contract suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from rigs import ClusterRig, EngineRig, EnvRig, PortWorld, ScorerRig, TrainerRig

from rollart.core.errors import failure
from rollart.core.resources import DEFAULT_DEGREES
from rollart.core.types import (
    Failure,
    Fingerprint,
    GroupId,
    Manifest,
    Observation,
    Purpose,
    RequestId,
    Role,
    Sample,
    Sampling,
    Segment,
    TaskInstance,
    Tokens,
    Trajectory,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.ports import Engine, Port, Trainer
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.envs import Call, EnvModel, Fault, ScorerModel, SimEnv, SimScorer
from rollart.sim.loop import run
from rollart.sim.world import SimCluster, SimTrainer, TrainerModel

ROLES: tuple[Role, ...] = ("train", "env", "score", "mixed")


async def started(cluster: SimCluster, role: Role) -> Port:
    lease = await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=60.0)
    assert not isinstance(lease, Failure)
    port = await cluster.start(lease)
    assert not isinstance(port, Failure)
    return port


def request(
    name: str, *, turn: int = 0, context: Segment | None = None, max_tokens: int = 8, purpose: Purpose = "train",
    pin: Version | None = None, min_version: Version = 0,
) -> TurnRequest:  # fmt: skip
    return TurnRequest(
        id=RequestId(TrajId(name), 0, turn, 0), model="policy", purpose=purpose, domain="t",
        context=context or Segment(pieces=(Tokens(n_tokens=16),)), max_tokens=max_tokens, sampling=Sampling(), pin=pin,
        min_version=min_version,
    )  # fmt: skip


async def publish(version: Version) -> Manifest:
    return Manifest(version=version, shards={"w": 8}, buckets=1, fingerprint=Fingerprint(digest=f"digest-{version}"))


@asynccontextmanager
async def engine() -> AsyncIterator[EngineRig]:
    model = EngineModel(token_s=0.1, prefill_token_s=0.001, prefetch_s=0.3, apply_s=0.5)
    cluster = SimCluster(engine=model)
    port = await started(cluster, "mixed")
    assert isinstance(port, SimEngine)
    await port.prefetch(await publish(0))
    await port.apply(0, kept="rebuild", pinned_deadline_s=0.0)

    async def lose() -> None:
        cluster.lose_engine(0)

    yield EngineRig(engine=port, request=request, publish=publish, lose=lose, long_tokens=100, tick_s=0.07)


def problem(index: int) -> TaskInstance:
    return TaskInstance(task="t", epoch=0, index=index, seed=index)


@asynccontextmanager
async def env() -> AsyncIterator[EnvRig]:
    """Problems are told apart by the session's trajectory in the models, so the odd ones are wrapped by instance."""
    faults: dict[str, dict[Call, Fault]] = {
        "stuck": {"step": "hang"},
        "raising": {"step": failure("env", "raised", "ValueError: no")},
        "unopenable": {"open": failure("env", "raised", "OSError: no such image")},
    }

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        return faults.get(traj.split("@")[-1], {}).get(call)

    model = EnvModel(latency_s=lambda traj, attempt, call, turn: 0.2, turns=lambda traj, attempt: 3, fault=fault)
    port = SimEnvByInstance(model)

    async def sessions() -> int:
        return port.open_sessions

    def act(observation: Observation) -> tuple[Tokens, ...]:
        return (Tokens(n_tokens=2),)

    yield EnvRig(
        env=port, instance=problem, most_turns=3, act=act, sessions=sessions, step_s=5.0,
        stuck=replace(problem(0), task="stuck"), raising=replace(problem(0), task="raising"),
        unopenable=replace(problem(0), task="unopenable"),
    )  # fmt: skip


class SimEnvByInstance(SimEnv):
    """Lets the models see which task a session is for."""

    async def open(self, instance, *, traj, attempt, deadline_s):  # type: ignore[no-untyped-def]
        return await super().open(
            instance, traj=TrajId(f"{traj}@{instance.task}"), attempt=attempt, deadline_s=deadline_s
        )


def trajectory(name: str) -> Trajectory:
    return Trajectory(
        id=TrajId(name), attempt=0, group_id=GroupId("g"), instance=problem(0), member=0, segments=(), status="done",
        finish_cause="env_done",
    )  # fmt: skip


@asynccontextmanager
async def scorer() -> AsyncIterator[ScorerRig]:
    def score(one: Trajectory) -> float | Failure:
        return failure("scorer", "raised", "HTTP 500") if one.id == "broken" else 0.5

    yield ScorerRig(
        scorer=SimScorer(ScorerModel(latency_s=lambda one: 9.0 if one.id == "slow" else 1.0, score=score)),
        good=trajectory("good"), broken=trajectory("broken"), slow=trajectory("slow"), score_s=5.0,
    )  # fmt: skip


def samples(number: int) -> list[Sample]:
    segment = Segment(pieces=(Tokens(n_tokens=4),))
    return [Sample(traj=TrajId(f"t{number}"), task="t", segment=segment, advantage=1.0)]


@asynccontextmanager
async def trainer() -> AsyncIterator[TrainerRig]:
    model = TrainerModel(accumulate_s=1.0, finish_s=1.0, publish_s=1.0)
    yield TrainerRig(trainer=SimTrainer(model), twin=SimTrainer(model), samples=samples)


@asynccontextmanager
async def cluster() -> AsyncIterator[ClusterRig]:
    port = SimCluster()

    async def lose_engine(engine: Engine) -> None:
        await asyncio.sleep(0)
        port.lose_engine([one.info.id for one in port.engines].index(engine.info.id))

    async def lose_host(name: str) -> None:
        port.lose_host(name)

    async def lose_trainer(trainer: Trainer) -> None:
        assert isinstance(trainer, SimTrainer)
        port.lose_trainer(index=port.trainers.index(trainer))

    yield ClusterRig(
        cluster=port, roles=ROLES, lose_engine=lose_engine, lose_host=lose_host, lose_trainer=lose_trainer,
        request=request, instance=problem(0), samples=samples, folder="disk",
    )  # fmt: skip


SIM = PortWorld(name="sim", run=run, engine=engine, env=env, scorer=scorer, trainer=trainer, cluster=cluster)
