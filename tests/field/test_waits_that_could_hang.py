"""Field cases about waits without a failure channel, as far as virtual time proves them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

import pytest

from rollart.core.errors import RunFailed
from rollart.core.types import Failure, TrajId
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import Call, EnvModel, Fault
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, Script, a_config, a_task, check, random_env, simulate


def stuck_env(mishap: Literal["hang", "dead"]) -> EnvModel:
    """The third member of the first group that is opened never comes back from its first step."""
    stuck: set[TrajId] = set()

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        if call == "step" and not stuck and traj.endswith("/2"):
            stuck.add(traj)
        return mishap if call == "step" and traj in stuck and attempt == 0 else None

    return random_env(mean_s=0.5, fault=fault)


def stuck_engine(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
    return "dead" if command == "generate" and nth == 2 else None


@pytest.mark.parametrize("where", ["env hangs", "env host answers nothing", "engine answers nothing"])
def test_one_rollout_that_never_returns_is_timed_out_and_replaced(where: str) -> None:
    """Field case 1: one of 8 rollouts of a group never returns. The other groups are complete in seconds; the stuck one is
    timed out, counted by type and replaced; the step that needs it completes within one deadline."""
    tasks = [a_task()]
    config = a_config(
        tasks, schedule={"steps": 2, "batch": 32, "group_size": 8, "max_staleness": 0},
        deadlines={"env_step_s": 30.0, "turn_s": 30.0},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, fault=stuck_engine) if where.startswith("engine") else EngineModel(token_s=0.1),
        env=random_env() if where.startswith("engine") else stuck_env("hang" if where == "env hangs" else "dead"),
    )
    sim = simulate(config, tasks, cluster)
    check(sim)
    (decided,) = sim.of("failure_decided")
    kind = {"env hangs": "env timeout", "env host answers nothing": "env lost"}.get(where, "engine timeout")
    assert decided["failure"].startswith(kind)
    assert decided["decision"] == "Retry"
    (again,) = sim.of("traj_finished", traj=decided["traj"], attempt=1)
    assert again["status"] == "done"
    quick = [row["t"] for row in sim.of("group_completed") if row["t"] < 30.0]
    assert len(quick) == 3
    grace_and_the_rest_s = 5.0 + 20.0
    assert sim.of("step_finished")[0]["t"] <= 30.0 + grace_and_the_rest_s


def losing_all(what: str, at_s: float) -> Script:
    async def script(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(at_s)
        if what == "hosts":
            cluster.lose_host(0, "node 7 was taken away")
        for index in range(len(cluster.engines) if what == "engines" else 0):
            cluster.lose_engine(index, f"device {index} fell off the bus")

    return script


@pytest.mark.parametrize("what", ["hosts", "engines"])
def test_the_run_ends_at_once_with_the_cause_when_all_producers_are_lost(what: str) -> None:
    """Field case 2: all environment hosts, or all engines, die. The run ends before any deadline, with the producers'
    own error in its last line, and everything that it had started is given back."""
    tasks = [a_task()]
    config = a_config(tasks, engines=2, schedule={"steps": 100}, failure={"restarts": 0})
    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), trainer=TrainerModel(finish_s=1.0))
    sim = simulate(config, tasks, cluster, script=losing_all(what, at_s=20.0))
    assert isinstance(sim.error, RunFailed)
    last = {"hosts": "env lost: node 7 was taken away", "engines": "engine lost: engine-1: device 1 fell off the bus"}
    assert str(sim.error).splitlines()[-1] == last[what]
    assert sim.ended_s < 25.0
    assert sim.rows[-1]["kind"] == "run_finished"
    assert sim.rows[-1]["why"] == str(sim.error)
    assert sim.tasks_left == []
    assert len(sim.cluster.released) == 4
    assert sim.cluster.envs[0].open_sessions == 0


@pytest.mark.parametrize("mishap", ["raises", "hang", "dead"])
def test_the_run_ends_with_the_cause_when_every_environment_fails(mishap: str) -> None:
    """Field case 2: hosts that live and whose environments all fail end the run as well, before its watchdog does."""
    why = Failure(where="env", kind="raised", retryable=True, detail="ImportError: no module named 'lake'")

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        if call != "reset":
            return None
        return why if mishap == "raises" else "hang" if mishap == "hang" else "dead"

    tasks = [a_task()]
    config = a_config(tasks, deadlines={"batch_s": 600.0, "env_open_s": 30.0})
    sim = simulate(config, tasks, SimCluster(env=EnvModel(fault=fault)))
    assert isinstance(sim.error, RunFailed)
    first, last = str(sim.error).splitlines()
    assert "of its task in a row failed" in first
    assert last.startswith({"raises": "env raised: ImportError", "hang": "env timeout", "dead": "env lost"}[mishap])
    assert sim.ended_s < 600.0
    assert sim.tasks_left == []


def test_a_batch_that_does_not_come_ends_the_run_and_says_what_was_missing_and_waited_for() -> None:
    """Field case 47: when the watchdog has to act, the message names the task that is missing and what is waited
    for."""
    tasks = [a_task("quick"), a_task("stuck")]

    def latency(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        return 1e6 if "/stuck/" in traj and call == "step" else 0.5

    config = a_config(tasks, deadlines={"batch_s": 100.0, "env_step_s": 1000.0, "trajectory_s": 5000.0})
    sim = simulate(config, tasks, SimCluster(env=random_env(latency_s=latency)))
    assert isinstance(sim.error, RunFailed)
    assert "step 0 had no batch after 100.0 s (deadlines.batch_s)" in str(sim.error)
    assert "missing groups: 2 of stuck" in str(sim.error)
    assert "'environments to step': 16" in str(sim.error)
    assert sim.tasks_left == []


def test_a_data_set_shorter_than_the_run_wraps_into_epochs() -> None:
    """Field case 3: 10 problems, 25 steps. Epochs follow one another, each visits every problem once, nobody waits."""
    tasks = [a_task(instances=10)]
    config = a_config(tasks, schedule={"steps": 25, "batch": 16, "group_size": 4})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=random_env()))
    check(sim)
    assert len(sim.of("step_finished")) == 25
    epochs: dict[str, Counter[str]] = {}
    for row in sim.of("group_opened"):
        _, _, epoch, index = row["group"].split("/")
        epochs.setdefault(epoch, Counter())[index] += 1
    assert len(epochs) >= 10
    for epoch in sorted(epochs, key=int)[:-1]:
        assert epochs[epoch] == Counter({str(index): 1 for index in range(10)})
    orders = [[row["group"] for row in sim.of("group_opened") if f"/{epoch}/" in row["group"]] for epoch in ("0", "1")]
    assert [group.split("/")[3] for group in orders[0]] != [group.split("/")[3] for group in orders[1]]


def test_the_final_evaluation_is_written_though_the_interval_divides_the_last_step_and_it_is_slow() -> None:
    """Field case 5: evaluations every 2 steps of 4, each slower than the steps. The last version is evaluated, once and
    wholly, and then the run ends."""
    tasks = [a_task(held_out=4)]
    config = a_config(
        tasks, schedule={"steps": 4}, eval={"every": 2, "episodes": 30, "concurrency": 2, "greedy": False}
    )
    cluster = SimCluster(engine=EngineModel(token_s=0.1), env=random_env(mean_s=0.5))
    sim = simulate(config, tasks, cluster)
    check(sim)
    (final,) = sim.of("eval_finished", version=4)
    assert final["eval"] == "after"
    assert final["complete"]
    assert [(row["split"], row["episodes"]) for row in sim.of("eval_scored", eval="after")] == [
        ("train", 30),
        ("held_out", 30),
    ]
    assert final["t"] > sim.of("step_finished")[-1]["t"] + 30.0
    assert [row["kind"] for row in sim.rows if row["seq"] > final["seq"]] == ["ledger", "run_finished"]
    assert sim.ended_s == pytest.approx(final["t"])


@pytest.mark.parametrize("stuck_in", ["open", "reset", "step", "close", "nothing"])
def test_the_run_is_gone_soon_after_its_last_step(stuck_in: str) -> None:
    """Field case 8: after the last step nothing is left within 30 s, not even members that nobody needs and that hang."""
    tasks = [a_task()]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        return "dead" if call == stuck_in and traj.endswith("/4") else None

    config = a_config(
        tasks, schedule={"redundancy": 1, "redundant_groups": 1},
        deadlines={"env_open_s": 200.0, "env_step_s": 200.0, "trajectory_s": 300.0},
    )  # fmt: skip
    cluster = SimCluster(engine=EngineModel(token_s=0.1, apply_s=0.1), env=random_env(fault=fault))
    sim = simulate(config, tasks, cluster)
    assert sim.error is None
    last = sim.of("published")[-1]["t"]
    assert sim.ended_s <= last + 30.0
    assert sim.tasks_left == []
    assert sim.cluster.envs[0].open_sessions == 0
    assert len(sim.cluster.released) == 3
    if stuck_in != "nothing":
        (advisory,) = sim.of("advisory", code="attempts_left")
        assert "attempts to end" in advisory["text"]


def test_an_attempt_that_waits_to_be_tried_again_does_not_hold_the_end_up() -> None:
    """Field case 8: a long back-off ends with the group that it was for."""
    tasks = [a_task()]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        broken = Failure(where="env", kind="raised", retryable=True, detail="not yet there")
        return broken if call == "step" and traj.endswith("/4") else None

    retry = {"kind": "retry", "backoff_s": 100.0, "backoff_max_s": 100.0}
    config = a_config(tasks, schedule={"redundancy": 1}, failure={"on_failure": retry})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=random_env(fault=fault)))
    check(sim)
    assert any(row["decision"] == "Retry" for row in sim.of("failure_decided"))
    assert sim.ended_s <= sim.of("published")[-1]["t"] + 1.0
