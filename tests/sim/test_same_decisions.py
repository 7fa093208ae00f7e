"""One scenario in two worlds: the virtual one, and the runtime's own proxies and actors with scripted environments.

Control cannot tell one from the other, so what it decides must be the same, event for event, for each trajectory and each
group; only times differ, and what is decided by them (which engine is less loaded).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch

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
from rollart.sim.world import SimCluster, world

BROKEN = failure("env", "raised", "a scripted failure")
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
    """Actors in this process; environments as above."""

    seed = 0
    failing: Env

    async def start(self, lease: Lease) -> Port | Failure:
        port = await super().start(lease)
        if not isinstance(port, RemoteEnv):
            return port
        self.failing = Failing(port, self.seed)
        return self.failing


def a_scenario(seed: int, **schedule: Any) -> RunConfig:
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
            "failure": {"on_failure": {"kind": "retry", "max_retries": 4, "backoff_s": 0.01}},
            "engine": {"kind": "native", "count": 2, "max_live": 32, "kv_tokens": 8192},
            "eval": {"episodes": 0},
            "warm_start": {"steps": 0},
        }
    )


def on_the_runtime(config: RunConfig, tokenizer: Tokenizer, specs: tuple[TaskSpec, ...], sink: Sink) -> None:
    torch.set_num_threads(1)
    actors = InlineActors()
    cluster = Runtime(config, tokenizer.vocab_size, actors, lambda: start_trainer(config, tokenizer.vocab_size, actors))
    cluster.seed = config.seed
    asyncio.run(run(config, World(name="inline", cluster=cluster, store=VersionBook(), tasks=specs, sinks=(sink,))))


def on_virtual_time(config: RunConfig, specs: tuple[TaskSpec, ...], sink: Sink) -> None:
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
    cluster = SimCluster(env=env, engine=EngineModel(token_s=0.02, prefetch_s=0.1, apply_s=0.05))
    run_virtually(run(config, world(specs, cluster, sinks=(sink,))))


def decisions(events: list[Mapping[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """What was decided about each trajectory, each group, and the run, in order."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event["kind"] in KEPT:
            row = {**event, **event["data"]}
            about = row.get("traj") or row.get("group") or "run"
            found[about].append((event["kind"], {name: row[name] for name in KEPT[event["kind"]]}))
    return found


@pytest.mark.parametrize("schedule", [{}, {"barrier": "turn", "score": "batch"}])
def test_control_decides_the_same_in_both_worlds(schedule: dict[str, Any]) -> None:
    config = a_scenario(3, **schedule)
    tokenizer = build_tokenizer(config.tokenizer)
    specs = task_specs(config, tokenizer)
    real: list[Mapping[str, Any]] = []
    virtual: list[Mapping[str, Any]] = []
    on_the_runtime(config, tokenizer, specs, real.append)
    on_virtual_time(config, specs, virtual.append)
    ours, theirs = decisions(real), decisions(virtual)
    assert ours.keys() == theirs.keys()
    for about in ours:
        assert ours[about] == theirs[about], about
    assert any(kind == "failure_decided" for rows in ours.values() for kind, _ in rows), "some attempts fail"
    turns = [row["turns"] for rows in ours.values() for kind, row in rows if kind == "traj_finished"]
    assert set(turns) >= {0, 1, 2, 3}
