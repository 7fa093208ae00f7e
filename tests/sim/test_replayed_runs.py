"""The same seed gives the same event log, byte for byte, and simulations in one process do not touch each other."""

from __future__ import annotations

import json

from rollart.core.errors import failure
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, failing, random_env, simulate


def a_run(seed: int = 0, *, finish_s: float = 2.0) -> SimRun:
    tasks = [a_task("a", held_out=5), a_task("b", ratio=2)]
    config = a_config(
        tasks, seed=seed, engines=2, schedule={"steps": 4, "redundancy": 1, "max_staleness": 2},
        eval={"every": 2, "episodes": 4},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1),
        env=random_env(fault=failing(0.1, failure("env", "raised", "a flaky tool"))),
        trainer=TrainerModel(finish_s=finish_s),
    )
    return simulate(config, tasks, cluster)


def log_of(sim: SimRun) -> bytes:
    return "\n".join(json.dumps(event) for event in sim.events).encode()


def test_the_same_seed_gives_the_same_log_byte_for_byte_whatever_ran_before() -> None:
    first = log_of(a_run())
    assert log_of(a_run(seed=1, finish_s=0.3)) != first
    assert log_of(a_run()) == first


def test_a_schedule_does_not_change_which_problems_are_drawn() -> None:
    """Instances are addressed by task, epoch and index: a slower trainer changes when they come up, not which."""
    slow, quick = (
        [row["group"] for row in a_run(finish_s=finish_s).of("group_opened", task="a")] for finish_s in (5.0, 0.1)
    )
    shorter = min(len(slow), len(quick))
    assert shorter > 4
    assert slow[:shorter] == quick[:shorter]


def test_the_log_holds_no_wall_clock_host_or_process() -> None:
    """`t` is loop time since the run began; numbers and ids come from counters."""
    sim = a_run()
    assert [event["seq"] for event in sim.events] == list(range(1, len(sim.events) + 1))
    times = [event["t"] for event in sim.events]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == round(sim.ended_s, 6)
