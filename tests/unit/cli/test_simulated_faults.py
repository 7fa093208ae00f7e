"""Faults of a simulated cluster, through the command: what is printed, written, compared and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_recipe import tiny_recipe

from rollart.cli.main import main
from rollart.observe.log import read_events
from rollart.observe.outlook import outlook

SCRIPT = (
    "cluster.faults.script.engines={kind: engine, at_s: 41, count: 1}",
    "cluster.faults.script.node={kind: node, at_s: 60, pool: h20, number: 1}",
    "cluster.faults.script.late={kind: trainer, at_s: 90000}",
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny_recipe(tmp_path, nodes=2)


def test_a_simulation_says_what_was_lost_and_what_did_not_happen(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert main(["simulate", str(recipe), *SCRIPT, "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "lost, whole run  3 engines (1 that never served), 1 node\n" in printed
    assert "time without   engines " in printed
    assert "moved to another engine" in printed
    assert (
        "scripted faults: engines (engine at 41 s, count=1); node (node at 60 s, pool=h20, number=1); late" in printed
    )
    assert "a lost node: another is there after 90 s (assumed)" in printed
    assert "cluster.faults.script.late (at_s=90000) did not happen: the run was over at" in printed
    told = json.loads(figures.read_text())
    assert told["faults"]["happened"] == {"engine": 3, "node": 1}
    run = tmp_path / "runs" / "tiny"
    from_log = outlook(read_events(run / "events.jsonl")[1])
    assert from_log is not None
    assert told == json.loads(json.dumps({"run": "tiny", **from_log.as_json()}))
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Lost, whole run" in page
    assert "3 engines (1 that never served), 1 node; time without: engines " in page
    assert "scripted faults: engines" in page
    first = (run / "events.jsonl").read_bytes()
    assert main(["simulate", str(recipe), *SCRIPT, "--overwrite"]) == 0
    assert (run / "events.jsonl").read_bytes() == first


def test_faults_that_may_happen_and_do_not_are_said_to_be_none(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(recipe), "cluster.faults.engine.mtbf_s=1e9"]) == 0
    assert "lost, whole run  nothing\n" in capsys.readouterr().out
    assert main(["simulate", str(recipe), "name=plain"]) == 0
    assert "lost, whole run" not in capsys.readouterr().out


def test_schedules_are_compared_under_the_same_faults(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one_off", "rollart", "--on", str(recipe), *SCRIPT]) == 0
    lines = {re.split(r"\s{2,}", line)[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert lines["lost: engines"] == ["3", "3"]
    assert lines["lost: nodes"] == ["1", "1"]
    assert "engine time lost" in lines


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("simulate", ["cluster.faults.script.a={kind: engine, at_s: 5, pool: h21}"], "did you mean h20?"),
        ("simulate", ["cluster.faults.script.a={kind: engin, at_s: 5}"], "did you mean"),
        ("simulate", ["cluster.faults.engine.mtbf=5"], "did you mean cluster.faults.engine.mtbf_s"),
        ("simulate", ["cluster.faults.engine.mtbf_s=-5"], "write 0 or more"),
        ("simulate", ["cluster.faults.weights.failed_share=1"], "write less than 1"),
        ("simulate", ["cluster.faults.node.mtbf_s=.inf"], "finite number"),
        ("train", ["cluster.faults.engine.mtbf_s=3600"], "cluster.faults: devices fail when they like"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    command: str, words: list[str], said: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(recipe), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_real_run_is_not_simulated_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["first_run", "cluster.faults.engine.mtbf_s=3600", f"output_dir={tmp_path}"]
    assert main(["simulate", *words, "--calibration", str(tmp_path / "none.json")]) == 2
    assert "cluster.faults with the calibration" in capsys.readouterr().err
