"""One scenario in two worlds: the virtual one, and the runtime's own proxies and actors with scripted environments.

Control cannot tell one from the other, so what it decides must be the same, event for event, for each trajectory and each
group; only times differ, and what is decided by them (which engine is less loaded). Where more is decided by what comes first
(asynchronous schedules), the real world is made to answer in the order in which the virtual one did (`played.py`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from played import Score, behind
from rollart.config.schema import RunConfig
from rollart.control.run import run
from rollart.control.weights import VersionBook
from rollart.core.errors import failure
from rollart.core.events import Sink
from rollart.core.resources import Lease
from rollart.core.seeds import unit
from rollart.core.types import Failure, TaskInstance, TaskSpec, TrajId
from rollart.ports import Env, Port, Session, World
from rollart.runtime.actors import InlineActors
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.envs.remote import RemoteEnv
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.envs.text import StepResult
from rollart.runtime.tokenizers import Tokenizer, build_tokenizer
from rollart.runtime.trainer.facade import start_trainer
from rollart.sim.engine import EngineModel
from rollart.sim.envs import Call, EnvModel
from rollart.sim.loop import run as run_virtually
from rollart.sim.world import SimCluster, TrainerModel, world

BROKEN = failure("env", "raised", "a scripted failure")
LIMIT_S = 30.0
"""Of a run in real time, which takes a second or two."""
KEPT = {
    "traj_started": ("attempt", "purpose"),
    "env_opened": ("attempt",),
    "turn_routed": ("attempt", "turn", "part", "sticky"),
    "turn_done": ("attempt", "turn", "part", "sampled", "spans"),
    "env_stepped": ("attempt", "turn", "bad_action"),
    "scored": ("attempt", "reward"),
    "traj_finished": (
        "attempt", "status", "cause", "reward", "turns", "sampled", "oldest_version", "newest_version", "spans",
    ),
    "failure_decided": ("attempt", "failure", "decision"),
    "abort_requested": ("attempt", "reason"),
    "group_opened": ("members", "room"),
    "group_completed": ("members", "reward_mean", "oldest_version"),
    "group_dropped": ("reason",),
    "batch_released": ("step", "version", "groups", "trajectories", "tokens", "staleness_max", "quota"),
    "step_finished": ("step", "version", "trained_tokens"),
    "published": ("step", "version"),
}  # fmt: skip
"""Decision events, and the fields of theirs that are no times, loads or figures of a device."""


def turns_of(seed: int) -> int:
    return 1 + seed % 3


def reward_of(seed: int) -> float:
    return float(seed % 4 < 2)


class Scripted:
    """As many turns, and the reward, that the problem's number says."""

    def reset(self, seed: int) -> str:
        self.seed, self.turn = seed, 0
        return "go\n"

    def step(self, action: str) -> StepResult:
        self.turn += 1
        over = self.turn == turns_of(self.seed)
        return StepResult("on\n", reward=reward_of(self.seed) if over else 0.0, terminated=over)


class Failing:
    """The runtime's environments, some of which cannot be opened."""

    def __init__(self, env: RemoteEnv, seed: int) -> None:
        self._env = env
        self._seed = seed

    async def open(self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float) -> Session | Failure:
        if broken(self._seed, traj, attempt):
            return BROKEN
        return await self._env.open(instance, traj=traj, attempt=attempt, deadline_s=deadline_s)


def broken(seed: int, traj: TrajId, attempt: int) -> bool:
    return unit(seed, "broken", traj, attempt) < 0.2


class Runtime(LocalCluster):
    """Actors in this process; environments as above; answers in the order of a score, where there is one."""

    seed = 0
    failing: Env
    score: Score | None = None

    async def start(self, lease: Lease) -> Port | Failure:
        port = await super().start(lease)
        if isinstance(port, RemoteEnv):
            port = self.failing = Failing(port, self.seed)
        made: Port | Failure = port if self.score is None else behind(port, lease.role, self.score)
        return made


@dataclass(kw_only=True)
class Virtual(SimCluster):
    """Writes the order of its answers down."""

    score: Score = field(default_factory=Score)

    async def start(self, lease: Lease) -> Port | Failure:
        made: Port | Failure = behind(await super().start(lease), lease.role, self.score)
        return made


