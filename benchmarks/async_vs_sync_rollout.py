"""Rollout alone under three schedules, with the real control code, a real engine and environments that wait as drawn.

The trainer is off: it publishes the same weights again. What differs is who waits for whom:

    per turn         all environments of a batch step together, the batch's slowest trajectory holds back the next one
    per batch        each trajectory goes its own pace, the batch's slowest holds back the next batch (max_staleness 0)
    per trajectory   a free environment takes the next trajectory at once (ours)

Everything is in this process (the inline world). Invariant: the same number of environments and the same drawn latencies in
all of them: an episode's latencies depend on its own seed, so the matrix from which a bound is computed is drawn again here.

The bound is a ratio of two least times, each from the drawn latencies and the generation times in that schedule's own log,
turn by turn. Not from the mean generation: a barrier waits for the slowest of its turns, so with the mean a barrier seems to
lose what it must, the bound comes out too small, and a ratio above 1 hides what our side loses. Each side's least time over
what it took (`over_ideal`) stands beside the ratio, which is the quotient of the two: a barrier that is driven badly flatters
it, and the reader is to see that.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from peers_figures import Event, per_batch_s, per_trajectory_s, per_turn_s
from peers_tasks import WAITING_TURNS, waits_s
from rollart.config.real import model_of
from rollart.config.schema import RunConfig
from rollart.control.instances import Cursor
from rollart.control.run import run
from rollart.control.weights import VersionBook
from rollart.core.resources import Change, Degrees, Lease
from rollart.core.seeds import seed_of
from rollart.core.types import (
    Failure,
    Observation,
    Role,
    Sample,
    TaskInstance,
    TaskSpec,
    Tokens,
    Trajectory,
    TrajId,
    TurnFn,
)
from rollart.ports import Env, Port, Session, World
from rollart.runtime.actors import InlineActors
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.saved import SavedWeights
from rollart.runtime.tokenizers import build_tokenizer

Schedule = Literal["per_turn", "per_batch", "per_trajectory"]
GROUP = 8
TURN_TOKENS = 2
TASK = "waits"
STALENESS = 4
"""Of the schedule per trajectory: enough groups in the window that a free environment always finds an attempt that waits,
and that the slowest trajectory can still be trained."""
MODEL = {"kind": "scratch", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "max_positions": 64}
"""Generation is to be short beside the latencies, as it is on a device that is made for it."""
PATIENCE_S = 3600.0
IDLE_METRICS = {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "weights_changed": 0.0}
IDEAL: Mapping[Schedule, Callable[[Sequence[Sequence[float]], int, float], float]] = {
    "per_turn": per_turn_s,
    "per_batch": per_batch_s,
    "per_trajectory": per_trajectory_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What is rolled out: `batches` times `environments` trajectories with latencies of this mean and sigma / mean."""

    environments: int
    batches: int
    mean_s: float
    cv: float
    seed: int


class Rolled(NamedTuple):
    """One schedule, measured."""

    seconds: float
    """From the first attempt that starts to the release of the last batch."""
    turn_s: float
    """Mean time of a generation."""
    dropped: int
    """Groups that were sampled and not trained."""
    generated_s: Mapping[str, Mapping[int, float]]
    """Trajectory -> turn -> time of its generation."""


class _Idle(SavedWeights):
    """A trainer that takes no time and learns nothing."""

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        return

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return {}

    async def finish(self) -> Mapping[str, float]:
        return IDLE_METRICS


class _Machines:
    """Implements `ports.Env`: as many environments as there are, first come first served; stepped together if asked for."""

    def __init__(self, env: Env, number: int, *, together: bool) -> None:
        self._env = env
        self._free = asyncio.Semaphore(number)
        self._barrier = asyncio.Barrier(number) if together else None

    async def open(self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float) -> Session | Failure:
        await self._free.acquire()
        session = await self._env.open(instance, traj=traj, attempt=attempt, deadline_s=deadline_s)
        if isinstance(session, Failure):
            self._free.release()
            return session
        return _Machine(session, self._free, self._barrier)


class _Machine:
    """A session of one of the machines."""

    def __init__(self, session: Session, free: asyncio.Semaphore, barrier: asyncio.Barrier | None) -> None:
        self.host = session.host
        self._session = session
        self._free = free
        self._barrier = barrier
        self._open = True

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        return await self._session.reset(deadline_s=deadline_s)

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        observation = await self._session.step(action, deadline_s=deadline_s)
        if self._barrier is not None:
            await self._barrier.wait()
        return observation

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        return await self._session.run(turn)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._free.release()
        await self._session.close()


class _Cluster:
    """The cluster of the inline world, with a fixed number of environments."""

    def __init__(self, inner: LocalCluster, number: int, *, together: bool) -> None:
        self._inner = inner
        self._number = number
        self._together = together

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        return await self._inner.acquire(role, pool, degrees, deadline_s=deadline_s)

    async def release(self, lease: str) -> None:
        await self._inner.release(lease)

    async def start(self, lease: Lease) -> Port | Failure:
        port: Any = await self._inner.start(lease)
        if lease.role == "env" and not isinstance(port, Failure):
            return _Machines(port, self._number, together=self._together)
        started: Port | Failure = port
        return started

    def changes(self) -> AsyncIterator[Change]:
        return self._inner.changes()


