"""benchmarks/simulator.py: a run of it is what it says, and figures are computed from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_modules import loaded
from rollart.observe.log import EventLog

simulator = loaded("simulator")


def test_a_small_job_is_simulated_with_its_log(tmp_path: Path) -> None:
    found = simulator.measured(1 / 256, 2, tmp_path)
    assert found.trajectories == 2 * 32
    assert 15 < found.turns / found.trajectories < 25
    released = [event for event in EventLog(tmp_path / "events.jsonl").events() if event["kind"] == "batch_released"]
    assert [event["data"]["trajectories"] for event in released] == [32, 32]


def test_the_job_has_three_thousand_devices(tmp_path: Path) -> None:
    simulator.write_load(tmp_path / "load.yaml")
    config = simulator.a_config(1.0, 1, tmp_path / "load.yaml")
    assert sum(pool.devices for pool in config.cluster.pools.values()) == 3000
    assert config.schedule.batch == 8192


def test_figures_are_per_step_and_per_trajectory() -> None:
    one, ten = (
        simulator.Measured(
            scale=scale, steps=2, wall_s=wall_s, cpu_s=wall_s, simulated_s=1.0, trajectories=trajectories,
            turns=20 * trajectories, events=1, log_bytes=1, peak_gib=1.0,
        )
        for scale, wall_s, trajectories in ((1.0, 100.0, 1000), (10.0, 1200.0, 10000))
    )  # fmt: skip
    rows = {row["case"]: row for row in simulator.cases([one, ten])}
    assert rows["wall time of a step at scale 1"]["value"] == 50.0
    assert rows["wall time of a step at scale 1"]["met"]
    assert rows["wall time per trajectory, scale 10 over 1"]["value"] == pytest.approx(1.2)
