"""Whole runs in virtual worlds made from configurations: every promise of the log holds, and twice the same comes out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollart.config.schema import RunConfig
from rollart.control.run import run
from rollart.core.resources import DEFAULT_DEGREES
from rollart.core.types import Failure
from rollart.sim.batching import Batching
from rollart.sim.loop import run as run_virtually
from rollart.sim.split import SplitPace
from rollart.sim.virtual import build
from rollart.sim.world import SimCluster
from simruns import Row, SimRun, check, check_ledger, simulate
from virtual_configs import POOLS, a_virtual

TWO_TASKS: dict[str, Any] = {
    "maths": {"env": {"kind": "workload", "name": "gem_math"}, "size": 1000, "max_turns": 8, "max_tokens": 2048},
    "lake": {"env": {"kind": "workload", "name": "frozen_lake"}, "size": 1000, "max_turns": 12, "max_tokens": 256},
}


def both_tasks(**changes: Any) -> RunConfig:
    config = a_virtual(**{"model": {"max_context": 16384}, **changes})
    return RunConfig.model_validate({**config.model_dump(), "tasks": TWO_TASKS})


def batches_of(engine: Any) -> Iterator[Batching]:
    pace = engine._pace
    if isinstance(pace, SplitPace):
        yield from (*pace.readers, *pace.decoders)
    else:
        yield pace


async def watch(cluster: SimCluster, rows: list[Row]) -> None:
    """No engine ever holds more cache than it has."""
    while True:
        await asyncio.sleep(0.5)
        for engine in cluster.engines:
            for batching in batches_of(engine):
                assert batching._held + batching.idle() <= batching.rules.kv_tokens * (1 + 1e-9)
                assert len(batching._decoding) <= batching.rules.max_live


def simulated(config: RunConfig, **options: Any) -> SimRun:
    made = build(config)
    made.cluster.trainer = replace(made.cluster.trainer, remembers=True)
    return simulate(config, made.tasks, made.cluster, **options)


SMALL = {"tflops": 300, "memory_gib": 13.5, "memory_gb_per_s": 1000, "link_gb_per_s": 30}
"""A device whose cache holds hardly one long trajectory of a 4B model."""
WORLDS: dict[str, RunConfig] = {
    "two pools": both_tasks(),
    "three pools, stale": both_tasks(
        pools={**POOLS, "near": {"device": "H800", "tp": 2}},
        schedule={"steps": 3, "max_staleness": 2, "sync_order": "paper"},
    ),
    "in turn": both_tasks(
        pools={"all": {"device": "H800", "roles": ["train", "mixed"]}}, schedule={"max_staleness": 0, "colocated": True}
    ),
    "in halves": both_tasks(
        pools={
            "train": POOLS["train"],
            "read": {"device": "H800", "devices_per_node": 2, "roles": ["prefill"]},
            "decode": {"device": "H20", "devices_per_node": 4, "roles": ["decode"]},
        }
    ),
    "without cache": both_tasks(engine={"prefix_cache": False}, schedule={"steps": 1}),
    "little cache": both_tasks(
        pools={"train": POOLS["train"], "roll": {"device": "small", "devices_per_node": 1, "tp": 1}},
        cluster={"devices": {"small": SMALL}},
        model={"name": "qwen3-4b", "max_context": 16384},
        schedule={"batch": 64, "steps": 1},
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_promise_of_the_log_holds(name: str) -> None:
    sim = simulated(WORLDS[name], script=watch)
    check(sim)
    check_ledger(sim)
    pools = {row["pool"] for row in sim.of("engine_joined")}
    assert pools <= set(WORLDS[name].cluster.pools)
    assert sim.cluster.held == []


def test_little_cache_preempts_and_loses_nothing() -> None:
    sim = simulated(WORLDS["little cache"])
    check_ledger(sim)
    assert sum(engine._pace.preemptions for engine in sim.cluster.engines) > 0  # type: ignore[attr-defined]


def test_the_same_configuration_gives_the_same_log_also_beside_another() -> None:
    config = WORLDS["two pools"]
    alone = simulated(config).events
    other = build(config.model_copy(update={"seed": 3}))
    made, events = build(config), list[Any]()
    run_virtually(run(other.config, other.world()))
    run_virtually(run(made.config, made.world((events.append,))))
    assert events == alone


def test_more_of_the_same_devices_take_no_longer() -> None:
    few = simulated(both_tasks(schedule={"batch": 128, "steps": 1}, pools={**POOLS, "roll": {"device": "L40S"}}))
    many = simulated(
        both_tasks(schedule={"batch": 128, "steps": 1}, pools={**POOLS, "roll": {"device": "L40S", "nodes": 2}})
    )
    assert many.ended_s < few.ended_s


def test_weights_come_by_push_pull_and_load() -> None:
    config = WORLDS["two pools"]
    made, sim = build(config), simulated(config)
    path = made.paths["roll"]
    held_up = [row["seconds"] for row in sim.of("published")]
    assert max(held_up) < path.push_s / 10  # the push goes on beside the next step
    under_way = [row["seconds"] for row in sim.of("prefetched")]
    assert max(under_way) == pytest.approx(path.push_s + path.pull_s)  # less for who asks when it is on its way
    exposed = [row["exposed_s"] for row in sim.of("applied") if row["live"]]
    assert set(exposed) <= {round(path.load_s, 6)}


def test_devices_that_are_not_there_are_no_room() -> None:
    async def main() -> None:
        made = build(a_virtual())
        leases = [
            await made.cluster.acquire("mixed", "roll", DEFAULT_DEGREES, deadline_s=float("inf")) for _ in range(9)
        ]
        assert not any(isinstance(lease, Failure) for lease in leases[:8])
        refused = leases[8]
        assert isinstance(refused, Failure)
        assert (refused.kind, refused.detail) == ("no_room", "pool roll has 0 of 8 devices free, 1 are needed")
        first = leases[0]
        assert not isinstance(first, Failure)
        await made.cluster.release(first.id)
        assert not isinstance(await made.cluster.acquire("mixed", "roll", DEFAULT_DEGREES, deadline_s=1.0), Failure)

    run_virtually(main())


def test_a_lost_engine_is_replaced_on_its_devices() -> None:
    async def lose(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(60.0)
        cluster.lose_engine(0)

    sim = simulated(WORLDS["two pools"], script=lose)
    check(sim)
    assert len(sim.cluster.engines) == 9
