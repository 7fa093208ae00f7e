"""Engines that die, hang or are given up while trajectories run on them: turns go on elsewhere, the ledger closes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import failure
from rollart.core.types import Failure, TurnRequest
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import EnvModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, Script, SimRun, a_config, a_task, check, random_env, simulate


def losing(index: int, at_s: float, told_after_s: float = 0.0) -> Script:
    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(at_s)
        cluster.lose_engine(index, told_after_s=told_after_s)

    return script


def a_run_that_loses(at_s: float, *, told_after_s: float = 0.0, engines: int = 2) -> SimRun:
    """64 trajectories of 5 turns on two engines; the first engine dies at `at_s`."""
    tasks = [a_task(max_tokens=10)]
    config = a_config(tasks, engines=engines, schedule={"steps": 2, "batch": 32, "group_size": 8})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.3, apply_s=0.2),
        env=EnvModel(turns=lambda traj, attempt: 5),
        trainer=TrainerModel(finish_s=2.0),
    )
    return simulate(config, tasks, cluster, script=losing(0, at_s, told_after_s))


def test_the_run_goes_on_without_the_engine_that_died() -> None:
    sim = a_run_that_loses(at_s=2.25)
    check(sim)
    (lost,) = sim.of("engine_lost")
    assert lost["engine"] == "engine-0"
    assert lost["failure"] == "engine lost: engine-0: process died"
    assert lost["lost_tokens"] > 0
    assert sim.of("ledger")[-1]["dropped"]["engine_lost"] == lost["lost_tokens"]
    after = [row for row in sim.of("turn_routed") if row["seq"] > lost["seq"]]
    assert {row["engine"] for row in after} == {"engine-1"}


def test_trajectories_go_on_from_the_turns_that_were_delivered() -> None:
    sim = a_run_that_loses(at_s=2.25)
    engines: dict[str, list[tuple[int, str]]] = {}
    for row in sim.of("turn_done"):
        if row["sampled"]:
            engines.setdefault(row["traj"], []).append((row["turn"], row["engine"]))
    moved = [turns for turns in engines.values() if {engine for _, engine in turns} == {"engine-0", "engine-1"}]
    assert moved
    for turns in moved:
        assert [turn for turn, _ in turns] == [0, 1, 2, 3, 4]
        assert [engine for _, engine in turns] == sorted(engine for _, engine in turns)
    assert sim.of("failure_decided") == []
    assert {row["status"] for row in sim.of("traj_finished")} == {"done"}


@pytest.mark.parametrize(
    ("at_s", "turns", "turn_tokens", "prefetch_s", "rebuilds"),
    [(21.5, 6, 10, 1.0, True), (26.0, 6, 10, 1.0, True), (58.0, 2, 150, 2.5, False), (88.5, 2, 150, 2.5, False)],
)
def test_versions_do_not_fall_when_a_trajectory_moves_to_an_engine_that_is_behind(
    at_s: float, turns: int, turn_tokens: int, prefetch_s: float, rebuilds: bool
) -> None:
    """Engine 1 gets each version much later than engine 0, which dies: between two turns of its trajectories, or in the
    middle of turns that updates had cut. They wait for engine 1 to catch up."""

    def slow(engine: str, command: Command, nth: int) -> Failure | None:
        late = engine == "engine-1" and command == "prefetch" and nth % 3 < 2
        return failure("store", "timeout", "slow disk") if late else None

    tasks = [a_task(max_tokens=turn_tokens)]
    config = a_config(tasks, engines=2, schedule={"steps": 8, "max_staleness": 3}, failure={"restarts": 0})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=prefetch_s, apply_s=0.1, fault=slow, rebuilds=rebuilds),
        env=EnvModel(turns=lambda traj, attempt: turns, latency_s=lambda traj, attempt, call, turn: 0.3),
        trainer=TrainerModel(finish_s=4.0),
    )
    sim = simulate(config, tasks, cluster, script=losing(0, at_s))
    check(sim)
    (lost,) = sim.of("engine_lost")
    served = [
        max(row["version"] for row in sim.of("applied", engine=engine) if row["seq"] < lost["seq"])
        for engine in ("engine-0", "engine-1")
    ]
    assert served[0] > served[1]
    moved = {row["traj"] for row in sim.of("turn_done", engine="engine-0") if row["seq"] < lost["seq"]}
    assert any(row["traj"] in moved for row in sim.of("turn_done", engine="engine-1") if row["seq"] > lost["seq"])


@pytest.mark.parametrize("told_after_s", [0.0, 0.05, 0.25])
def test_no_trajectory_fails_when_the_loss_is_told_later_than_it_is_felt(told_after_s: float) -> None:
    """A dead engine answers `failed` at once and looks idle: sending the turn there again must not use up its tries."""
    sim = a_run_that_loses(at_s=2.25, told_after_s=told_after_s)
    check(sim)
    assert sim.of("failure_decided") == []


@given(at_ticks=st.integers(0, 80), told_after_s=st.sampled_from([0.0, 0.1, 5.0]), engines=st.integers(2, 3))
@settings(max_examples=25)
def test_the_ledger_closes_at_whatever_moment_an_engine_dies(at_ticks: int, told_after_s: float, engines: int) -> None:
    """Turns end in multiples of 1 s here, so many of these moments are those in which dozens of answers are under way."""
    check(a_run_that_loses(at_ticks / 4 + 0.5, told_after_s=told_after_s, engines=engines))


def test_an_engine_that_does_not_answer_one_request_costs_that_attempt_only() -> None:
    def never(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        return "dead" if command == "generate" and nth == 5 else None

    tasks = [a_task()]
    config = a_config(tasks, schedule={"max_staleness": 0}, deadlines={"turn_s": 20.0})
    cluster = SimCluster(engine=EngineModel(token_s=0.1, fault=never), env=random_env())
    sim = simulate(config, tasks, cluster)
    check(sim)
    (failed,) = sim.of("traj_finished", status="failed")
    assert failed["cause"] == "timeout"
    assert "engine timeout" in failed["failure"]
    (decided,) = sim.of("failure_decided")
    assert decided["decision"] == "Retry"
    (again,) = sim.of("traj_finished", traj=failed["traj"], attempt=1)
    assert again["status"] == "done"


def test_a_turn_that_passes_its_deadline_is_aborted_and_its_tokens_are_counted() -> None:
    tasks = [a_task(max_tokens=100)]
    config = a_config(tasks, schedule={"max_staleness": 0}, deadlines={"turn_s": 5.0})
    slow: set[str] = set()

    def length(request: TurnRequest) -> int:
        if not slow:
            slow.add(request.id.traj)
        return 99 if request.id.traj in slow and request.id.attempt == 0 else 3

    cluster = SimCluster(engine=EngineModel(token_s=0.125, length=length), env=random_env())
    sim = simulate(config, tasks, cluster)
    check(sim)
    (turn,) = [row for row in sim.of("turn_done") if "failure" in row]
    assert turn["seconds"] == 5.0
    assert turn["sampled"] == 40
    (failed,) = sim.of("traj_finished", status="failed")
    assert failed["sampled"] == 40
    assert sim.of("ledger")[-1]["dropped"] == {"engine_lost": 40}
    (again,) = sim.of("traj_finished", traj=failed["traj"], attempt=1)
    assert again["status"] == "done"


def test_a_short_outage_of_an_engine_costs_no_attempt() -> None:
    """It fails at once what it is given; turns are sent again after a pause that outlasts the outage."""

    def outage(engine: str, command: Command, nth: int) -> Failure | None:
        now = asyncio.get_running_loop().time()
        return failure("engine", "raised", "restarting") if command == "generate" and 3.0 <= now < 3.25 else None

    tasks = [a_task()]
    sim = simulate(a_config(tasks), tasks, SimCluster(engine=EngineModel(token_s=0.1, fault=outage), env=random_env()))
    check(sim)
    assert any("restarting" in row.get("failure", "") for row in sim.of("turn_done"))
    assert sim.of("failure_decided") == []


def test_an_engine_that_fails_many_turns_does_not_kill_the_run() -> None:
    """A failure that another try may mend is tried again, on another engine or later."""

    def now_and_then(engine: str, command: Command, nth: int) -> Failure | None:
        return failure("engine", "raised", "out of memory") if command == "generate" and nth % 3 == 0 else None

    tasks = [a_task()]
    cluster = SimCluster(engine=EngineModel(token_s=0.1, fault=now_and_then), env=random_env())
    sim = simulate(a_config(tasks), tasks, cluster)
    check(sim)
    assert sum("failure" in row for row in sim.of("turn_done")) > 10
