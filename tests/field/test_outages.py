"""Services that are away for a while, and messages that never arrive: the work is done later, and once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rollart.core.errors import RunFailed, failure
from rollart.core.types import Failure, Trajectory, TrajId
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import Call, EnvModel, ScorerModel
from rollart.sim.trainer import TrainerModel
from rollart.sim.world import SimCluster
from simruns import a_config, a_task, check, random_env, simulate

DOWN = (20.0, 80.0)
"""From when to when the service is away, in seconds: one minute."""


def is_down() -> bool:
    return DOWN[0] <= asyncio.get_running_loop().time() < DOWN[1]


def test_a_tool_server_that_is_down_for_a_minute_costs_time_and_no_sample() -> None:
    """Field case 28: what fails meanwhile is tried again until the server is back; nothing of it is trained as reward 0,
    and the other task keeps its share."""
    tasks = [a_task("plain"), a_task("tools")]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        away = "/tools/" in traj and call == "step" and is_down()
        return failure("env", "raised", "ConnectionError: tool server") if away else None

    env = random_env(fault=fault, reward=lambda traj, attempt: 1.0)
    config = a_config(tasks, schedule={"steps": 20})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=env))
    check(sim)
    failed = sim.of("failure_decided", task="tools")
    assert failed
    assert {row["decision"] for row in failed[-16:]} == {"Retry"}, "once it is an outage, tries are not counted"
    assert {row["reward"] for row in sim.of("traj_finished", status="done")} == {1.0}
    during = [row for row in sim.of("group_opened", task="tools") if DOWN[0] <= row["t"] < DOWN[1]]
    assert len(during) <= 2 * config.schedule.groups_window, "problems are not burnt through while nothing can work"
    over = next(row["t"] for row in sim.of("traj_finished", task="tools", status="done") if row["t"] >= DOWN[1])
    assert over - DOWN[1] <= 10.0, "it is used again soon after it is back"


def test_a_reward_model_that_is_down_for_a_minute_leaves_nothing_scored_0() -> None:
    """Field case 28: the same for a server that scores."""
    tasks = [a_task(scored=True)]

    def score(trajectory: Trajectory) -> float | Failure:
        return failure("scorer", "raised", "HTTP 503") if is_down() else 1.0

    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), scorer=ScorerModel(score=score))
    sim = simulate(a_config(tasks, schedule={"steps": 20}), tasks, cluster)
    check(sim)
    assert {row["reward"] for row in sim.of("traj_finished", status="done")} == {1.0}
    assert all(row["reward"] is None for row in sim.of("traj_finished", status="failed"))
    assert sim.of("traj_finished", status="failed")


def test_a_service_that_stays_away_ends_the_run_with_its_error() -> None:
    tasks = [a_task("plain"), a_task("tools")]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        away = "/tools/" in traj and call == "step"
        return failure("env", "raised", "ConnectionError: tool server") if away else None

    config = a_config(tasks, schedule={"steps": 20}, failure={"give_up_s": 200.0})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=random_env(fault=fault)))
    assert isinstance(sim.error, RunFailed)
    assert str(sim.error).endswith("env raised: ConnectionError: tool server")
    assert 200.0 <= sim.ended_s < 300.0


@pytest.mark.parametrize("fate", ["answer", "session"])
def test_a_lost_status_message_costs_one_deadline_and_the_prompt_is_issued_again_once(fate: str) -> None:
    """Field case 4: the engine's answer to one running turn, or a host's to one call, never arrives. Its deadline is its
    lease: when it is over, the member is issued again, exactly once, and what may still come counts for nothing."""
    lost = "train/a/0/"

    def engine_fault(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        return "dead" if (fate, command, nth) == ("answer", "generate", 20) else None

    chosen: list[TrajId] = []

    def env_fault(traj: TrajId, attempt: int, call: Call, turn: int) -> str | None:
        if fate == "session" and call == "step" and not chosen:
            chosen.append(traj)
        return "dead" if [traj] == chosen and call == "step" and attempt == 0 else None

    tasks = [a_task()]
    schedule = {"steps": 12, "max_staleness": 3}
    config = a_config(tasks, schedule=schedule, deadlines={"turn_s": 20.0, "env_step_s": 20.0})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, fault=engine_fault), trainer=TrainerModel(finish_s=20.0),
        env=EnvModel(fault=env_fault, latency_s=lambda traj, attempt, call, turn: 0.5),  # type: ignore[arg-type]
    )  # fmt: skip
    sim = simulate(config, tasks, cluster)
    check(sim)
    (decided,) = sim.of("failure_decided")
    assert decided["traj"].startswith(lost)
    assert decided["failure"].split(":")[0] == {"answer": "engine timeout", "session": "env lost"}[fate]
    attempts = Counter(row["traj"] for row in sim.of("traj_started"))
    assert attempts.pop(decided["traj"]) == 2
    assert set(attempts.values()) == {1}
    done = [row for row in sim.of("traj_finished", traj=decided["traj"]) if row["status"] == "done"]
    assert len(done) == 1
