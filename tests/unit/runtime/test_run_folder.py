"""The folder of a run over its resumes: one stream per file, nothing thrown away unasked, every obstacle named."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshots import snapshot, trajectory

from rollart.config.load import load_file
from rollart.core.errors import ClusterError, ConfigError, RollartError, RunFailed, StoreError
from rollart.core.events import Recorder
from rollart.core.snapshot import Snapshot
from rollart.core.types import TaskInstance
from rollart.observe.display import Display
from rollart.observe.jsonl import read_rows
from rollart.observe.log import EventLog
from rollart.observe.metric_rows import STEP
from rollart.observe.run_folder import EVENTS, held, keep_config, results
from rollart.observe.trajectories import read_trajectories
from rollart.recipes.registry import resolve
from rollart.runtime.checkpoints import DiskCheckpoints
from rollart.runtime.folder import CHECKPOINTS, Start, open_records, where_from
from rollart.runtime.tokenizers import build_tokenizer

RESOLVED = resolve("smoke", ["schedule.steps=6"])
CONFIG = RESOLVED.config
ENDED: dict[str, Any] = {
    "cause": "env_done", "reward": 1.0, "turns": 1, "bad_actions": 0, "sampled": 5, "context": 12, "oldest_version": 0,
    "newest_version": 0, "spans": 1, "metrics": {}, "purpose": "train", "status": "done",
    "seconds": {"open": 0.1, "generate": 0.2, "step": 0.1, "score": 0.0, "total": 0.5},
}  # fmt: skip


class Incarnation:
    """A process that has a run: it records steps of one group each, and keeps checkpoints, as control would."""

    def __init__(self, folder: Path, start: Start, stream: io.StringIO | None = None) -> None:
        self.folder, self.incarnation = folder, start.incarnation
        self.stack = ExitStack()
        self.display = Display(stream or io.StringIO(), plain=True)
        self.stack.callback(self.display.close)
        self.records = open_records(folder, CONFIG, start, build_tokenizer(CONFIG.tokenizer), self.display, self.stack)
        kept = start.resumed.snapshot if start.resumed is not None else None
        self.now = kept.t_s if kept is not None else 0.0
        seq = kept.seq if kept is not None else 0
        self.record = Recorder(self.records.sinks, lambda: self.now, seq=seq, origin=0.0)
        self.version = kept.version if kept is not None else 0
        if start.resumed is not None:
            ids = {} if kept is None else {"step": kept.step, "version": kept.version}
            self.record("resumed", from_seq=seq, lost=start.resumed.lost, **ids)
        if kept is None:
            self.record(
                "run_started", recipe="smoke", steps=6, batch=8, group_size=2, max_staleness=1, sync_order="early",
                mix={"max_digit": 1.0}, success_at={"max_digit": 1.0},
            )  # fmt: skip
        else:
            assert start.resumed is not None
            number = start.resumed.highest_version + 1
            self.published(-1, number, again=self.version)
        self.record("engine_joined", engine=f"engine-{start.first_engine}", pool="default", version=self.version)
        self.record("host_joined", host=f"host-{start.first_host}")

    def published(self, step: int, version: int, **more: Any) -> None:
        self.version = version
        self.record("published", step=step, version=version, seconds=0.1, bytes=1, buckets=1, digest="d", **more)

    def step(self, step: int) -> None:
        """One group is opened, scored and trained."""
        self.now += 1.0
        instance = TaskInstance(task="max_digit", epoch=0, index=step, seed=step)
        ids: dict[str, Any] = {"group": instance.group_id, "task": "max_digit"}
        self.record("group_opened", members=2, room=1, **ids)
        for member in range(2):
            versions = {"oldest_version": self.version, "newest_version": self.version}
            self.record("traj_finished", traj=instance.traj_id(member), attempt=0, **(ENDED | versions | ids))
            self.records.keep(trajectory(instance, member, attempt=0))
        self.record("group_completed", members=2, reward_mean=1.0, oldest_version=self.version, **ids)
        self.record(
            "batch_released", step=step, version=self.version, groups=[instance.group_id], trajectories=2, tokens=10,
            staleness_mean=0.0, staleness_max=0, waited_s=0.1, quota={"max_digit": 1},
        )  # fmt: skip
        self.record("step_started", step=step, version=self.version)
        self.record("step_finished", step=step, version=self.version, seconds=0.5, trained_tokens=10, metrics={})
        self.published(step, self.version + 1)

    def checkpoint(self, step: int) -> Snapshot:
        one = replace(snapshot(step, seq=self.record.seq), t_s=self.now, version=self.version)

        async def trainers_part(path: str) -> None:
            await asyncio.to_thread(Path(path).write_bytes, b"weights")

        store = DiskCheckpoints(
            self.folder / CHECKPOINTS, keep=2, incarnation=self.incarnation, flush=self.records.flush
        )
        assert isinstance(asyncio.run(store.save(one, trainers_part)), str)
        self.record("checkpointed", step=step, version=self.version, seconds=0.01)
        return one

    def close(self) -> None:
        self.stack.close()


def killed(folder: Path) -> None:
    """A run that trained 5 steps, with a checkpoint after step 2 and one after step 4, and ended without a word."""
    folder.mkdir(parents=True, exist_ok=True)
    keep_config(folder, RESOLVED)
    run = Incarnation(folder, Start())
    for step in range(5):
        run.step(step)
        if step in (1, 3):
            run.checkpoint(step + 1)
    run.close()


def finish(run: Incarnation, steps: range) -> None:
    for step in steps:
        run.step(step)
    run.checkpoint(steps.stop)
    run.record("run_finished", status="done", why="6 steps are trained")
    run.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- one stream ------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_same_streams(tmp_path: Path) -> None:
    """Field case 43: metrics go on in the same file with steps rising only, one row for each, and the event log and the
    trajectories read as those of one run."""
    killed(tmp_path)
    start = where_from(tmp_path, CONFIG)
    assert start.resumed is not None
    assert start.resumed.snapshot is not None
    assert start.resumed.snapshot.step == 4
    finish(Incarnation(tmp_path, start), range(4, 6))

    steps = [int(row[STEP]) for row in read_rows(tmp_path / "metrics.jsonl") if "time/all/train_step/sum" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    log = EventLog(tmp_path / EVENTS)
    events = list(log.events())
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["step"] for event in events if event["kind"] == "step_finished"] == list(range(6))
    assert log.header["incarnation"] == 1
    times = [event["t"] for event in events]
    assert times == sorted(times)

    rows = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    ended = {event["seq"]: event["traj"] for event in events if event["kind"] == "traj_finished"}
    assert {row["seq"]: row["traj"] for row in rows} == ended
    assert len(rows) == 2 * len(ended)  # two segments each
    with_lost = [row for row in lines(tmp_path / "trajectories.jsonl") if "traj" in row]
    assert len(with_lost) == len(rows) + 4  # step 4 of the first incarnation is still in the file, and is not read


def test_what_is_lost_and_what_must_not_come_again_is_counted_over_all_incarnations(tmp_path: Path) -> None:
    killed(tmp_path)
    first = where_from(tmp_path, CONFIG).resumed
    assert first is not None
    assert first.snapshot is not None
    log = list(EventLog(tmp_path / EVENTS).events())
    assert first.lost == sum(event["seq"] > first.snapshot.seq for event in log) > 0
    assert first.highest_version == 5
    assert first.trainer == str(tmp_path / CHECKPOINTS / "step-000004" / "trainer.safetensors")

    run = Incarnation(tmp_path, where_from(tmp_path, CONFIG))
    assert run.version == 6
    run.step(4)
    run.close()
    second = where_from(tmp_path, CONFIG)
    assert second.resumed is not None
    assert second.resumed.snapshot is not None
    assert second.resumed.snapshot.seq == first.snapshot.seq
    assert second.resumed.highest_version == 7
    log = list(EventLog(tmp_path / EVENTS).events())
    assert second.resumed.lost == sum(event["seq"] > first.snapshot.seq for event in log)
    # engine-3 is in the snapshot's books, engine-4 and host-1 were started since
    assert (second.incarnation, second.first_engine, second.first_host) == (2, 5, 2)


def test_resuming_twice_from_one_checkpoint_takes_back_what_came_between(tmp_path: Path) -> None:
    killed(tmp_path)
    run = Incarnation(tmp_path, where_from(tmp_path, CONFIG))
    run.step(4)
    run.close()
    finish(Incarnation(tmp_path, where_from(tmp_path, CONFIG)), range(4, 6))
    rows = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert len(rows) == 4 * 6
    steps = [int(row[STEP]) for row in read_rows(tmp_path / "metrics.jsonl") if "time/all/train_step/sum" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    with results(tmp_path):
        pass
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["interruptions"]["run"]["count"] == 1
    assert summary["staleness"]["max"] == 0


def test_the_display_goes_on_with_the_picture_of_the_whole_run(tmp_path: Path) -> None:
    killed(tmp_path)
    stream = io.StringIO()
    finish(Incarnation(tmp_path, where_from(tmp_path, CONFIG), stream), range(4, 6))
    text = stream.getvalue()
    assert text.startswith("resumed after step 4; ")
    assert "events after that are taken back and done again" in text
    assert "step 6/6" in text


def test_a_run_that_died_before_its_first_checkpoint_begins_anew_in_the_same_log(tmp_path: Path) -> None:
    keep_config(tmp_path, RESOLVED)
    Incarnation(tmp_path, Start()).close()
    start = where_from(tmp_path, CONFIG)
    assert start.resumed is not None
    assert start.resumed.snapshot is None
    assert start.resumed.lost == 3
    finish(Incarnation(tmp_path, start), range(6))
    events = list(EventLog(tmp_path / EVENTS).events())
    assert [event["kind"] for event in events[:2]] == ["resumed", "run_started"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [row[STEP] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_folder_without_a_log_begins_too(tmp_path: Path) -> None:
    start = where_from(tmp_path, CONFIG)
    assert start.resumed is not None
    assert (start.resumed.lost, start.incarnation) == (0, 0)
    Incarnation(tmp_path, start).close()
    assert EventLog(tmp_path / EVENTS).header["incarnation"] == 0


@pytest.mark.parametrize("name", [EVENTS, "trajectories.jsonl", "metrics.jsonl"])
def test_a_torn_last_line_is_cut_off_and_told(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    killed(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":99,"t":')
    start = where_from(tmp_path, CONFIG)
    assert start.resumed is not None
    told = f"{path}: the last line is torn at byte {len(whole)} (14 bytes)"
    assert (told in "".join(start.resumed.notes)) == (name == EVENTS)
    finish(Incarnation(tmp_path, start), range(4, 6))
    assert (told in caplog.text) == (name == "trajectories.jsonl")
    lines(path)


# --- what cannot go on -----------------------------------------------------------------------------------------------


def test_a_finished_run_says_how_to_train_it_further(tmp_path: Path) -> None:
    killed(tmp_path)
    finish(Incarnation(tmp_path, where_from(tmp_path, CONFIG)), range(4, 6))
    with pytest.raises(ConfigError, match=r"is done: its 6 steps are trained; .*resume .* schedule\.steps=12"):
        where_from(tmp_path, CONFIG)
    longer = resolve("smoke", ["schedule.steps=12"]).config
    start = where_from(tmp_path, longer)
    assert start.resumed is not None
    assert start.resumed.snapshot is not None
    assert start.resumed.snapshot.step == 6
    with pytest.raises(ConfigError, match=r"schedule\.steps=3: 6 steps of .* are trained already"):
        where_from(tmp_path, resolve("smoke", ["schedule.steps=3"]).config)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


def damage(folder: Path) -> None:
    for path in folder.glob("*/trainer.safetensors"):
        path.write_bytes(b"w")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (empty, "is missing or empty, but the event log tells of checkpoints"),
        (damage, "truncated at byte 1 of 7"),
    ],
)
def test_a_run_whose_checkpoints_are_gone_is_not_thrown_away(
    tmp_path: Path, wrong: Callable[[Path], None], said: str
) -> None:
    killed(tmp_path)
    wrong(tmp_path / CHECKPOINTS)
    before = (tmp_path / EVENTS).read_bytes()
    with pytest.raises(StoreError, match=said):
        where_from(tmp_path, CONFIG)
    assert (tmp_path / EVENTS).read_bytes() == before


def test_a_log_that_was_cut_goes_on_from_the_checkpoint_that_it_still_reaches(tmp_path: Path) -> None:
    killed(tmp_path)
    whole = where_from(tmp_path, CONFIG).resumed
    assert whole is not None
    assert whole.snapshot is not None
    text = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(b"".join(text[: whole.snapshot.seq]))  # the header is one of these lines
    resumed = where_from(tmp_path, CONFIG).resumed
    assert resumed is not None
    assert resumed.snapshot is not None
    assert resumed.snapshot.step == 2
    assert "but the event log ends at" in resumed.notes[0]


# --- configuration and lock ------------------------------------------------------------------------------------------


def test_each_configuration_of_a_run_is_kept(tmp_path: Path) -> None:
    keep_config(tmp_path, RESOLVED)
    keep_config(tmp_path, RESOLVED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]
    for steps in (7, 8):
        keep_config(tmp_path, resolve("smoke", [f"schedule.steps={steps}"]))
    found = {path.stem: load_file(path).config.schedule.steps for path in tmp_path.glob("config*.yaml")}
    assert found == {"config-0": 6, "config-1": 7, "config": 8}


def test_two_processes_cannot_have_one_run(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match="in use by another process"), held(tmp_path):
            raise AssertionError("not reached")
    with held(tmp_path):
        pass


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root writes everywhere: a file stands in the folder's place
        folder = tmp_path / "a file" / "run"
        folder.parent.write_text("x")
    else:
        folder = tmp_path / "run"
        folder.mkdir()
        folder.chmod(0o500)
    with pytest.raises(StoreError, match=r"/run/\.lock: cannot be opened for writing: "), held(folder):
        raise AssertionError("not reached")


def test_a_full_disk_ends_the_record_with_file_and_byte_and_leaves_whole_lines(tmp_path: Path) -> None:
    """A process that may not write files of more than 1000 bytes records a run until it fails."""
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_run_folder import Incarnation, Start
run = Incarnation(Path({str(tmp_path)!r}), Start())
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for step in range(20):
    run.step(step)
    run.records.flush()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        "trajectories.jsonl: cannot be written at byte " in last or "events.jsonl: cannot be written at byte " in last
    )
    assert "File too large" in last
    assert "resume from the last checkpoint" in last
    for name in (EVENTS, "trajectories.jsonl"):
        assert (tmp_path / name).read_bytes()[-1:] in (b"\n", b"")
        lines(tmp_path / name)


def test_results_that_cannot_be_written_do_not_hide_why_the_run_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path)
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(RunFailed, match="the cause"), results(tmp_path):
        raise RunFailed("the cause")
    assert "summary.json: cannot be written at byte " in caplog.text
    with pytest.raises(RollartError, match=r"summary\.json: cannot be written at byte "), results(tmp_path):
        pass
