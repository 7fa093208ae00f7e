"""`rollart resume`: what it allows to change, what it refuses and with which way out, and how an interrupt ends."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.cli import folders
from rollart.cli.main import main
from rollart.cli.work import Work
from rollart.config.load import Resolved, dump
from rollart.recipes.registry import resolve


class Resumes:
    """Work that notes what was to be resumed, and perhaps is interrupted."""

    def __init__(self, *, interrupted: bool = False) -> None:
        self.made: list[tuple[Path, Resolved, bool]] = []
        self.interrupted = interrupted

    def resume(self, run_dir: Path, resolved: Resolved, *, plain: bool) -> int:
        self.made.append((run_dir, resolved, plain))
        if self.interrupted:
            raise KeyboardInterrupt
        return 0

    def train(self, resolved: Resolved, *, plain: bool) -> int:
        raise KeyboardInterrupt

    def evaluate(self, run_dir: Path, *, instance_seed: int, count: int, greedy: bool) -> int:
        raise AssertionError("nothing is evaluated here")

    def report(self, run_dir: Path) -> Path:
        raise AssertionError("nothing is reported here")

    def resume_check(self, resolved: Resolved, *, steps: int, say: Callable[[str], None]) -> bool:
        raise AssertionError("nothing is checked here")


def rollart(work: Resumes, *words: str) -> int:
    return main(
        words,
        work=Work(
            train=work.train, resume=work.resume, evaluate=work.evaluate, report=work.report,
            resume_check=work.resume_check,
        ),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of the recipe `smoke`."""
    folder = tmp_path / "smoke"
    folder.mkdir()
    (folder / folders.MARK).write_text(dump(resolve("smoke", ["seed=3"])), encoding="utf-8")
    return folder


def test_a_run_goes_on_with_what_it_was_configured_to(run: Path) -> None:
    work = Resumes()
    assert rollart(work, "resume", str(run), "--plain") == 0
    [(folder, resolved, plain)] = work.made
    assert (folder, plain) == (run, True)
    assert resolved.config == resolve("smoke", ["seed=3"]).config


@pytest.mark.parametrize(
    "word",
    [
        "schedule.steps=50",
        "engine.count=3",
        "deadlines.turn_s=7",
        "envs.hosts=2",
        "checkpoint.every=2",
        "optimizer.lr=0.5",
        "tasks.frozen_lake.env.map=random",
        "schedule.max_staleness=2",
    ],
)
def test_what_the_state_does_not_depend_on_may_change(run: Path, word: str) -> None:
    work = Resumes()
    assert rollart(work, "resume", str(run), word) == 0
    key, _, value = word.partition("=")
    resolved = work.made[0][1]
    assert str(resolved.origins[key]) == "command line"
    assert f"{key.rpartition('.')[2]}: {value}" in dump(resolved)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("name=other", "name=other (it was smoke): the run's events carry it"),
        ("seed=4", "seed=4 (it was 3): every draw"),
        ("output_dir=elsewhere", "move the folder instead"),
        ("model.layers=3", "model.layers=3 (it was"),
        ("tokenizer.kind=hf", "tokenizer.kind=hf (it was chars)"),
        ("schedule.batch=64", "schedule.batch=64 (it was"),
        ("schedule.group_size=2", "schedule.group_size=2 (it was"),
        ("tasks.max_digit=null", "tasks.max_digit is gone"),
        ("tasks.max_digit.ratio=7", "tasks.max_digit.ratio=7 (it was"),
    ],
)
def test_what_the_state_depends_on_is_refused_with_reason_and_way_out(
    run: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    work = Resumes()
    words = [word, "tokenizer.path=x"] if word == "tokenizer.kind=hf" else [word]
    assert rollart(work, "resume", str(run), *words) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.splitlines()[-1].endswith(f"rollart train {run / folders.MARK} name=NAME {' '.join(words)}")
    assert work.made == []


def test_a_task_that_is_new_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tasks.more.env.kind=max_digit", "tasks.more.size=10"]
    assert rollart(Resumes(), "resume", str(run), *words) == 2
    assert "tasks.more is new" in capsys.readouterr().err


def test_a_run_in_use_is_not_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Resumes()
    with (run / folders.LOCK).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert rollart(work, "resume", str(run)) == 2
    assert "belongs to a run that is alive" in capsys.readouterr().err
    assert work.made == []
    assert rollart(work, "resume", str(run)) == 0


def test_a_run_that_is_not_there_is_named_with_the_nearest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollart(Resumes(), "resume", str(run.with_name("smoky"))) == 2
    assert f"did you mean {run}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "resume"])
def test_an_interrupted_run_says_how_to_go_on(run: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (run / "checkpoints" / "step-000000").mkdir(parents=True)
    work = Resumes(interrupted=True)
    if command == "train":
        other = run.with_name("moved")
        run.rename(other)
        with folders.told_how_to_resume(other):
            pass
        with pytest.raises(KeyboardInterrupt), folders.told_how_to_resume(other):
            work.train(resolve("smoke"), plain=True)
        assert capsys.readouterr().err == f"to go on with it: rollart resume {other}\n"
    else:
        assert rollart(work, "resume", str(run)) == 130
        assert capsys.readouterr().err == f"to go on with it: rollart resume {run}\nrollart: interrupted\n"
