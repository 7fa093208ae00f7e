"""Whole runs of the control code on virtual time, and what must hold in the event log of every one of them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.config.schema import RunConfig
from rollart.control.run import Result, run
from rollart.core.errors import RollartError
from rollart.core.seeds import rng
from rollart.core.types import Failure, TaskSpec, Trajectory, TrajId
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
            "engine": {"count": engines},
            "eval": sections.pop("eval", {"episodes": 0}),
            **sections,
        }
    )


def simulate(
    config: RunConfig, tasks: Sequence[TaskSpec], cluster: SimCluster | None = None, *, script: Script | None = None
) -> SimRun:
    """Run to the end on virtual time. A run that fails as it should is returned with its error."""
    sim = SimRun(config=config, cluster=cluster or SimCluster())

    async def main() -> None:
        beside = asyncio.create_task(script(sim.cluster, sim.rows)) if script is not None else None
        mine = {asyncio.current_task(), beside}
        try:
            sim.result = await run(config, world(tuple(tasks), sim.cluster, sinks=(sim.take,), kept=sim.kept))
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
    _check_batches(sim)
    _check_groups(sim)
    _check_attempts(sim)
    check_ledger(sim)
    _check_versions(sim)
    _check_routes(sim)


def _check_batches(sim: SimRun) -> None:
    schedule = sim.config.schedule
    batches = sim.of("batch_released")
    assert [batch["step"] for batch in batches] == list(range(schedule.steps))
    assert [batch["version"] for batch in batches] == list(range(schedule.steps))
    tasks = {row["group"]: row["task"] for row in sim.of("group_opened")}
    members = trained(sim)
    for batch in batches:
        assert Counter(tasks[group] for group in batch["groups"]) == Counter(batch["quota"])
        of_batch = [row for group in batch["groups"] for row in members[group]]
        lags = [batch["version"] - row["oldest_version"] for row in of_batch if row["oldest_version"] is not None]
        assert batch["trajectories"] == len(of_batch)
        assert batch["tokens"] == sum(row["sampled"] for row in of_batch)
        assert batch["staleness_max"] == max(lags, default=0) <= schedule.max_staleness


def trained(sim: SimRun) -> dict[str, list[Row]]:
    """Group -> the ended attempts that were trained with it."""
    completed = {row["group"]: row["seq"] for row in sim.of("group_completed")}
    released = {group for batch in sim.of("batch_released") for group in batch["groups"]}
    members: dict[str, list[Row]] = {group: [] for group in released}
    for row in sim.of("traj_finished", status="done", purpose="train"):
        if row["group"] in released and row["seq"] < completed[row["group"]]:
            members[row["group"]].append(row)
    return members


def _check_groups(sim: SimRun) -> None:
    """Each group is trained or dropped, once."""
    opened = Counter(row["group"] for row in sim.of("group_opened"))
    ended = Counter(group for batch in sim.of("batch_released") for group in batch["groups"])
    ended.update(row["group"] for row in sim.of("group_dropped"))
    assert opened == ended
    assert set(opened.values()) <= {1}
    over = {row["group"]: row["seq"] for row in sim.of("group_completed") + sim.of("group_dropped")}
    again = [row for row in sim.of("traj_started", purpose="train") if row["attempt"] > 0]
    assert all(row["seq"] < over[row["group"]] for row in again), "nothing is tried again for a group that is over"


def _check_attempts(sim: SimRun) -> None:
    """Each attempt begins once, ends in one terminal state, and its turns are its tokens."""
    started = Counter((row["traj"], row["attempt"]) for row in sim.of("traj_started"))
    finished = Counter((row["traj"], row["attempt"]) for row in sim.of("traj_finished"))
    assert started == finished
    assert set(started.values()) <= {1}
    sampled: Counter[tuple[str, int]] = Counter()
    for row in sim.of("turn_done"):
        sampled[row["traj"], row["attempt"]] += row["sampled"]
    for row in sim.of("traj_finished"):
        assert row["sampled"] == sampled[row["traj"], row["attempt"]]
    assert sum(t.instance.purpose == "train" for t in sim.kept) == len(sim.of("traj_finished", purpose="train"))


def check_ledger(sim: SimRun) -> None:
    """Every recorded balance closes; the last one agrees with the turns, batches and losses in the log."""
    for row in sim.of("ledger"):
        places = row["trained"] + sum(row["dropped"].values()) + row["buffered"] + row["in_flight"] + row["eval"]
        assert row["sampled"] == places == sum(row["engines"].values())
    last = sim.of("ledger")[-1]
    lost = sum(row["lost_tokens"] for row in sim.of("engine_lost"))
    duplicates = sum(row["tokens"] for row in sim.of("tokens_dropped", reason="duplicate"))
    assert last["sampled"] == sum(row["sampled"] for row in sim.of("turn_done")) + lost + duplicates
    assert last["trained"] == sum(batch["tokens"] for batch in sim.of("batch_released"))
    assert last["eval"] == sum(row["sampled"] for row in sim.of("traj_finished", purpose="eval"))
    assert last["buffered"] == last["in_flight"] == 0


def _check_versions(sim: SimRun) -> None:
    """Versions rise on each engine, never fall inside a trajectory, and each apply serves what was published."""
    applied: dict[str, list[int]] = defaultdict(list)
    for row in sim.of("applied"):
        applied[row["engine"]].append(row["version"])
        assert row["matches"]
    assert all(versions == sorted(set(versions)) for versions in applied.values())
    last: dict[tuple[str, int], int] = {}
    for row in sim.of("turn_done"):
        for version, n_tokens in row["spans"]:
            assert n_tokens > 0
            assert version >= last.get((row["traj"], row["attempt"]), 0)
            last[row["traj"], row["attempt"]] = version
    for trajectory in sim.kept:
        versions = [span.version for span in trajectory.spans]
        assert versions == sorted(versions)
        assert trajectory.n_sampled == sum(span.n_tokens for span in trajectory.spans)


def _check_routes(sim: SimRun) -> None:
    """No turn goes to an engine whose tokens could not be trained any more, or are older than those that it goes on from."""
    served: dict[str, int] = {}
    newest: dict[tuple[str, int], int] = {}
    trained_at = {(row["traj"], row["attempt"]) for row in sim.of("traj_started", purpose="train")}
    oldest_allowed = 0
    for row in sim.rows:
        if row["kind"] == "applied":
            served[row["engine"]] = row["version"]
        elif row["kind"] == "batch_released":
            oldest_allowed = row["version"] + 1 - sim.config.schedule.max_staleness
        elif row["kind"] == "turn_done" and row["spans"]:
            newest[row["traj"], row["attempt"]] = row["spans"][-1][0]
        elif row["kind"] == "turn_routed" and (attempt := (row["traj"], row["attempt"])) in trained_at:
            assert served[row["engine"]] >= max(oldest_allowed, newest.get(attempt, 0))
