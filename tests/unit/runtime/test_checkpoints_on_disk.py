"""Checkpoints as files: whole or not at all, and what is wrong with one is said with the file and the byte."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshots import TASKS, snapshot, trajectory

from rollart.core.errors import StoreError, TrainerError, TrainerLost
from rollart.core.snapshot import Snapshot
from rollart.core.types import Failure
from rollart.observe.past import Past
from rollart.runtime.checkpoint_reading import CONTROL, MARK, TRAINER, latest
from rollart.runtime.checkpoints import DiskCheckpoints

WEIGHTS = bytes(range(256)) * 64


def save(
    folder: Path, one: Snapshot, *, keep: int = 2, incarnation: int = 0, weights: bytes = WEIGHTS, **more: Any
) -> str | Failure:
    async def trainers_part(path: str) -> None:
        await asyncio.to_thread(Path(path).write_bytes, weights)

    store = DiskCheckpoints(folder, keep=keep, incarnation=incarnation, **more)
    return asyncio.run(store.save(one, trainers_part))


def failed(folder: Path, one: Snapshot, error: Exception) -> str | Failure:
    async def trainers_part(path: str) -> None:
        await asyncio.to_thread(Path(path + ".partial").write_bytes, b"x" * 321)
        raise error

    return asyncio.run(DiskCheckpoints(folder, keep=2, incarnation=0).save(one, trainers_part))


def same(one: object, other: object) -> bool:
    """Equal, arrays by value and type."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- whole ones ------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    """Field case 36: in the file, each task has its own cursor, with the digest of its own data set."""
    one = snapshot()
    path = save(tmp_path, one)
    found = latest(tmp_path)
    assert found is not None
    assert path == str(found.trainer) == str(tmp_path / "step-000010" / TRAINER)
    assert found.trainer.read_bytes() == WEIGHTS
    assert found.notes == ()
    assert same(found.snapshot, one)
    assert {task: cursor.position for task, cursor in found.snapshot.cursors.items()} == dict(
        zip(TASKS, (17, 400), strict=True)
    )


def test_the_digest_of_each_data_set_is_kept(tmp_path: Path) -> None:
    """Field case 34: in the file, a data set that has changed can be told from the one that was being trained on."""
    save(tmp_path, snapshot())
    found = latest(tmp_path)
    assert found is not None
    assert {task: cursor.data for task, cursor in found.snapshot.cursors.items()} == {
        "frozen_lake": "lake",
        "max_digit": "digits",
    }


def test_the_mark_names_every_file_with_size_and_digest(tmp_path: Path) -> None:
    save(tmp_path, snapshot())
    assert names(tmp_path) == ["step-000010"]
    assert names(tmp_path / "step-000010") == [MARK, CONTROL, TRAINER]
    mark = json.loads((tmp_path / "step-000010" / MARK).read_text())
    assert (mark["step"], mark["version"], mark["seq"]) == (10, 10, 100)
    assert mark["files"][TRAINER]["bytes"] == len(WEIGHTS)
    assert all(len(file["blake2b"]) == 128 for file in mark["files"].values())


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30):
        save(tmp_path, snapshot(step), keep=2)
    assert names(tmp_path) == ["step-000020", "step-000030"]


def test_a_step_is_saved_again_in_place(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10, seq=100))
    save(tmp_path, snapshot(10, seq=170), weights=b"new")
    found = latest(tmp_path)
    assert found is not None
    assert (found.snapshot.seq, found.trainer.read_bytes()) == (170, b"new")
    assert names(tmp_path) == ["step-000010"]


def test_a_crash_while_a_step_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    (tmp_path / "step-000010").rename(tmp_path / "step-000010.old")
    found = latest(tmp_path)
    assert found is not None
    assert found.snapshot.step == 10
    assert found.trainer.is_file()


def test_a_course_of_the_run_that_was_taken_back_is_removed(tmp_path: Path) -> None:
    save(tmp_path, snapshot(20))
    save(tmp_path, snapshot(12))
    assert names(tmp_path) == ["step-000012"]


def test_the_record_is_on_disk_before_the_mark(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    partial = tmp_path / "step-000010.partial"
    save(tmp_path, snapshot(), flush=lambda: seen.append(names(partial)))
    assert seen == [[CONTROL, TRAINER]]


def test_evidence_is_left_out_whatever_it_is(tmp_path: Path) -> None:
    """A user's objects need not be picklable, and reading a checkpoint runs no code of theirs."""
    assert isinstance(save(tmp_path, snapshot(evidence=(lambda: None, object()))), str)
    found = latest(tmp_path)
    assert found is not None
    assert {one.evidence for group in found.snapshot.groups for one in group.done} == {()}
    assert same(found.snapshot, snapshot())


def test_nothing_at_all_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "checkpoints") is None
    assert latest(tmp_path) is None


# --- half-written and damaged ones -----------------------------------------------------------------------------------


