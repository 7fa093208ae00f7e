"""A resume that is refused has changed nothing, says what is wrong with which file, and names a way out that works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_run_folder import CONFIG, Incarnation, finish, killed

from rollart.config.load import load_file
from rollart.core.errors import ClusterError, ConfigError, RollartError, RunFailed, StoreError
from rollart.observe.log import EventLog
from rollart.observe.run_folder import CONFIG as WRITTEN
from rollart.observe.run_folder import EVENTS, METRICS, held
from rollart.recipes.registry import resolve
from rollart.runtime import launch
from rollart.runtime.folder import CHECKPOINTS, Start, can_go_on, where_from

LOCK = ".lock"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def garble(folder: Path, seq: int, line: bytes = b"\0" * 20) -> int:
    """Put other bytes in place of an event of the log's first incarnation; returns where."""
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    assert json.loads(lines[seq])["seq"] == seq  # the header is line 0
    lines[seq] = line + b"\n"
    (folder / EVENTS).write_bytes(b"".join(lines))
    return sum(map(len, lines[:seq]))


def kept(folder: Path) -> list[int]:
    """`seq` of the checkpoints of `killed`, the older one first."""
    marks = sorted((folder / CHECKPOINTS).glob("step-*/complete.json"))
    return [json.loads(mark.read_text())["seq"] for mark in marks]


# --- nothing is changed ----------------------------------------------------------------------------------------------


def broken_log(folder: Path) -> list[str]:
    garble(folder, 3)
    return []


def gone_log(folder: Path) -> list[str]:
    (folder / EVENTS).unlink()
    return []


def no_room(folder: Path) -> list[str]:
    return ["engine.threads=1000000"]


def no_such_environment(folder: Path) -> list[str]:
    return ["tasks.max_digit.env={kind: python, entry: 'json:loads'}"]


def a_line_without_step(folder: Path) -> list[str]:
    """Of an event that is JSON, whose place is in what stands, but which no metrics can be computed from."""
    garble(folder, 3, b'{"seq":3,"t":0.0,"kind":"step_finished"}')
    return []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (broken_log, StoreError),
        (gone_log, StoreError),
        (a_line_without_step, StoreError),
        (no_room, ClusterError),
        (no_such_environment, RunFailed),
    ],
)
def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(
    tmp_path: Path, wrong: Callable[[Path], list[str]], error: type[RollartError]
) -> None:
    killed(tmp_path)
    words = ["schedule.steps=8", *wrong(tmp_path)]
    before = contents(tmp_path)
    with pytest.raises(error):
        launch.resume(tmp_path, resolve(str(tmp_path / WRITTEN), words), plain=True)
    assert contents(tmp_path) == before
    assert load_file(tmp_path / WRITTEN).config.schedule.steps == 6


def test_a_new_run_that_is_refused_can_be_started_again(tmp_path: Path) -> None:
    with pytest.raises(ClusterError):
        launch.train(resolve("smoke", [f"output_dir={tmp_path}", "engine.threads=1000000"]), plain=True)
    assert list(tmp_path.iterdir()) == []
    words = [f"output_dir={tmp_path}", "tasks.max_digit.env={kind: python, entry: 'json:loads'}"]
    with pytest.raises(RunFailed):
        launch.train(resolve("smoke", words), plain=True)
    assert contents(tmp_path / "smoke") == {}


def test_metrics_stay_when_what_they_are_made_anew_from_cannot_be_read(tmp_path: Path) -> None:
    killed(tmp_path)
    start = where_from(tmp_path, CONFIG)
    before = (tmp_path / METRICS).read_bytes()
    assert before
    garble(tmp_path, kept(tmp_path)[-1] - 1)  # as if it had come since
    with pytest.raises(StoreError, match="is not JSON"):
        Incarnation(tmp_path, start)
    assert (tmp_path / METRICS).read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


# --- a broken log ----------------------------------------------------------------------------------------------------


def test_a_break_before_a_checkpoint_leaves_the_one_before_the_break(tmp_path: Path) -> None:
    killed(tmp_path)
    older, newer = kept(tmp_path)
    at = garble(tmp_path, older + 3)
    resumed = where_from(tmp_path, CONFIG).resumed
    assert resumed is not None
    assert resumed.snapshot is not None
    assert resumed.snapshot.seq == older
    passed, taken_back = resumed.notes
    assert f"is of event {newer}, and the event log is broken before that: {tmp_path / EVENTS}" in passed
    assert f"{tmp_path / EVENTS}: the line at byte {at} is not JSON" in taken_back
    assert taken_back.endswith("it stands after step-000002, so it is taken back")
    finish(Incarnation(tmp_path, where_from(tmp_path, CONFIG)), range(2, 6))
    events = list(EventLog(tmp_path / EVENTS).events())
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    again = where_from(tmp_path, resolve("smoke", ["schedule.steps=9"]).config).resumed
    assert again is not None
    assert again.snapshot is not None
    assert (again.snapshot.step, again.notes) == (6, ())


def test_what_a_line_that_cannot_be_read_may_have_used_is_not_used_again(tmp_path: Path) -> None:
    """The last event of `killed` published version 5."""
    killed(tmp_path)
    whole = where_from(tmp_path, CONFIG)
    last = json.loads((tmp_path / EVENTS).read_bytes().splitlines()[-1])
    assert (last["kind"], last["version"]) == ("published", 5)
    garble(tmp_path, last["seq"])
    start = where_from(tmp_path, CONFIG)
    assert whole.resumed is not None
    assert start.resumed is not None
    assert start.resumed.highest_version == whole.resumed.highest_version == 5
    assert start.first_engine >= whole.first_engine
    assert start.first_host > whole.first_host


