"""Batches of environments in control: steps and rewards wait for all that are open, and nothing waits for ever."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import failure
from rollart.core.seeds import rng
from rollart.core.types import TrajId
from rollart.sim.engine import EngineModel, Mishap
from rollart.sim.envs import Call, EnvModel, Fault, ScorerModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, SimRun, a_config, a_task, check, random_env, simulate

REFUSALS = {
    "env": failure("env", "raised", "a broken tool"),
    "engine": failure("engine", "raised", "no memory"),
}
ROUNDING_S = 1e-5
"""Times in the log have six digits."""
LATE = {"env_open_s": 40.0, "env_step_s": 40.0, "turn_s": 40.0, "score_s": 20.0, "trajectory_s": 400.0}


def a_sync_run(
    *, barrier: str = "turn", score: str = "batch", seed: int = 0, cluster: SimCluster | None = None, **schedule: Any
) -> SimRun:
    tasks = [a_task(max_turns=5)]
    config = a_config(tasks, seed=seed, schedule={"max_staleness": 0, "barrier": barrier, "score": score, **schedule})
    usual = SimCluster(
        engine=EngineModel(token_s=0.1, length=lambda request: rng(seed, "length", *request.id).randint(1, 9)),
        env=random_env(seed, most_turns=4),
        trainer=TrainerModel(finish_s=1.0),
    )
    return simulate(config, tasks, cluster or usual)


def waves_of(sim: SimRun) -> list[list[tuple[float, float]]]:
    """(begin, end) of environment steps, those that began together in one list."""
    waves: list[list[tuple[float, float]]] = []
    for begin, end in sorted((row["t"] - row["seconds"], row["t"]) for row in sim.of("env_stepped")):
        if not waves or begin > waves[-1][0][0] + ROUNDING_S:
            waves.append([])
        waves[-1].append((begin, end))
    return waves


def test_environments_step_together_and_generate_together() -> None:
    sim = a_sync_run()
    check(sim)
    waves = waves_of(sim)
    turns = [max(sum(row["traj"] == traj for row in rows) for traj in {row["traj"] for row in rows})
             for rows in _by_batch(sim, "env_stepped")]  # fmt: skip
    assert len(waves) == sum(turns), "in each batch as many waves as its longest trajectory has turns"
    for wave, later in pairwise(waves):
        assert max(end for _, end in wave) <= later[0][0] + ROUNDING_S
    asked = [row["t"] for row in sim.of("turn_routed")]
    busy = [(wave[0][0], max(end for _, end in wave)) for wave in waves]
    assert not [t for t in asked for begin, end in busy if begin + ROUNDING_S < t < end], (
        "an engine samples between waves"
    )


def test_rewards_are_asked_for_when_the_last_trajectory_of_the_batch_is_done() -> None:
    sim = a_sync_run(barrier="none")
    check(sim)
    ended, scored = _by_batch(sim, "env_stepped"), _by_batch(sim, "scored")
    assert [len(rows) for rows in scored] == [16] * 4
    for steps, scores in zip(ended, scored, strict=True):
        assert {row["t"] for row in scores} == {max(row["t"] for row in steps)}


def _by_batch(sim: SimRun, kind: str) -> list[list[Row]]:
    ends = [row["t"] for row in sim.of("batch_released")]
    begins = [-1.0, *ends[:-1]]
    return [
        [row for row in sim.of(kind) if begin < row["t"] <= end] for begin, end in zip(begins, ends, strict=True)
    ]  # fmt: skip


def test_a_barrier_costs_the_sum_of_the_slowest_in_place_of_the_slowest_sum() -> None:
    def a_cluster() -> SimCluster:
        def latency(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
            return rng(1, traj, call, turn).uniform(1, 9) if call == "step" else 1.0 if call == "open" else 0.0

        return SimCluster(env=EnvModel(latency_s=latency, turns=lambda traj, attempt: 5))

    free = a_sync_run(barrier="none", score="trajectory", cluster=a_cluster(), steps=1)
    held = a_sync_run(barrier="turn", score="trajectory", cluster=a_cluster(), steps=1)
    rows = [(row["traj"], row["turn"], row["seconds"]) for row in free.of("env_stepped")]
    assert sorted(rows) == sorted((row["traj"], row["turn"], row["seconds"]) for row in held.of("env_stepped"))
    per_turn = [max(s for _, turn, s in rows if turn == n) for n in range(5)]
    per_trajectory = [sum(s for who, _, s in rows if who == traj) for traj in {traj for traj, _, _ in rows}]
    assert held.of("batch_released")[0]["t"] == pytest.approx(1 + sum(per_turn))
    assert free.of("batch_released")[0]["t"] == pytest.approx(1 + max(per_trajectory))


def test_a_loser_of_its_group_leaves_the_barrier_at_once() -> None:
    """Redundant members are told to stop while they wait at it, and the others go on without them."""
    sim = a_sync_run(redundancy=2, score="trajectory")
    check(sim)
    stopped = {(row["traj"], row["attempt"]): row["t"] for row in sim.of("abort_requested")}
    assert stopped
    slowest = max(row["seconds"] for row in sim.of("env_stepped"))
    for row in sim.of("traj_finished", status="aborted"):
        assert row["t"] <= stopped[row["traj"], row["attempt"]] + slowest


def test_an_environment_that_hangs_holds_the_others_until_its_own_deadline_and_no_longer() -> None:
    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        return "dead" if traj.endswith("/0") and (attempt, call, turn) == (0, "step", 1) else None

    tasks = [a_task(max_turns=5)]
    config = a_config(
        tasks, schedule={"max_staleness": 0, "barrier": "turn", "score": "batch", "steps": 1},
        deadlines=LATE | {"env_step_s": 10.0},
    )  # fmt: skip
    env = EnvModel(latency_s=lambda traj, attempt, call, turn: 1.0, turns=lambda traj, attempt: 3, fault=fault)
    sim = simulate(config, tasks, SimCluster(env=env))
    check(sim)
    late = sim.of("traj_finished", status="failed")
    assert [row["t"] for row in late] == pytest.approx([3 + 10.0 + 5.0 + 1.0] * 4), (
        "open, reset, step; deadline; grace; close"
    )
    others = [row["t"] for row in sim.of("env_stepped", turn=2) if row["attempt"] == 0]
    assert others == pytest.approx([3 + 10.0 + 5.0 + 1.0] * 12)


@given(
    seed=st.integers(0, 10**6),
    barrier=st.sampled_from(["none", "turn"]),
    score=st.sampled_from(["trajectory", "batch"]),
    staleness=st.integers(0, 2),
    redundancy=st.integers(0, 2),
    broken=st.sampled_from([0.0, 0.1, 0.3]),
    silent=st.sampled_from([0.0, 0.05]),
    scored=st.booleans(),
)
@settings(max_examples=60)
def test_no_fault_of_anything_makes_a_barrier_hold_for_ever(
    seed: int, barrier: str, score: str, staleness: int, redundancy: int, broken: float, silent: float, scored: bool
) -> None:
    """Environments fail, hang and die, engines refuse and say nothing, scorers are silent: the run comes to its end with
    every promise kept."""

    def env_fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | None:
        lot = rng(seed, "env", traj, attempt, call, turn).random()
        if call == "close" or lot > broken + silent:
            return None
        return REFUSALS["env"] if lot < broken else "dead" if lot < broken + silent / 2 else "hang"

    def engine_fault(engine: str, call: str, nth: int) -> Any:
        lot = rng(seed, "engine", engine, call, nth).random()
        mishap: Mishap = "partial" if lot < 0.05 else "deaf"
        if call != "generate" or lot > 0.1 + silent:
            return None
        return mishap if lot < 0.1 else REFUSALS["engine"]

    tasks = [a_task(max_turns=4, scored=scored)]
    config = a_config(
        tasks, seed=seed, engines=2, deadlines=LATE,
        schedule={
            "steps": 2, "batch": 12, "max_staleness": staleness, "redundancy": redundancy, "barrier": barrier,
            "score": score,
        },
        failure={"on_failure": {"kind": "retry", "max_retries": 2}, "give_up_after": 100_000},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.2, prefetch_s=0.3, apply_s=0.2, fault=engine_fault),
        env=random_env(seed, fault=env_fault),
        trainer=TrainerModel(finish_s=2.0),
        scorer=ScorerModel(
            latency_s=lambda trajectory: 0.5,
            dead=lambda trajectory: rng(seed, "scorer", trajectory.id, trajectory.attempt).random() < silent,
        ),
    )
    check(simulate(config, tasks, cluster))
