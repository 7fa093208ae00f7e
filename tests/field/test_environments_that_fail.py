"""Field cases about environments and rewards, as far as virtual time proves them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

import pytest

from rollart.core.errors import failure
from rollart.core.seeds import rng
from rollart.core.types import Failure, Trajectory, TrajId, TurnRequest
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import Call, Fault, ScorerModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, check, failing, random_env, random_latency, simulate, trained


def test_a_step_is_done_without_the_environment_that_raises() -> None:
    """Field case 26: one environment raises, every time. The step is done with the others, the error counted by type."""
    tasks = [a_task()]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        raised = failure("env", "raised", "ZeroDivisionError: division by zero")
        return raised if call == "step" and traj.endswith("/3") and traj.startswith(first) else None

    first = "train/a/0/"
    config = a_config(tasks, schedule={"steps": 2, "batch": 16, "group_size": 8})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=random_env(fault=fault)))
    check(sim)
    assert len(sim.of("step_finished")) == 2
    assert {len(members) for members in trained(sim).values()} == {7}
    assert Counter(row["failure"] for row in sim.of("failure_decided")) == {
        "env raised: ZeroDivisionError: division by zero": len(sim.of("traj_finished", cause="raised"))
    }
    assert all(row["reward"] is None for row in sim.of("traj_finished", status="failed"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_failure_in_twenty_wastes_little_of_what_was_sampled(seed: int) -> None:
    """Field case 27: 5 % of trajectories fail, late, in groups of 8. Less than 10 % of the sampled tokens is thrown away."""
    tasks = [a_task()]

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        unlucky = rng(seed, "fault", traj, attempt).random() < 0.05
        return failure("env", "raised", "a flaky tool") if unlucky and call == "step" and turn == 3 else None

    config = a_config(tasks, seed=seed, schedule={"steps": 8, "batch": 64, "group_size": 8})
    env = random_env(seed, mean_s=0.2, turns=lambda traj, attempt: 4, fault=fault)
    engine = EngineModel(token_s=0.05, prefetch_s=0.2, apply_s=0.1)
    sim = simulate(config, tasks, SimCluster(engine=engine, env=env, trainer=TrainerModel(finish_s=5.0)))
    check(sim)
    ended = Counter(row["status"] for row in sim.of("traj_finished"))
    assert 0.03 < ended["failed"] / ended.total() < 0.08
    last = sim.of("ledger")[-1]
    assert sum(last["dropped"].values()) < 0.1 * last["sampled"]


def twice(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
    return "twice" if command == "generate" and nth % 4 == 0 else None


def test_an_answer_that_comes_twice_counts_once() -> None:
    """Field case 29: every fourth completion arrives twice. The second is ignored, its tokens are counted as duplicates, and
    no trajectory is done more than once."""
    tasks = [a_task()]
    cluster = SimCluster(engine=EngineModel(token_s=0.1, fault=twice), env=random_env())
    sim = simulate(a_config(tasks), tasks, cluster)
    check(sim)
    dropped = sim.of("ledger")[-1]["dropped"]
    assert dropped["duplicate"] == sum(row["tokens"] for row in sim.of("tokens_dropped", reason="duplicate")) > 0
    done = Counter(row["traj"] for row in sim.of("traj_finished", status="done"))
    assert set(done.values()) == {1}
    assert len(done) <= len(sim.of("group_opened")) * 4


def test_an_answer_that_comes_after_its_trajectory_was_reissued_is_ignored() -> None:
    """Field case 29: a request that no abort reaches is given up at its deadline and its trajectory tried again; what the
    engine answers later trains nothing and is counted."""

    def deaf(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        return "deaf" if command == "generate" and nth == 3 else None

    tasks = [a_task(max_tokens=100)]
    config = a_config(tasks, schedule={"max_staleness": 0}, deadlines={"turn_s": 10.0})
    model = EngineModel(
        token_s=0.25,
        length=lambda request: 100 if request.id.attempt == 0 and request.id.traj == slow else 4,
        fault=deaf,
    )
    slow = "train/a/0/0/0"
    slow = simulate(config, tasks, SimCluster(engine=model, env=random_env())).of("turn_routed")[3]["traj"]
    sim = simulate(config, tasks, SimCluster(engine=model, env=random_env()))
    check(sim)
    (late,) = sim.of("failure_decided")
    assert "does not answer" in late["failure"]
    assert sim.of("ledger")[-1]["dropped"] == {"duplicate": 100}
    assert [row["status"] for row in sim.of("traj_finished", traj=late["traj"])] == ["failed", "done"]
    assert late["traj"] == slow


LIFE_S = 20.0
CALL_S = 9.0
STAGES = ("open", "reset", "generate", "step", "score", "close")


@pytest.mark.parametrize("stage", [*STAGES, "any"])
@pytest.mark.parametrize("mishap", ["hang", "dead", "slow"])
def test_the_whole_life_of_a_trajectory_stays_under_its_one_deadline(
    stage: str, mishap: Literal["hang", "dead", "slow"]
) -> None:
    """Field case 30: set-up, turns, retries, scoring and teardown of a trajectory end within one deadline, whichever of
    them hangs, is never answered, or takes most of what its own limit allows, time and again."""
    tasks = [a_task(scored=True, max_tokens=80)]

    def bad(here: str, *address: object) -> bool:
        return stage in (here, "any") and rng(0, "bad", here, *address).random() < 0.6

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        return mishap if mishap != "slow" and bad(call, traj, attempt, turn) else None

    def latency(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        return 0.9 * CALL_S if mishap == "slow" and bad(call, traj, attempt, turn) else 0.3

    def engine_fault(engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        return "dead" if command == "generate" and mishap != "slow" and bad("generate", nth) else None

    def length(request: TurnRequest) -> int:
        return 80 if bad("generate", *request.id) else 5

    def score(trajectory: Trajectory) -> float | Failure:
        return failure("scorer", "raised", "500") if bad("score", trajectory.id, trajectory.attempt) else 1.0

    limits = dict.fromkeys(("env_open_s", "env_step_s", "turn_s", "score_s"), CALL_S)
    config = a_config(
        tasks, engines=2, schedule={"steps": 1, "batch": 32}, deadlines={"trajectory_s": LIFE_S, "batch_s": 100.0, **limits},
        failure={"on_failure": {"kind": "retry", "max_retries": 10}, "give_up_after": 10_000},
    )  # fmt: skip
    scoring_s = {"hang": 1e6, "dead": float("inf"), "slow": 0.9 * CALL_S}[mishap] if stage == "score" else 0.1
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, length=length, fault=engine_fault),
        env=random_env(fault=fault, latency_s=latency, turns=lambda traj, attempt: 2),
        scorer=ScorerModel(latency_s=lambda trajectory: scoring_s, score=score),
    )
    sim = simulate(config, tasks, cluster)
    lives: dict[str, list[float]] = defaultdict(list)
    for row in sim.of("traj_started") + sim.of("traj_finished"):
        lives[row["traj"]].append(row["t"])
    longest = max(max(times) - min(times) for times in lives.values())
    assert len(lives) >= 32
    assert 0.4 * LIFE_S < longest <= LIFE_S + 1e-6


def test_a_scorer_that_fails_leaves_the_sample_unscored_and_never_at_0() -> None:
    """Field case 31: the scorer answers 500 for a third of the trajectories. They are tried again, then left out; no reward
    of 0 comes from it, and their tokens are counted as unscored."""
    tasks = [a_task(scored=True)]

    def score(trajectory: Trajectory) -> float | Failure:
        broken = rng(0, "500", trajectory.id, trajectory.attempt).random() < 0.33
        return failure("scorer", "raised", "HTTP 500") if broken else 1.0 + trajectory.member

    config = a_config(tasks, failure={"on_failure": {"kind": "retry", "max_retries": 1}})
    sim = simulate(
        config, tasks, SimCluster(engine=EngineModel(token_s=0.1), env=random_env(), scorer=ScorerModel(score=score))
    )
    check(sim)
    unscored = sim.of("traj_finished", status="failed")
    assert {row["failure"] for row in unscored} == {"scorer raised: HTTP 500"}
    assert {row["reward"] for row in unscored} == {None}
    assert sim.of("ledger")[-1]["dropped"]["unscored"] == sum(row["sampled"] for row in unscored) > 0
    assert all(row["reward"] >= 1.0 for members in trained(sim).values() for row in members)
    assert {len(members) for members in trained(sim).values()} <= {2, 3, 4}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_leaves_the_trajectory_out(reward: float | None) -> None:
    """Field case 31: what an environment answers in place of a reward is no 0 either."""
    tasks = [a_task()]

    def odd(traj: TrajId, attempt: int) -> float | None:
        return reward if rng(0, "odd", traj, attempt).random() < 0.2 else 1.0

    env = random_env(reward=odd, turns=lambda traj, attempt: 1, latency_s=random_latency(0.5))
    sim = simulate(a_config(tasks), tasks, SimCluster(engine=EngineModel(token_s=0.1), env=env))
    check(sim)
    assert sim.of("traj_finished", cause="not_finite")
    assert {row["reward"] for members in trained(sim).values() for row in members} == {1.0}


def test_a_failed_member_is_tried_again_under_the_same_problem_and_another_draw() -> None:
    """Field case 26: a retry is a new attempt at the same instance, with random numbers of its own."""
    tasks = [a_task()]
    env = random_env(fault=failing(0.3, failure("env", "raised", "a flaky tool")))
    sim = simulate(a_config(tasks), tasks, SimCluster(engine=EngineModel(token_s=0.1), env=env))
    check(sim)
    again = [t for t in sim.kept if t.attempt > 0]
    assert again
    firsts = {t.id: t for t in sim.kept if t.attempt == 0}
    assert all(firsts[t.id].instance == t.instance for t in again)
