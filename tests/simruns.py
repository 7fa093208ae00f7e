"""Whole runs of the control code on virtual time, and what must hold in the event log of every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.config.schema import RunConfig
from rollart.control.instances import Cursor
from rollart.control.run import Result, run
from rollart.core.errors import RollartError
from rollart.core.seeds import rng
from rollart.core.snapshot import Resumed
from rollart.core.types import Failure, TaskSpec, Trajectory, TrajId
from rollart.observe.audit import audit, ledger_closes
from rollart.observe.audit_figures import figures
from rollart.observe.audit_record import Record
from rollart.ports import Checkpoints, World
from rollart.sim.envs import Call, EnvModel
from rollart.sim.loop import run as run_virtually
from rollart.sim.world import SimCluster, world

Row = dict[str, Any]
"""An event with its `data` beside its ids."""
Script = Callable[[SimCluster, list[Row]], Coroutine[Any, Any, None]]
"""What happens to the cluster beside the run; sees the events so far."""


@dataclass(kw_only=True)
class SimRun:
    config: RunConfig
    tasks: Sequence[TaskSpec]
    cluster: SimCluster
    events: list[Mapping[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    kept: list[Trajectory] = field(default_factory=list)
    result: Result | None = None
    error: RollartError | None = None
    ended_s: float = 0.0
    tasks_left: list[str] = field(default_factory=list)
    """Names of asyncio tasks that outlived the run."""

    def of(self, kind: str, **wanted: object) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind and all(row.get(k) == v for k, v in wanted.items())]

    def take(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self.rows.append({**event, **event["data"]})


def a_task(name: str = "a", *, ratio: float = 1.0, instances: int = 1000, held_out: int = 0, **spec: Any) -> TaskSpec:
    seeds = range(instances)
    return TaskSpec(
        name=name, ratio=ratio, train=seeds, held_out=range(instances, instances + held_out), **{"max_turns": 8, **spec}
    )


def a_config(tasks: Sequence[TaskSpec], *, seed: int = 0, engines: int = 1, **sections: Any) -> RunConfig:
    """Schedule and deadlines small; evaluation off unless `eval` says otherwise. Sections are given as maps."""
    schedule = {"steps": 4, "batch": 16, "group_size": 4, **sections.pop("schedule", {})}
    return RunConfig.model_validate(
        {
            "seed": seed,
            "tasks": {spec.name: {"env": {"kind": "max_digit"}, "ratio": spec.ratio} for spec in tasks},
            "schedule": schedule,
            "engine": {"kind": "native", "count": engines},
            "eval": sections.pop("eval", {"episodes": 0}),
            **sections,
        }
    )


def simulate(
    config: RunConfig, tasks: Sequence[TaskSpec], cluster: SimCluster | None = None, *, script: Script | None = None,
    checkpoints: Checkpoints | None = None, resumed: Resumed | None = None,
    changed: Callable[[World], World] = lambda world: world,
) -> SimRun:  # fmt: skip
    """Run to the end on virtual time, in the world as `changed` makes it. A run that fails as it should is returned with
    its error."""
    sim = SimRun(config=config, tasks=tasks, cluster=cluster or SimCluster())
    inside = world(
        tuple(tasks), sim.cluster, sinks=(sim.take,), kept=sim.kept, checkpoints=checkpoints, resumed=resumed
    )
    around = changed(inside)

    async def main() -> None:
        beside = asyncio.create_task(script(sim.cluster, sim.rows)) if script is not None else None
        mine = {asyncio.current_task(), beside}
        try:
            sim.result = await run(config, around)
        except RollartError as error:
            sim.error = error
        sim.ended_s = asyncio.get_running_loop().time()
        sim.tasks_left = [task.get_name() for task in asyncio.all_tasks() - mine]
        if beside is not None:
            beside.cancel()

    run_virtually(main())
    return sim


# --- models --------------------------------------------------------------------------------------------------------------


def random_latency(mean_s: float, seed: int = 0) -> Callable[[TrajId, int, Call, int], float]:
    """Exponential: a few calls take many times the mean."""
    return lambda traj, attempt, call, turn: rng(seed, "latency", traj, attempt, call, turn).expovariate(1 / mean_s)


def random_env(seed: int = 0, *, mean_s: float = 0.5, most_turns: int = 3, **more: Any) -> EnvModel:
    """1 to `most_turns` turns, rewards 0 and 1, exponential latencies."""
    return EnvModel(
        **{
            "latency_s": random_latency(mean_s, seed),
            "turns": lambda traj, attempt: rng(seed, "turns", traj).randint(1, most_turns),
            "reward": lambda traj, attempt: float(rng(seed, "reward", traj, attempt).random() < 0.5),
            **more,
        }
    )


def failing(share: float, why: Failure, seed: int = 0) -> Callable[[TrajId, int, Call, int], Failure | None]:
    """This share of attempts fails at its second call, chosen at random."""

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        return why if call == "step" and turn == 0 and rng(seed, "fault", traj, attempt).random() < share else None

    return fault


# --- what must hold in every run -----------------------------------------------------------------------------------------


def check(sim: SimRun) -> None:
    """All promises that the log of a run that came to its end must keep."""
    assert sim.error is None
    assert sim.tasks_left == []
    assert audit(record_of(sim)) == []
    assert figures(record_of(sim)) == []


def record_of(sim: SimRun) -> Record:
    """Everything that is known of a run."""
    tasks = {spec.name: spec for spec in sim.tasks}

    def order(task: str, epoch: int) -> list[int]:
        cursor = Cursor(tasks[task], sim.config.seed, epoch=epoch)
        return [cursor.next().index for _ in tasks[task].train]

    return Record(
        log=sim.events,
        order=order,
        learned=[[sample.traj for sample in part] for part in sim.cluster.trainers[-1].batches],
        kept=sim.kept,
        min_members=sim.config.failure.min_group_size,
    )


def trained(sim: SimRun) -> dict[str, list[Row]]:
    """Group -> the ended attempts that were trained with it."""
    released = {group for batch in sim.of("batch_released") for group in batch["groups"]}
    members = record_of(sim).members
    return {group: members.get(group, []) for group in released}


def check_ledger(sim: SimRun) -> None:
    """Every recorded balance closes; the last one agrees with the turns, batches and losses in the log."""
    assert list(ledger_closes(record_of(sim))) == []