def config(draw: Draw, schedule: Schedule) -> RunConfig:
    """The run of one schedule: all differ in `max_staleness` only."""
    staleness = STALENESS if schedule == "per_trajectory" else 0
    sessions = (staleness + 1) * draw.environments + 1
    kwargs = {"mean_s": draw.mean_s, "cv": draw.cv}
    limits = ("env_open_s", "env_step_s", "turn_s", "trajectory_s", "batch_s", "train_s", "weights_s")
    return RunConfig.model_validate({
        "name": schedule, "seed": draw.seed, "world": {"kind": "inline"}, "model": MODEL,
        "tasks": {TASK: {
            "env": {"kind": "python", "entry": "peers_tasks:Waits", "kwargs": kwargs},
            "size": draw.batches * draw.environments // GROUP, "max_turns": WAITING_TURNS, "max_tokens": TURN_TOKENS,
        }},
        "schedule": {
            "steps": draw.batches, "batch": draw.environments, "group_size": GROUP, "max_staleness": staleness,
        },
        "engine": {"kind": "native", "max_live": draw.environments}, "envs": {"sessions_per_host": sessions},
        "deadlines": dict.fromkeys(limits, PATIENCE_S), "eval": {"episodes": 0, "concurrency": 1},
    })  # fmt: skip


def matrix(draw: Draw, spec: TaskSpec) -> list[Sequence[float]]:
    """The latencies of every trajectory, turn by turn, in the order in which groups are opened."""
    return list(drawn_rows(draw, spec).values())


def drawn_rows(draw: Draw, spec: TaskSpec) -> dict[str, Sequence[float]]:
    """`matrix` by trajectory."""
    cursor = Cursor(spec, draw.seed)
    rows: dict[str, Sequence[float]] = {}
    for _ in range(draw.batches * draw.environments // GROUP):
        instance = cursor.next()
        for traj in map(instance.traj_id, range(GROUP)):
            rows[traj] = waits_s(seed_of(draw.seed, "chance", traj, 0), draw.mean_s, draw.cv)
    return rows


def specs_of(values: RunConfig) -> tuple[TaskSpec, ...]:
    return task_specs(values, build_tokenizer(values.tokenizer))


def roll(draw: Draw, schedule: Schedule) -> Rolled:
    """Roll all trajectories out under one schedule."""
    values = config(draw, schedule)
    vocab_size = build_tokenizer(values.tokenizer).vocab_size
    actors, events = InlineActors(), list[Event]()
    tensors = named_weights(build_model(hf_config(model_of(values), vocab_size), seed=draw.seed))

    async def trainer() -> _Idle:
        return _Idle(tensors, bucket_bytes=values.trainer.bucket_bytes, put=actors.put)

    inner = LocalCluster(values, vocab_size, actors, trainer)
    world = World(
        name="inline", cluster=_Cluster(inner, draw.environments, together=schedule == "per_turn"),
        store=VersionBook(), tasks=specs_of(values), sinks=(events.append,),
    )  # fmt: skip
    asyncio.run(run(values, world))
    return rolled(events)


def rolled(events: Sequence[Event]) -> Rolled:
    """What the log of a run says of its rollout."""
    turns = [one for one in events if one["kind"] == "turn_done"]
    generated_s: dict[str, dict[int, float]] = {}
    for one in turns:  # the parts of a turn that was interrupted add up
        own = generated_s.setdefault(one["traj"], {})
        own[one["turn"]] = own.get(one["turn"], 0.0) + one["data"]["seconds"]
    return Rolled(
        seconds=max(one["t"] for one in events if one["kind"] == "batch_released")
        - min(one["t"] for one in events if one["kind"] == "traj_started"),
        turn_s=statistics.mean(one["data"]["seconds"] for one in turns),
        dropped=sum(one["kind"] == "group_dropped" for one in events),
        generated_s=generated_s,
    )


def ideal_s(draw: Draw, schedule: Schedule, found: Rolled) -> float:
    """Least time of a schedule: each turn takes its drawn latency and the generation that this run measured for that very
    turn, so a barrier is held by the turn that was the slowest there. A turn that is not in the log (an end that nobody
    waited for) counts as the mean."""
    drawn = drawn_rows(draw, specs_of(config(draw, schedule))[0])
    rows = [
        [wait_s + found.generated_s.get(traj, {}).get(turn, found.turn_s) for turn, wait_s in enumerate(row)]
        for traj, row in drawn.items()
    ]
    return IDEAL[schedule](rows, draw.environments, 0.0)


def over_ideal(draw: Draw, schedule: Schedule, found: Rolled) -> float:
    """A schedule's speed over the most that it could have: its least time over the measured one, 1 at best."""
    return ideal_s(draw, schedule, found) / found.seconds


def bound(draw: Draw, over: Schedule, found: Mapping[Schedule, Rolled]) -> float:
    """The most that going per trajectory can gain over another schedule: from the drawn latencies, and from what each turn's
    generation took under each of the two. Where fewer environments generate at once a turn is shorter, and that is part
    of what can be gained. Gain over bound = `over_ideal` of ours / `over_ideal` of the other."""
    return ideal_s(draw, over, found[over]) / ideal_s(draw, "per_trajectory", found["per_trajectory"])