def test_a_half_written_one_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    save(tmp_path, snapshot(20))
    (tmp_path / "step-000020" / MARK).unlink()
    (tmp_path / "step-000020").rename(tmp_path / "step-000020.partial")
    found = latest(tmp_path)
    assert found is not None
    assert found.snapshot.step == 10
    assert found.notes == (f"{tmp_path / 'step-000020.partial'}: half-written, left out",)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def remarked(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A mark that is JSON, and something else than what was written."""

    def damage(path: Path) -> None:
        mark = json.loads(path.read_text())
        change(mark)
        path.write_text(json.dumps(mark))

    return damage


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (TRAINER, truncate, f"{TRAINER}: truncated at byte 1000 of {len(WEIGHTS)}"),
        (TRAINER, flip, f"{TRAINER}: {len(WEIGHTS)} bytes as written, but with another content"),
        (TRAINER, extend, f"{TRAINER}: goes on beyond byte {len(WEIGHTS)}"),
        (TRAINER, Path.unlink, f"{TRAINER}: is missing ({len(WEIGHTS)} bytes)"),
        (CONTROL, truncate, f"{CONTROL}: truncated at byte 1000 of "),
        (CONTROL, flip, f"{CONTROL}: "),
        (MARK, Path.unlink, f"{MARK}: is missing"),
        (MARK, lambda path: path.write_text('{"format": "roll'), f"{MARK}: is not JSON at byte 11"),
        (
            MARK,
            lambda path: path.write_text('{"format": "rollart-checkpoint-9", "files": {}}'),
            "format 'rollart-checkp",
        ),
        (MARK, lambda path: path.write_text("[]"), f"{MARK}: is no mark"),
        (MARK, lambda path: path.write_text("[" * 100_000), f"{MARK}: is no mark"),
        (MARK, lambda path: path.write_bytes(b"\xff{}"), f"{MARK}: is no mark"),
        (MARK, remarked(lambda mark: mark["files"][TRAINER].update(bytes="zz")), f"'bytes' of {TRAINER} is 'zz'"),
        (MARK, remarked(lambda mark: mark["files"][TRAINER].update(bytes=1e400)), f"'bytes' of {TRAINER} is inf"),
        (MARK, remarked(lambda mark: mark["files"].update({TRAINER: 5})), f"size and digest of {TRAINER} are 5"),
        (MARK, remarked(lambda mark: mark["files"][CONTROL].pop("blake2b")), f"size and digest of {CONTROL} are {{"),
        (MARK, remarked(lambda mark: mark.update(files=[TRAINER, CONTROL])), f"{MARK}: is no mark"),
        (MARK, remarked(lambda mark: mark["files"].update({"\0": mark["files"][CONTROL]})), f"{MARK}: is no mark"),
        (MARK, remarked(lambda mark: mark.update(incarnation=None)), "'incarnation' is None"),
        (MARK, remarked(lambda mark: mark.pop("seq")), "'seq' is None"),
        (MARK, remarked(lambda mark: mark.update(seq=99)), f"{CONTROL}: is of event 100, but its mark is of event 99"),
    ],
)
def test_a_damaged_one_is_passed_over_with_file_and_byte_and_the_one_before_it_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], object], said: str
) -> None:
    save(tmp_path, snapshot(10))
    save(tmp_path, snapshot(20))
    damage(tmp_path / "step-000020" / name)
    found = latest(tmp_path)
    assert found is not None
    assert found.snapshot.step == 10
    [note] = found.notes
    assert note.startswith(f"step-000020 is passed over: {tmp_path / 'step-000020'}")
    assert said in note


def test_when_none_is_whole_each_is_listed_with_its_reason(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    save(tmp_path, snapshot(20))
    truncate(tmp_path / "step-000020" / TRAINER)
    (tmp_path / "step-000010" / CONTROL).unlink()
    with pytest.raises(StoreError) as error:
        latest(tmp_path)
    first, *lines = str(error.value).splitlines()
    assert "no checkpoint is whole" in first
    assert [line.split()[0] for line in lines] == ["step-000020", "step-000010"]
    assert "truncated at byte 1000" in lines[0]
    assert f"{CONTROL}: is missing" in lines[1]


def test_one_that_the_event_log_does_not_reach_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10, seq=100))
    save(tmp_path, snapshot(20, seq=200))
    found = latest(tmp_path, Past(incarnations=1, ends=(150,), last_seq=150))
    assert found is not None
    assert found.snapshot.seq == 100
    assert "is of event 200, but the event log ends at 150" in found.notes[0]


def test_one_of_a_course_that_was_taken_back_never_counts_again(tmp_path: Path) -> None:
    """It was passed over once, the run went on after event 100 and is beyond event 200 now, as it was when it was kept."""
    save(tmp_path, snapshot(10, seq=100))
    save(tmp_path, snapshot(20, seq=200))
    went_on = Past(incarnations=2, ends=(250, 300), resumes=((1, 100),), last_seq=300)
    found = latest(tmp_path, went_on)
    assert found is not None
    assert found.snapshot.seq == 100
    assert "is of event 200 of a course that was taken back: the run went on after event 100" in found.notes[0]
    save(tmp_path, snapshot(20, seq=210), incarnation=1)
    found = latest(tmp_path, went_on)
    assert found is not None
    assert (found.snapshot.seq, found.notes) == (210, ())


def test_whole_ones_that_the_log_does_not_tell_of_are_not_called_damaged(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10, seq=100))
    log = tmp_path / "events.jsonl"
    with pytest.raises(StoreError) as error:
        latest(tmp_path, Past(path=log))
    first, line = str(error.value).splitlines()
    assert first.startswith(f"{log} is missing, and no whole checkpoint in {tmp_path} goes with it")
    assert line.endswith(f"is of event 100, but the event log {log} is missing")


def test_sizes_alone_can_be_looked_at(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    flip(tmp_path / "step-000010" / TRAINER)
    assert latest(tmp_path, thorough=False) is not None
    truncate(tmp_path / "step-000010" / TRAINER)
    with pytest.raises(StoreError, match="truncated at byte 1000"):
        latest(tmp_path, thorough=False)


def test_reading_makes_no_object_that_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    save(tmp_path, snapshot(20))
    evil = pickle.dumps(Path("x"))
    mark = json.loads((tmp_path / "step-000020" / MARK).read_text())
    (tmp_path / "step-000020" / CONTROL).write_bytes(evil)
    mark["files"][CONTROL] = {"bytes": len(evil), "blake2b": hashlib.blake2b(evil).hexdigest()}
    (tmp_path / "step-000020" / MARK).write_text(json.dumps(mark))
    found = latest(tmp_path)
    assert found is not None
    assert found.snapshot.step == 10
    assert "Path is no part of a checkpoint" in found.notes[0]


# --- what cannot be written ------------------------------------------------------------------------------------------


def test_what_could_not_be_read_back_is_refused_where_it_is_written(tmp_path: Path) -> None:
    one = snapshot()
    strange = trajectory(one.groups[0].instance, 0, metrics={"where": Path("x")})
    groups = (replace(one.groups[0], done=(strange,)), *one.groups[1:])
    outcome = save(tmp_path, replace(one, groups=groups))
    assert isinstance(outcome, Failure)
    assert (outcome.where, outcome.kind, outcome.retryable) == ("store", "refused", False)
    assert CONTROL in outcome.detail
    assert "Path is no part of a checkpoint" in outcome.detail
    assert names(tmp_path) == []


def test_a_trainer_that_cannot_write_is_a_failure_and_what_was_kept_stays(tmp_path: Path) -> None:
    save(tmp_path, snapshot(10))
    for kind, error in (
        ("full", StoreError("[Errno 28] No space left on device")),
        ("full", TrainerError("rank 0: No space left on device")),
        ("refused", TrainerError("rank 0: Read-only file system")),
        ("torn", TrainerError("rank 0: Input/output error")),
    ):
        outcome = failed(tmp_path, snapshot(20), error)
        assert isinstance(outcome, Failure)
        assert (outcome.where, outcome.kind) == ("store", kind)
        assert f"{TRAINER}: cannot be written at byte 321: " in outcome.detail
        assert names(tmp_path) == ["step-000010"]
    found = latest(tmp_path)
    assert found is not None
    assert found.snapshot.step == 10


def test_a_trainer_that_is_lost_over_it_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(TrainerLost):
        failed(tmp_path, snapshot(), TrainerLost("gone"))
    assert latest(tmp_path) is None


def test_a_record_that_cannot_be_written_leaves_no_mark(tmp_path: Path) -> None:
    def full() -> None:
        raise StoreError("events.jsonl: cannot be written at byte 7: No space left") from OSError(28, "No space left")

    outcome = save(tmp_path, snapshot(), flush=full)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "full"
    assert "events.jsonl: cannot be written at byte 7" in outcome.detail
    assert names(tmp_path) == []


def test_a_full_disk_is_told_with_file_and_byte_and_the_one_before_stays(tmp_path: Path) -> None:
    """A process that may not write files of more than 20,000 bytes: the trainer's part fits, control's does not."""
    code = f"""
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from snapshots import snapshot
from rollart.runtime.checkpoint_reading import latest
from rollart.runtime.checkpoints import DiskCheckpoints
async def trainers_part(path):
    Path(path).write_bytes(b"w" * 100)
store = DiskCheckpoints(Path({str(tmp_path)!r}), keep=2, incarnation=0)
assert isinstance(asyncio.run(store.save(snapshot(10), trainers_part)), str)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
outcome = asyncio.run(store.save(snapshot(20, members=400), trainers_part))
print(outcome.where, outcome.kind, outcome.detail)
print(latest(Path({str(tmp_path)!r})).snapshot.step)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, step = done.stdout.splitlines()
    assert (
        told
        == f"store full {tmp_path / 'step-000020.partial' / CONTROL}: cannot be written at byte 20000: File too large"
    )
    assert step == "10"
    assert names(tmp_path) == ["step-000010"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in its place")
    outcome = save(tmp_path / "checkpoints", snapshot())
    assert isinstance(outcome, Failure)
    assert (outcome.where, outcome.kind) == ("store", "refused")
    assert f"{tmp_path / 'checkpoints'}" in outcome.detail
    assert "cannot be written at byte 0" in outcome.detail
