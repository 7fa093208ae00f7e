"""benchmarks/echo.py and echo_ddp.py: models by their published blocks, and figures that say what they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark_modules import loaded
from rollart.perf.overlap import Kernel
from rollart.perf.overlap_fit import Measured

for name in ("micro_rows", "collective_folds", "overlap_folds", "training_rows", "validate_collectives", "validate_overlap",
             "validate_training"):  # fmt: skip
    loaded(name)
ddp = loaded("echo_ddp")
traced = loaded("echo_rows")
echo = loaded("echo")


@pytest.mark.parametrize(("at", "millions", "gigas"), [(0, 124.3, 0.1235), (1, 60.0, 11.5)])
def test_models_have_the_published_size(at: int, millions: float, gigas: float) -> None:
    blocks = ddp.CASES[at].blocks
    assert ddp.parameters(blocks) / 1e6 == pytest.approx(millions, rel=0.005)
    assert sum(block.work for block in blocks) / 1e9 == pytest.approx(gigas, rel=0.005)


def test_a_slower_network_exposes_more_and_computes_alike() -> None:
    case = ddp.CASES[0]
    unit_s = 0.15 / (3 * sum(block.work for block in case.blocks))
    fast, slow = (ddp.step_of(case, unit_s, gbit) for gbit in (ddp.FAST_GBIT, ddp.SLOW_GBIT))
    assert fast.step_s < slow.step_s
    assert fast.classes[0].comm_s["dp"] < slow.classes[0].comm_s["dp"] / 4
    busy = 3 * unit_s * sum(block.work for block in case.blocks)
    assert busy <= slow.classes[0].busy_s < 1.1 * busy


@pytest.mark.parametrize("case", ddp.CASES, ids=lambda case: case.name)
def test_the_step_on_the_slow_network_is_within_the_band_of_the_measured_one(case: Any) -> None:
    assert abs(ddp.ddp_steps(case)["slow_s"] / case.slow_s - 1) <= echo.DDP_BAND


def test_shares_within_and_the_marks_of_rows() -> None:
    rows = [
        Measured(kernel=Kernel(name="a", solo_s=1.0), overlap_ratio=1.0, seconds=seconds) for seconds in (1.0, 1.1, 2.0)
    ]
    found = echo.within(rows, [1.04, 1.0, 1.0])
    assert found == {
        "within 5%": pytest.approx(1 / 3), "within 10%": pytest.approx(2 / 3), "within 15%": pytest.approx(2 / 3),
        "rmse of the slowdown": pytest.approx(((0.04**2 + 0.1**2 + 1.0) / 3) ** 0.5),
    }  # fmt: skip
    text = echo.shown([echo.row("EC-9", "a case", 1, 2, "<= 1", ok, "why") for ok in (True, False, None)])
    assert [line.split()[1] for line in text.splitlines()] == ["ok", "MISSED", "-"]


def test_rows_are_spread_over_the_step_times_of_large_suites() -> None:
    """By the measured time, so that neither the fastest nor the slowest alone speak for a suite; never by an error."""

    def case(suite: str, at: int, devices: int = 64) -> SimpleNamespace:
        plan = SimpleNamespace(devices=devices)
        return SimpleNamespace(suite=suite, row=f"{suite}{at:02d}", measured_s=float(at), plans=(plan,))

    large = [case("a", at) for at in range(12)]
    small = [case("b", at) for at in range(9)]
    one_node = [case("c", at, devices=8) for at in range(12)]
    assert [one.row for one in traced.chosen([*large, *small, *one_node])] == ["a02", "a06", "a10"]


def test_an_experiment_without_its_published_rows_is_said_not_to_have_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    for name, file in (("EC-1", "training.csv"), ("EC-3", "collectives.csv"), ("EC-5", "overlap_slowdown.csv")):
        echo.main(["--data", str(tmp_path / "absent"), "--json", str(out), "--only", name])
        found = json.loads(out.read_text())
        assert name in [one["id"] for one in found]
        for one in found:
            assert (one["ours"], one["ok"]) == (None, None)
            assert one["why"].startswith("not run: there is no ")
            assert file in one["why"]
    assert echo.not_run("EC-6", tmp_path) == []
    (tmp_path / "collectives.csv").touch()
    assert echo.not_run("EC-3", tmp_path) == []
