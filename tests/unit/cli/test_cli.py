"""The command line: what it calls, what it refuses, exit codes and last lines."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from rollart.cli import extras, folders
from rollart.cli.configured import profile_path
from rollart.cli.main import main, parse
from rollart.cli.work import Work
from rollart.config.load import Resolved
from rollart.core.errors import ClusterError, ConfigError, InvariantBroken, RollartError, RunFailed, failure
from rollart.recipes.registry import resolve


class Calls:
    """Work that notes what it was asked for."""

    def __init__(self, code: int = 0, error: Exception | None = None) -> None:
        self.code = code
        self.error = error
        self.made: list[tuple[object, ...]] = []

    def _note(self, *call: object) -> int:
        self.made.append(call)
        if self.error is not None:
            raise self.error
        return self.code

    def train(self, resolved: Resolved, *, plain: bool) -> int:
        return self._note("train", resolved, plain)

    def resume(self, run_dir: Path, resolved: Resolved, *, plain: bool) -> int:
        return self._note("resume", run_dir, resolved, plain)

    def evaluate(self, run_dir: Path, *, instance_seed: int, count: int, greedy: bool) -> int:
        return self._note("eval", run_dir, instance_seed, count, greedy)

    def resume_check(self, resolved: Resolved, *, steps: int, say: Callable[[str], None]) -> bool:
        say("compared")
        return self._note("resume-check", resolved, steps) == 0

    def report(self, run_dir: Path) -> Path:
        self._note("report", run_dir)
        return run_dir / "report.html"


def rollart(words: Sequence[str], calls: Calls) -> int:
    return main(
        words,
        work=Work(
            train=calls.train, resume=calls.resume, evaluate=calls.evaluate, report=calls.report,
            resume_check=calls.resume_check,
        ),
    )  # fmt: skip


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / folders.MARK).write_text("name: x\n", encoding="utf-8")
    return folder


def train_in(folder: Path, *words: str) -> list[str]:
    return ["train", "smoke", f"output_dir={folder}", "--profile", "none", *words]


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_hands_over_the_resolved_configuration(tmp_path: Path) -> None:
    calls = Calls(code=3)
    assert rollart([*train_in(tmp_path), "schedule.steps=7", "--plain", "sync", "seed=5"], calls) == 3
    [(name, resolved, plain)] = calls.made
    assert (name, plain) == ("train", True)
    assert isinstance(resolved, Resolved)
    assert (resolved.config.schedule.steps, resolved.config.seed) == (7, 5)
    assert resolved.config.schedule.max_staleness == 0
    assert str(resolved.origins["schedule.steps"]) == "command line"


def test_options_and_values_may_come_in_any_order() -> None:
    first = parse(["train", "smoke", "a=1", "b=2", "--plain", "--profile", "none"])
    for words in (
        ["--plain", "smoke", "a=1", "--profile", "none", "b=2"],
        ["smoke", "--profile", "none", "a=1", "--plain", "b=2"],
    ):
        again = parse(["train", *words])
        assert (again.recipe, again.words, again.plain) == (first.recipe, first.words, first.plain)


def test_a_run_that_exists_already_is_refused_with_the_ways_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls()
    kept = a_run(tmp_path / "smoke") / "summary.json"
    kept.write_text("{}", encoding="utf-8")
    assert rollart(train_in(tmp_path), calls) == 2
    text = capsys.readouterr().err
    assert "exists already" in text
    assert "name=NAME" in text
    assert "--overwrite" in text
    assert kept.exists()
    assert rollart(train_in(tmp_path, "name=other"), calls) == 0
    assert rollart(train_in(tmp_path, "--overwrite"), calls) == 0
    assert not kept.exists()
    assert len(calls.made) == 2


def test_overwrite_removes_no_folder_that_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "smoke" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("text", encoding="utf-8")
    assert rollart(train_in(tmp_path, "--overwrite"), Calls()) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert precious.exists()


def test_overwrite_removes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "smoke").write_text("text", encoding="utf-8")
    assert rollart(train_in(tmp_path, "--overwrite"), Calls()) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_overwrite_removes_no_run_that_is_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "smoke")
    with (folder / folders.LOCK).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert rollart(train_in(tmp_path, "--overwrite"), Calls()) == 2
    assert "belongs to a run that is alive" in capsys.readouterr().err
    assert (folder / folders.MARK).exists()
    assert rollart(train_in(tmp_path, "--overwrite"), Calls()) == 0


def test_what_a_run_that_never_started_has_left_is_in_no_ones_way(tmp_path: Path) -> None:
    ended: list[Path] = []
    folder = tmp_path / "smoke"
    folder.mkdir()
    (folder / folders.LOCK).touch()
    (folder / ".processes").write_text("{}", encoding="utf-8")
    folders.claim(folder, overwrite=False, end_earlier=ended.append)
    assert ended == [folder]
    with (folder / folders.LOCK).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="belongs to a run that is alive"):
            folders.claim(folder, overwrite=True, end_earlier=ended.append)


def test_a_bad_configuration_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls()
    assert rollart(train_in(tmp_path, "schedule.max_stalenes=1", "optimizer.lr=-1"), calls) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rollart train: 2 errors in the configuration:"
    assert "did you mean schedule.max_staleness?" in lines[1]
    assert calls.made == []


# --- resume-check ----------------------------------------------------------------------------------------------------


def test_resume_check_hands_over_what_to_run_and_fails_when_it_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls()
    words = ["resume-check", "smoke", "sync", "--profile", "none", "--steps", "4"]
    assert rollart(words, calls) == 0
    [(name, resolved, steps)] = calls.made
    assert (name, steps) == ("resume-check", 4)
    assert isinstance(resolved, Resolved)
    assert resolved.config.schedule.max_staleness == 0
    assert capsys.readouterr().out == "compared\n"
    assert rollart(words, Calls(code=1)) == 1


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("name=x: no"), 2),
        (ClusterError("8 cpus asked for, 2 available"), 1),
        (InvariantBroken("token ledger does not close"), 1),
        (RunFailed("all env hosts are gone", failure("env", "lost", "boom in reset")), 1),
    ],
)
def test_an_error_is_its_message_in_the_last_lines_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: RollartError, code: int
) -> None:
    """Field case 2: the command line's part; the producers' failure is in the last lines."""
    assert rollart(train_in(tmp_path), Calls(error=error)) == code
    text = capsys.readouterr().err
    assert text.splitlines()[-1].endswith(str(error).splitlines()[-1])
    assert "Traceback" not in text


def test_the_traceback_is_shown_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ClusterError):
        rollart(train_in(tmp_path, "--traceback"), Calls(error=ClusterError("no room")))


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        rollart(train_in(tmp_path), Calls(error=ZeroDivisionError("a bug")))


def test_ctrl_c_has_the_exit_code_of_an_interrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(resolved: Resolved, *, plain: bool) -> NoReturn:
        raise KeyboardInterrupt

    calls = Calls()
    work = Work(
        train=interrupted, resume=calls.resume, evaluate=calls.evaluate, report=calls.report,
        resume_check=calls.resume_check,
    )  # fmt: skip
    assert main(train_in(tmp_path), work=work) == 130
    assert capsys.readouterr().err == "rollart: interrupted\n"


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ModuleNotFoundError("No module named 'ray.util'", name="ray.util")
    assert rollart(train_in(tmp_path), Calls(error=gone)) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rollart train: not installed: ray",
        f"run: {sys.executable} -m pip install 'rollart[local]'",
    ]
    with pytest.raises(ModuleNotFoundError):
        rollart(train_in(tmp_path), Calls(error=ModuleNotFoundError("No module named 'mine'", name="mine")))


def test_all_missing_packages_of_a_configuration_are_named_before_the_start() -> None:
    config = resolve("first_run").config
    with pytest.raises(ConfigError) as error:
        extras.require(config, has=lambda name: name not in ("ray", "gymnasium"))
    assert str(error.value).splitlines()[0] == "not installed: ray, gymnasium"
    assert "'rollart[local,envs]'" in str(error.value)
    extras.require(resolve("first_run", ["tasks.frozen_lake=null"]).config, has=lambda name: name != "gymnasium")


# --- eval, report, explain -------------------------------------------------------------------------------------------


def test_eval_scores_the_instances_that_were_asked_for(tmp_path: Path) -> None:
    calls = Calls()
    folder = a_run(tmp_path / "mine")
    assert rollart(["eval", str(folder), "--instance-seed", "7", "--count", "50", "--greedy"], calls) == 0
    assert calls.made == [("eval", folder, 7, 50, True)]


@pytest.mark.parametrize("command", ["eval", "report"])
def test_a_run_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    calls = Calls()
    near = a_run(tmp_path / "first_run")
    assert rollart([command, str(tmp_path / "first_rum")], calls) == 2
    assert capsys.readouterr().err.endswith(f"first_rum; did you mean {near}?\n")
    assert rollart([command, str(tmp_path)], calls) == 2
    assert "holds no run" in capsys.readouterr().err
    assert calls.made == []


@pytest.mark.parametrize("words", [["--count", "0"], ["--instance-seed", "-1"]])
def test_eval_refuses_numbers_that_name_no_instance(tmp_path: Path, words: list[str]) -> None:
    assert rollart(["eval", str(a_run(tmp_path / "mine")), *words], Calls()) == 2


def test_report_prints_the_path_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "mine")
    assert rollart(["report", str(folder)], Calls()) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"


def test_explain_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    calls = Calls()
    assert rollart(["explain", "first_run", "rollart", "seed=3", "--profile", "none"], calls) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "RollArt's order, alpha 1" in text
    assert "seed 3 command line" in text
    assert calls.made == []


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "smoke", "--overwrit"], "unknown option --overwrit; did you mean --overwrite?"),
        (["report", "x", "y"], "unexpected argument y"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_call_is_a_usage_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        rollart(words, Calls())
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_the_machine_profile_is_used_where_it_exists(tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    assert profile_path(None, machine) is None
    machine.write_text("trainer: {threads: 2}\n", encoding="utf-8")
    assert profile_path(None, machine) == str(machine)
    assert profile_path("none", machine) is None
    assert profile_path("other.yaml", machine) == "other.yaml"


def test_the_command_line_comes_up_without_heavy_packages() -> None:
    """Field case 41: help, explain and refusals import neither torch nor Ray nor an environment."""
    code = (
        "import sys; from rollart.cli.main import main; main(['explain', 'smoke', '--profile', 'none']);"
        "print(sorted({'torch', 'ray', 'transformers', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from rollart.cli.main import main; sys.exit(main(['explain', 'smoke', '--profile', 'none']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.stderr is not None
        assert run.stderr.read() == ""
    assert run.returncode == 141
