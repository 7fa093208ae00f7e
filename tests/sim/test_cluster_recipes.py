"""Recipes of clusters that are not there: what the papers say of them holds, and every schedule has a world for them."""

from __future__ import annotations

import pytest

from rollart.config.placement import placements
from rollart.recipes.presets import SCHEDULES
from rollart.recipes.registry import resolve
from rollart.sim.launch import predict, prepare
from rollart.sim.virtual import build

CLUSTERS = ("rollart_128gpu", "production_3000gpu", "sim_small")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CLUSTERS)
def test_every_schedule_can_be_simulated_on_every_cluster(name: str, schedule: str) -> None:
    config = resolve(name, [schedule]).config
    virtual = build(config)
    assert virtual.basis
    assert virtual.devices == build(resolve(name).config).devices, "a schedule changes what devices do, not how many"


def test_the_128_devices_are_divided_as_in_the_paper() -> None:
    virtual = build(resolve("rollart_128gpu").config)
    assert virtual.devices == {"train": 32, "h800": 64, "h20": 32}
    assert virtual.cost_per_s == pytest.approx(0.838 * 128 * 2.85, rel=1e-3)
    schedule = virtual.config.schedule
    assert (schedule.batch, schedule.group_size, schedule.max_staleness, schedule.sync_order) == (512, 8, 2, "paper")


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-14b"])
def test_the_other_models_of_the_paper_are_a_value_away(model: str) -> None:
    ranks = {"qwen3-8b": 1, "qwen3-14b": 2}[model]
    tp = [f"cluster.pools.{pool}.tp={ranks}" for pool in ("train", "h800", "h20")]
    virtual = build(resolve("rollart_128gpu", [f"model.name={model}", *tp]).config)
    assert {engine.ranks for engine in virtual.engines.values()} == {ranks}


def test_the_production_job_has_512_engines_and_five_samplers_for_a_trainer() -> None:
    config = resolve("production_3000gpu").config
    trainer, *engines = placements(config)
    assert len(engines) == 512
    assert sum(engine.devices for engine in engines) == 5 * trainer.devices
    assert sum(place.devices for place in (trainer, *engines)) == 3072
    assert config.schedule.batch == 8192


SMALL = {
    "rollart_128gpu": [
        "schedule.batch=40",
        "schedule.group_size=2",
        "tasks.frozen_lake.max_turns=6",
        "tasks.swe_bench.max_turns=4",
        "tasks.webshop.max_turns=4",
    ],
    "sim_small": ["schedule.batch=8", "schedule.group_size=2", "tasks.frozen_lake.max_turns=6"],
}
"""The same clusters, with little to do."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SMALL)
def test_every_schedule_runs_to_its_end_on_a_cluster(name: str, schedule: str) -> None:
    resolved = resolve(name, [schedule, *SMALL[name], "schedule.steps=2"])
    found = predict(prepare(resolved))
    asked = resolved.config.schedule
    assert (found.steps, found.trajectories) == (1, asked.batch), "the second of two steps is counted"
    if asked.enforce == "admission_and_release":
        assert found.staleness_max is not None
        assert found.staleness_max <= asked.max_staleness
    assert found.bound_holds is (schedule != "areal")
    assert sum(found.trajectory.values()) == pytest.approx(1.0)
    assert sum(found.trainer.values()) == pytest.approx(1.0)
    for pool, used in found.pools.items():
        assert 0 <= used.utilisation <= 1, pool
