"""`rollart resume`: what it allows to change, what it refuses and with which way out, and how an interrupt ends."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.cli import folders
from rollart.cli.main import main
from rollart.cli.work import REAL, Work
from rollart.config.load import Resolved, dump
from rollart.core.errors import ClusterError, ConfigError, RunFailed, StoreError, failure
from rollart.recipes.registry import resolve


class Resumes:
    """Work that notes what was to be resumed, and perhaps is interrupted or fails."""

    def __init__(self, *, error: BaseException | None = None, can_go_on: bool = False) -> None:
        self.made: list[tuple[Path, Resolved, bool]] = []
        self.asked: list[Path] = []
        self.error = error
        self.whole = can_go_on

    def can_go_on(self, folder: Path) -> bool:
        self.asked.append(folder)
        return self.whole

    def resume(self, run_dir: Path, resolved: Resolved, *, plain: bool) -> int:
        self.made.append((run_dir, resolved, plain))
        if self.error is not None:
            raise self.error
        return 0

    def train(self, resolved: Resolved, *, plain: bool) -> int:
        assert self.error is not None
        raise self.error

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
            resume_check=work.resume_check, can_go_on=work.can_go_on,
        ),
    )  # fmt: skip


def started(command: str, run: Path) -> list[str]:
    """The words that start, or resume, the run in a folder."""
    if command == "resume":
        return ["resume", str(run)]
    return ["train", "smoke", f"output_dir={run.parent}", "--profile", "none", "--overwrite"]


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
    name = [] if word.startswith("name=") else ["name=NAME"]
    assert text.splitlines()[-1].endswith(" ".join((f"rollart train {run / folders.MARK}", *name, *words)))
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
@pytest.mark.parametrize(
    ("error", "last"),
    [
        (KeyboardInterrupt(), "rollart: interrupted"),
        (RunFailed("all hosts are gone", failure("env", "lost", "x")), "env lost: x"),
        (StoreError("events.jsonl: cannot be written"), "rollart {}: events.jsonl: cannot be written"),
    ],
)
def test_a_run_that_was_interrupted_or_failed_says_how_to_go_on(
    run: Path, capsys: pytest.CaptureFixture[str], command: str, error: BaseException, last: str
) -> None:
    work = Resumes(error=error, can_go_on=True)
    assert rollart(work, *started(command, run)) in (1, 130)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"to go on with it: rollart resume {run}"
    assert lines[-1] == last.format(command)
    assert work.asked == [run]


@pytest.mark.parametrize("command", ["train", "resume"])
def test_who_has_nothing_to_go_on_from_is_not_told_to(
    run: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (run / "checkpoints" / "step-000004.partial").mkdir(parents=True)
    rollart(Resumes(error=RunFailed("no"), can_go_on=False), *started(command, run))
    assert "to go on with it" not in capsys.readouterr().err


def test_a_refusal_says_itself_what_can_be_done(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Resumes(error=ConfigError("is done; to train more, .."), can_go_on=True)
    assert rollart(work, "resume", str(run)) == 2
    assert capsys.readouterr().err == "rollart resume: is done; to train more, ..\n"


def test_who_lost_a_race_for_a_run_is_not_told_to_go_on_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / folders.LOCK).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ClusterError), folders.told_how_to_resume(run, lambda folder: True):
            raise ClusterError("in use")
    assert capsys.readouterr().err == ""


def test_the_real_command_looks_whether_a_run_can_be_gone_on_with(run: Path) -> None:
    assert REAL.can_go_on(run) is False


def test_a_folder_with_spaces_is_told_so_that_it_can_be_pasted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.with_name("my run")
    run.rename(other)
    rollart(Resumes(error=KeyboardInterrupt(), can_go_on=True), "resume", str(other))
    assert f"rollart resume '{other}'\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["resume", "{run}"], ["train", "smoke", "output_dir={at}", "--overwrite"]])
def test_a_lock_that_cannot_be_opened_is_an_error_with_its_path(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (run / folders.LOCK).mkdir()
    asked = [word.format(run=run, at=run.parent) for word in words]
    assert rollart(Resumes(), *asked) == 1
    assert f"{run / folders.LOCK}: cannot be opened: Is a directory; " in capsys.readouterr().err
    assert (run / folders.MARK).is_file()
