"""Processes of a run are found when the run is gone, and ended; nobody else's are touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.core.errors import ClusterError, StoreError
from rollart.runtime.reap import RAY_LOGS, RECORD, Identity, Marks, end_earlier, find, labelled

DAEMON = """
import os, subprocess, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.write(1, str(os.getpid()).encode())
os.close(1)
os.close(2)
time.sleep(60)
"""
RUN = """
import subprocess, sys, time
from pathlib import Path
from rollart.runtime.reap import labelled
with labelled(Path(sys.argv[1])) as label:
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    label.look()
    print(own.pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def sleeper(**options: Any) -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **options) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def daemon(**options: Any) -> psutil.Process:
    """A process with a session of its own, whose parent is gone."""
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, check=True, **options)
    return psutil.Process(int(done.stdout))


def identity(process: psutil.Process) -> Identity:
    text = Path(f"/proc/{process.pid}/stat").read_text()
    return Identity(process.pid, int(text.rsplit(")", 1)[1].split()[19]))


def marks(tmp_path: Path, **changes: Any) -> Marks:
    facts: dict[str, Any] = {"recorded": frozenset(), "raylets": frozenset(), "ray_folder": tmp_path / "none"}
    return Marks(**(facts | changes))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_what_a_killed_run_left_is_ended_before_its_folder_is_used_again(tmp_path: Path) -> None:
    """Field case 32: after kill -9, a child in a session of its own lives on, and is gone when the next run begins."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        left = psutil.Process(int(run.stdout.readline()))
        with pytest.raises(ClusterError, match="is alive"):
            end_earlier(tmp_path)
        run.send_signal(signal.SIGKILL)
    assert alive(left)
    with sleeper() as other, labelled(tmp_path):
        assert not alive(left)
        assert alive(other)
    assert not (tmp_path / RECORD).exists()


def test_what_was_there_before_a_run_stays_and_a_guest_leaves_its_host_alone(tmp_path: Path) -> None:
    with sleeper() as before:
        with labelled(tmp_path) as label, sleeper(start_new_session=True) as own:
            label.look()
            record = (tmp_path / RECORD).read_text()
            assert str(own.pid) in record
            assert str(before.pid) not in record
            with labelled(tmp_path, guest=True):
                pass
            assert alive(own)
        assert alive(before)


def test_a_child_left_behind_is_ended_with_the_block(tmp_path: Path) -> None:
    with labelled(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert process.wait(timeout=30) in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_daemon_is_found_by_what_it_inherited(tmp_path: Path) -> None:
    with sleeper() as raylet, sleeper() as unmarked:
        who = identity(raylet)
        left = daemon(env={**os.environ, "RAY_RAYLET_PID": str(who.pid)})
        found = find(marks(tmp_path, raylets=frozenset({who})))
        assert identity(left) in found
        assert identity(unmarked) not in found
        # the id was reused by a later raylet, whose worker it then is
        earlier = Identity(who.pid, who.started - 1)
        assert identity(left) not in find(marks(tmp_path, raylets=frozenset({earlier})))
        # an older process cannot be a worker of a younger raylet
        later = Identity(who.pid, identity(left).started + 1)
        assert identity(left) not in find(marks(tmp_path, raylets=frozenset({later})))
        left.kill()


def test_a_process_is_found_by_where_its_output_goes_and_a_reader_is_not(tmp_path: Path) -> None:
    ray_folder = tmp_path / "ray"
    ray_folder.mkdir()
    (ray_folder / "log").touch()
    with (
        (ray_folder / "log").open("w") as out, (ray_folder / "log").open() as read,
        sleeper(stdout=out) as writer, sleeper(stdin=read) as reader,
    ):  # fmt: skip
        found = find(marks(tmp_path, ray_folder=ray_folder))
        assert identity(writer) in found
        assert identity(reader) not in found


def test_a_reused_id_is_left_alone(tmp_path: Path) -> None:
    with sleeper() as innocent:
        who = identity(innocent)
        record = recorded(tmp_path, [[who.pid, who.started - 1, "sleep"]])
        assert end_earlier(tmp_path) == []
        assert alive(innocent)
        assert not record.exists()


def test_ids_of_another_machine_mean_nothing(tmp_path: Path) -> None:
    with sleeper() as innocent:
        recorded(tmp_path, [[*identity(innocent), "sleep"]], machine="another")
        assert end_earlier(tmp_path) == []
        assert alive(innocent)


def recorded(folder: Path, processes: list[list[Any]], **changes: Any) -> Path:
    """A record as a run that is gone left it."""
    with labelled(folder):
        record = json.loads((folder / RECORD).read_text())
    record |= {"run": [record["run"][0], record["run"][1] - 1], "processes": processes} | changes
    (folder / RECORD).write_text(json.dumps(record))
    return folder / RECORD


def test_rays_folder_goes_with_the_run_and_its_logs_stay_when_it_fails(tmp_path: Path) -> None:
    for failing in (False, True):
        try:
            with labelled(tmp_path) as label:
                logs = label.ray_folder / "session_1" / "logs"
                logs.mkdir(parents=True)
                (logs / "worker.err").write_text("what happened")
                if failing:
                    raise TimeoutError
        except TimeoutError:
            pass
        assert not label.ray_folder.exists()
        assert (tmp_path / RAY_LOGS / "worker.err").exists() == failing


def test_a_record_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(ClusterError, match=RECORD):
        end_earlier(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone"), labelled(tmp_path / "gone"):
        pass


def test_a_process_that_will_not_end_when_told_is_ended(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    began = time.monotonic()
    with labelled(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
    process.stdout.close()
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert time.monotonic() > began
