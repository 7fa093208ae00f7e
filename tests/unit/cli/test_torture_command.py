"""`rollart torture`: what it refuses before the first seed is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-1"], "--seed -1: it is 0 or more"),
        (["--seeds", "1", "--first", "-5"], "--first -5: it is 0 or more"),
        (["--seeds", "0"], "--seeds 0: it is 1 or more"),
        (["--seeds", "1", "--workers", "0"], "--workers 0: it is 1 or more"),
        (
            ["--seed", "3", "--json", "{tmp}/a.json"],
            "--json means nothing to --seed; it goes with --seeds or --mutants",
        ),
        (
            ["--seeds", "1", "--log", "{tmp}/a.jsonl"],
            "--log means nothing to --seeds; it goes with --seed or --scenario",
        ),
        (["--mutants", "{tmp}", "--log", "{tmp}/a.jsonl"], "--log means nothing to --mutants"),
        (["--seed", "3", "--first", "7"], "--first means nothing to --seed; it goes with --seeds"),
        (["--scenario", "x.json", "--stop"], "--stop means nothing to --scenario"),
        (["--seed", "3", "--workers", "2"], "--workers means nothing to --seed"),
    ],
)
def test_what_has_no_meaning_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["torture", *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def in_a_file(folder: Path) -> Path:
    (folder / "file").write_text("x", encoding="utf-8")
    return folder / "file" / "a.json"


def a_folder(folder: Path) -> Path:
    (folder / "there").mkdir()
    return folder / "there"


@pytest.mark.parametrize("wrong", [in_a_file, a_folder])
@pytest.mark.parametrize(
    "words", [["--seeds", "1000000", "--json"], ["--seed", "3", "--log"], ["--mutants", ".", "--json"]]
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wrong: Callable[[Path], Path]
) -> None:
    path = wrong(tmp_path)
    assert main(["torture", *words, str(path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rollart torture: {path}: cannot be written: ")
    assert "nothing was run" in line


def test_looking_whether_a_file_can_be_written_changes_none(tmp_path: Path) -> None:
    earlier, new, scenario = tmp_path / "earlier.jsonl", tmp_path / "new" / "log.jsonl", tmp_path / "none.json"
    earlier.write_text("kept", encoding="utf-8")
    for log in (earlier, new):
        assert main(["torture", "--scenario", str(scenario), "--log", str(log)]) == 2
    assert earlier.read_text(encoding="utf-8") == "kept"
    assert not new.exists()


@pytest.mark.parametrize("text", ["[1, 2]", '"x"', '{"tasks": [5], "faults": []}', "[" * 100_000])
def test_json_that_is_no_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = tmp_path / "no.json"
    file.write_text(text, encoding="utf-8")
    assert main(["torture", "--scenario", str(file)]) == 2
    assert "holds no scenario" in capsys.readouterr().err
