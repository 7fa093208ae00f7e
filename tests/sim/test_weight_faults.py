"""Weights on their way to the engines: failed fetches, wrong bits, slow engines."""

from __future__ import annotations

import pytest

from rollart.core.errors import RunFailed, failure
from rollart.core.types import Failure, TrajId
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import Call
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, check, check_ledger, random_env, simulate

TORN = failure("store", "torn", "bucket 3 is short")


def failing_fetches(engine: str, nths: set[int]) -> EngineModel:
    def fault(name: str, command: Command, nth: int) -> Failure | None:
        return TORN if name == engine and command == "prefetch" and nth in nths else None

    return EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1, fault=fault)


def flipped(engine: str, nth: int) -> EngineModel:
    return EngineModel(
        token_s=0.1, prefetch_s=0.2, apply_s=0.1, flipped=lambda name, applies: name == engine and applies == nth
    )


def test_a_failed_fetch_is_tried_again() -> None:
    tasks = [a_task()]
    cluster = SimCluster(engine=failing_fetches("engine-0", {1}), env=random_env(), trainer=TrainerModel(finish_s=5.0))
    sim = simulate(a_config(tasks), tasks, cluster)
    check(sim)
    assert sim.of("engine_lost") == []
    assert [row["version"] for row in sim.of("prefetched")] == [0, 1, 2, 3, 4]


def test_an_engine_that_cannot_fetch_is_lost_and_the_others_go_on() -> None:
    tasks = [a_task()]
    cluster = SimCluster(
        engine=failing_fetches("engine-1", {1, 2, 3}), env=random_env(), trainer=TrainerModel(finish_s=5.0)
    )
    sim = simulate(a_config(tasks, engines=2), tasks, cluster)
    check(sim)
    (lost,) = sim.of("engine_lost")
    assert lost["engine"] == "engine-1"
    assert lost["failure"].endswith("bucket 3 is short")


def test_the_run_ends_with_the_cause_when_the_last_engine_cannot_fetch() -> None:
    tasks = [a_task()]
    cluster = SimCluster(
        engine=failing_fetches("engine-0", {1, 2, 3}), env=random_env(), trainer=TrainerModel(finish_s=5.0)
    )
    sim = simulate(a_config(tasks, failure={"restarts": 0}), tasks, cluster)
    assert isinstance(sim.error, RunFailed)
    assert str(sim.error).splitlines() == [
        "a worker of role mixed was lost once with no step trained (failure.restarts=0), and none is left",
        "store torn: bucket 3 is short",
    ]


def test_an_engine_that_hangs_in_a_fetch_is_lost_at_its_deadline() -> None:
    def hang(name: str, command: Command, nth: int) -> Failure | Mishap | None:
        return "dead" if name == "engine-1" and command == "prefetch" and nth >= 1 else None

    tasks = [a_task()]
    cluster = SimCluster(engine=EngineModel(token_s=0.1, fault=hang), env=random_env())
    config = a_config(tasks, engines=2, schedule={"steps": 8}, deadlines={"weights_s": 2.0})
    sim = simulate(config, tasks, cluster)
    check(sim)
    (lost,) = sim.of("engine_lost")
    assert "for engines to fetch weights" in lost["failure"]


def test_what_an_engine_with_a_wrong_bit_samples_is_not_trained() -> None:
    """The engine is given up at once, also what it had under way; the others take its trajectories over."""
    tasks = [a_task()]
    cluster = SimCluster(
        engine=flipped("engine-1", 2), env=random_env(most_turns=6), trainer=TrainerModel(finish_s=3.0)
    )
    sim = simulate(a_config(tasks, engines=2), tasks, cluster)
    assert sim.error is None
    check_ledger(sim)
    (wrong,) = sim.of("applied", matches=False)
    (lost,) = sim.of("engine_lost")
    assert wrong["engine"] == lost["engine"] == "engine-1"
    assert wrong["digest"].startswith("flipped-weights-2-")
    sampled = [row for row in sim.of("turn_done", engine="engine-1") for version, _ in row["spans"] if version == 2]
    assert sampled == []
    assert lost["lost_tokens"] > 0
    late = [row for row in sim.of("turn_done", engine="engine-1") if row["seq"] > lost["seq"]]
    assert late
    assert {row["sampled"] for row in late} == {0}
    assert {row["t"] for row in late} == {lost["t"]}, "what it had under way goes elsewhere at once"


def test_a_wrong_bit_in_the_last_engine_ends_the_run_with_both_digests() -> None:
    tasks = [a_task()]
    cluster = SimCluster(engine=flipped("engine-0", 1), env=random_env(), trainer=TrainerModel(finish_s=3.0))
    sim = simulate(a_config(tasks, failure={"restarts": 0}), tasks, cluster)
    assert isinstance(sim.error, RunFailed)
    last = str(sim.error).splitlines()[-1]
    assert last.startswith(
        "engine raised: engine-0 serves flipped-weig.. as version 1, the trainer published weights-1-"
    )


def test_no_turn_goes_to_an_engine_that_is_too_far_behind() -> None:
    """One engine fetches for two steps, and every third group begins late: what it would sample there could not be trained
    any more. `check` looks at each route."""

    def slow(name: str, command: Command, nth: int) -> Failure | None:
        third = command != "prefetch" or nth % 3 == 2
        return None if name == "engine-0" or third else failure("store", "timeout", "slow disk")

    def latency(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        return 6.0 if call == "open" and int(traj.split("/")[3]) % 3 == 0 else 0.1

    tasks = [a_task(max_tokens=8)]
    config = a_config(tasks, engines=2, schedule={"steps": 12, "max_staleness": 1})
    model = EngineModel(token_s=0.02, prefetch_s=1.5, apply_s=0.05, fault=slow)
    env = random_env(latency_s=latency, turns=lambda traj, attempt: 3)
    sim = simulate(config, tasks, SimCluster(engine=model, env=env, trainer=TrainerModel(finish_s=0.5)))
    check(sim)
    assert len(sim.of("applied", engine="engine-1")) < len(sim.of("applied", engine="engine-0")) - 2


@pytest.mark.parametrize("order", ["early", "paper"])
def test_a_slow_engine_skips_versions_and_delays_nobody_else(order: str) -> None:
    def slow(name: str, command: Command, nth: int) -> Failure | None:
        third = command != "prefetch" or nth % 3 == 2
        return None if name == "engine-0" or third else failure("store", "timeout", "slow disk")

    tasks = [a_task()]
    config = a_config(tasks, engines=2, schedule={"steps": 10, "max_staleness": 2, "sync_order": order})
    model = EngineModel(token_s=0.02, prefetch_s=0.4, apply_s=0.05, fault=slow)
    cluster = SimCluster(engine=model, env=random_env(mean_s=0.1), trainer=TrainerModel(finish_s=1.0))
    sim = simulate(config, tasks, cluster)
    check(sim)
    versions = {name: [row["version"] for row in sim.of("applied", engine=name)] for name in ("engine-0", "engine-1")}
    assert versions["engine-1"][-1] == versions["engine-0"][-1] == 10
    if order == "early":
        assert len(versions["engine-1"]) < len(versions["engine-0"])