def test_a_line_that_is_missing_is_a_break(tmp_path: Path) -> None:
    killed(tmp_path)
    older, _ = kept(tmp_path)
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    del lines[older + 2 : older + 4]
    (tmp_path / EVENTS).write_bytes(b"".join(lines))
    resumed = where_from(tmp_path, CONFIG).resumed
    assert resumed is not None
    assert resumed.snapshot is not None
    assert resumed.snapshot.seq == older
    assert f"is not event {older + 2}, which must be there" in resumed.notes[0]


def test_a_break_before_all_checkpoints_says_that_the_run_has_to_begin_again(tmp_path: Path) -> None:
    killed(tmp_path)
    at = garble(tmp_path, 3)
    with pytest.raises(StoreError) as error:
        where_from(tmp_path, CONFIG)
    first, newer, older, out = str(error.value).splitlines()
    assert first.startswith(f"{tmp_path / EVENTS} is broken, and no whole checkpoint in ")
    assert f"the line at byte {at} is not JSON" in newer
    assert f"the line at byte {at} is not JSON" in older
    assert out.endswith(f"begin the run again: rollart train {tmp_path / WRITTEN} name=NAME")


def test_a_log_that_is_gone_or_too_short_is_named_and_not_the_checkpoints(tmp_path: Path) -> None:
    killed(tmp_path)
    log = tmp_path / EVENTS
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]))
    with pytest.raises(StoreError, match=f"^{log} ends at event 3, and no whole checkpoint"):
        where_from(tmp_path, CONFIG)
    log.write_bytes(b"")
    with pytest.raises(StoreError, match=f"^{log} is empty, and no whole checkpoint"):
        where_from(tmp_path, CONFIG)
    log.unlink()
    with pytest.raises(StoreError, match=f"^{log} is missing, and no whole checkpoint") as error:
        where_from(tmp_path, CONFIG)
    assert "no checkpoint is whole" not in str(error.value)


def test_a_log_without_its_header_says_a_way_out(tmp_path: Path) -> None:
    killed(tmp_path)
    garble_header = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(b"".join([b"\0\0\n", *garble_header[1:]]))
    with pytest.raises(StoreError, match="the line at byte 0 is not JSON") as error:
        where_from(tmp_path, CONFIG)
    assert "begin the run again: rollart train" in str(error.value)


def test_a_run_that_kept_no_checkpoints_is_not_thrown_away(tmp_path: Path) -> None:
    run = Incarnation(tmp_path, Start())
    run.step(0)
    run.close()
    none = resolve("smoke", ["checkpoint.every=0"]).config
    with pytest.raises(ConfigError, match=r"kept no checkpoint \(checkpoint\.every=0\) to go on from; begin it again"):
        where_from(tmp_path, none)
    with pytest.raises(ConfigError, match=r"kept no checkpoint \(none was completed\)"):
        where_from(tmp_path, CONFIG)


def test_a_checkpoint_that_could_not_be_kept_is_the_reason_that_is_told(tmp_path: Path) -> None:
    run = Incarnation(tmp_path, Start())
    run.record("advisory", code="checkpoint_failed", text="no checkpoint after step 0: store full: x")
    run.step(0)
    run.close()
    with pytest.raises(ConfigError, match=r"kept no checkpoint \(no checkpoint after step 0: store full: x\)"):
        where_from(tmp_path, CONFIG)


# --- courses ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_course_that_was_taken_back_does_not_come_back(tmp_path: Path) -> None:
    """The newest cannot be read for a while: the run goes on from the one before, and is killed beyond that event."""
    killed(tmp_path)
    newest = tmp_path / CHECKPOINTS / "step-000004"
    shutil.move(newest, tmp_path / "elsewhere")
    older, newer = kept(tmp_path)[0], json.loads((tmp_path / "elsewhere" / "complete.json").read_text())["seq"]
    run = Incarnation(tmp_path, where_from(tmp_path, CONFIG))
    run.step(2)
    run.step(3)
    run.step(4)
    assert run.record.seq > newer
    run.close()
    shutil.move(tmp_path / "elsewhere", newest)
    resumed = where_from(tmp_path, CONFIG).resumed
    assert resumed is not None
    assert resumed.snapshot is not None
    assert resumed.snapshot.seq == older
    assert f"is of event {newer} of a course that was taken back" in resumed.notes[0]


# --- what is told of it ----------------------------------------------------------------------------------------------


def test_a_run_can_be_gone_on_with_when_a_resume_would_take_it(tmp_path: Path) -> None:
    assert not can_go_on(tmp_path)
    killed(tmp_path)
    assert can_go_on(tmp_path)
    garble(tmp_path, 3)
    assert not can_go_on(tmp_path)


def test_a_run_that_is_done_is_not_to_be_gone_on_with(tmp_path: Path) -> None:
    killed(tmp_path)
    finish(Incarnation(tmp_path, where_from(tmp_path, CONFIG)), range(4, 6))
    assert not can_go_on(tmp_path)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(StoreError, match=r"/\.lock: cannot be opened for writing: Is a directory"), held(tmp_path):
        raise AssertionError("not reached")


def test_who_finds_a_run_in_use_is_told_what_can_be_done(tmp_path: Path) -> None:
    """A run cannot be resumed under another name."""
    with held(tmp_path):
        with pytest.raises(ClusterError, match=r"wait for it or end it$"), held(tmp_path):
            raise AssertionError("not reached")
        with pytest.raises(ClusterError, match=r"wait for it or end it, or use name=NAME$"):
            launch.train(resolve("smoke", [f"output_dir={tmp_path.parent}", f"name={tmp_path.name}"]), plain=True)
