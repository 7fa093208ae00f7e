"""The torture machine over some seeds: no promise is broken, each seed counts, and a seed replays byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.cli.main import main
from rollart.sim.torture import drive
from rollart.sim.torture.campaign import as_json, campaign, tortured
from rollart.sim.torture.faults import KINDS
from rollart.sim.torture.scenario import scenario

SEEDS = 150
FIRST = 500_000


def test_no_promise_is_broken() -> None:
    tally = campaign(FIRST, SEEDS, workers=1)
    assert tally.broken == {}
    assert tally.short == {}
    assert tally.seeds == SEEDS
    report = as_json(tally, first=FIRST, seconds=1.0)
    hit = {kind for kind, states in report["fault_by_state"].items() if states}
    assert set(KINDS) - hit <= {"trainer_hangs", "start_hangs", "apply_hangs", "prefetch_hangs"}, "drawn rarely"
    assert all(report["cancellation_by_await"][how] for how in ("killed", "cancelled", "timed out"))
    assert tally.incarnations > SEEDS


@pytest.mark.parametrize("seed", [1, 7, 42, 1812])
def test_a_seed_replays_byte_for_byte(seed: int) -> None:
    one, other = drive.run(scenario(seed)), drive.run(scenario(seed))
    assert one.log_bytes == other.log_bytes
    assert one == other


def test_what_a_seed_gives_does_not_depend_on_what_ran_before() -> None:
    alone = drive.run(scenario(9)).log_bytes
    tortured(range(3))
    assert drive.run(scenario(9)).log_bytes == alone


def test_the_command_writes_figures_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "torture.json"
    assert main(["torture", "--seeds", "4", "--first", "20", "--workers", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["seeds"] == 4
    assert report["first"] == 20
    assert report["broken"] == report["below_the_minimum"] == []
    assert report["faults_fired"] >= 12
    assert list(report["cancellation_by_await"]) == ["killed", "cancelled", "timed out"]
    assert report["never_hit"]["fault_by_state"]
    assert "4 seeds" in capsys.readouterr().out


def test_a_scenario_file_runs_what_its_seed_runs(tmp_path: Path) -> None:
    file, log, again = tmp_path / "one.json", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps(scenario(5).as_json()), encoding="utf-8")
    assert main(["torture", "--scenario", str(file), "--log", str(log)]) == 0
    assert main(["torture", "--seed", "5", "--log", str(again)]) == 0
    assert log.read_bytes() == again.read_bytes() != b""


def test_a_file_that_holds_no_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "no.json"
    file.write_text('{"seed": 1}', encoding="utf-8")
    assert main(["torture", "--scenario", str(file)]) == 2
    assert "holds no scenario" in capsys.readouterr().err