def a_scenario(seed: int, *, backoff_s: float = 0.01, **schedule: Any) -> RunConfig:
    task = {
        "env": {"kind": "python", "entry": "test_same_decisions:Scripted"},
        "size": 40,
        "max_turns": 4,
        "max_tokens": 1,
    }
    return RunConfig.model_validate(
        {
            "seed": seed,
            "world": {"kind": "inline"},
            "model": {"kind": "scratch", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64},
            "tasks": {"a": task, "b": {**task, "ratio": 2}},
            "schedule": {"steps": 3, "batch": 12, "group_size": 2, "max_staleness": 0, **schedule},
            "failure": {"on_failure": {"kind": "retry", "max_retries": 4, "backoff_s": backoff_s}},
            "engine": {"kind": "native", "count": 2, "max_live": 32, "kv_tokens": 8192},
            "eval": {"episodes": 0},
            "warm_start": {"steps": 0},
        }
    )


def on_the_runtime(
    config: RunConfig, tokenizer: Tokenizer, specs: tuple[TaskSpec, ...], sink: Sink, score: Score | None = None
) -> None:
    torch.set_num_threads(1)
    actors = InlineActors()
    cluster = Runtime(config, tokenizer.vocab_size, actors, lambda: start_trainer(config, tokenizer.vocab_size, actors))
    cluster.seed, cluster.score = config.seed, score
    there = World(name="inline", cluster=cluster, store=VersionBook(), tasks=specs, sinks=(sink,))
    asyncio.run(asyncio.wait_for(run(config, there), LIMIT_S))


def on_virtual_time(config: RunConfig, specs: tuple[TaskSpec, ...], sink: Sink) -> Score:
    """The order in which it answered."""
    train = {spec.name: spec.train for spec in specs}

    def seed_of(traj: TrajId) -> int:
        _, task, _, index, _ = traj.split("/")
        return train[task][int(index)]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        return BROKEN if call == "open" and broken(config.seed, traj, attempt) else None

    env = EnvModel(
        turns=lambda traj, attempt: turns_of(seed_of(traj)), reward=lambda traj, attempt: reward_of(seed_of(traj)),
        latency_s=lambda traj, attempt, call, turn: 0.01 * unit("latency", traj, attempt, call, turn), fault=fault,
    )  # fmt: skip
    cluster = Virtual(
        env=env, engine=EngineModel(token_s=0.02, prefetch_s=0.1, apply_s=0.05), trainer=TrainerModel(finish_s=0.07)
    )
    run_virtually(run(config, world(specs, cluster, sinks=(sink,))))
    return cluster.score


def decisions(events: list[Mapping[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """What was decided about each trajectory, each group, and the run, in order."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event["kind"] in KEPT:
            row = {**event, **event["data"]}
            about = row.get("traj") or row.get("group") or "run"
            found[about].append((event["kind"], {name: row[name] for name in KEPT[event["kind"]]}))
    return found


def both(config: RunConfig, *, played: bool) -> tuple[dict[str, Any], dict[str, Any], list[Mapping[str, Any]]]:
    """Decisions of the runtime and of the virtual world, and the events of the latter."""
    tokenizer = build_tokenizer(config.tokenizer)
    specs = task_specs(config, tokenizer)
    real: list[Mapping[str, Any]] = []
    virtual: list[Mapping[str, Any]] = []
    score = on_virtual_time(config, specs, virtual.append)
    on_the_runtime(config, tokenizer, specs, real.append, Score(score.order) if played else None)
    return decisions(real), decisions(virtual), virtual


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for about in ours:
        assert ours[about] == theirs[about], about


@pytest.mark.parametrize("schedule", [{}, {"barrier": "turn", "score": "batch"}], ids=["each by itself", "barrier"])
def test_control_decides_the_same_in_both_worlds(schedule: dict[str, Any]) -> None:
    ours, theirs, _ = both(a_scenario(3, **schedule), played=False)
    assert_same(ours, theirs)
    assert any(kind == "failure_decided" for rows in ours.values() for kind, _ in rows), "some attempts fail"
    turns = [row["turns"] for rows in ours.values() for kind, row in rows if kind == "traj_finished"]
    assert set(turns) >= {0, 1, 2, 3}


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        {"max_staleness": 0},
        {"max_staleness": 1},
        {"max_staleness": 2},
        {"max_staleness": 1, "sync_order": "paper"},
        {"max_staleness": 2, "sync_order": "paper"},
        {"max_staleness": 1, "redundancy": 1},
    ],
    ids=["early 0", "early 1", "early 2", "paper 1", "paper 2", "redundant members"],
)
def test_what_is_decided_by_what_comes_first_is_the_same_where_the_same_comes_first(
    seed: int, schedule: dict[str, Any]
) -> None:
    ours, theirs, virtual = both(a_scenario(seed, backoff_s=0.0, **schedule), played=True)
    assert_same(ours, theirs)
    staleness = [event["data"]["staleness_max"] for event in virtual if event["kind"] == "batch_released"]
    assert max(staleness) >= min(1, schedule["max_staleness"]), "rollout and training overlap"
