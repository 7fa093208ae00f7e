"""A run seen from outside: its growing log, and the processes that are left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from rollart.runtime.follow import Following, alive_after, family, working_in

HEADER = b'{"schema":1,"run":"x"}\n'


def test_every_whole_line_is_handed_out_once_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = Following(path)
    assert log.events() == []
    path.write_bytes(HEADER + b'{"seq":1,"kind":"a"}\n{"seq":2,"ki')
    assert [event["seq"] for event in log.events()] == [1]
    assert log.events() == []
    with path.open("ab") as file:
        file.write(b'nd":"b"}\n')
    assert [event["kind"] for event in log.events()] == ["b"]


def test_a_resume_that_cuts_the_torn_line_off_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(HEADER + b'{"seq":1,"kind":"a"}\n{"seq":2,"kind":"torn')
    log = Following(path)
    assert len(log.events()) == 1
    path.write_bytes(HEADER + b'{"seq":1,"kind":"a"}\n' + HEADER + b'{"seq":2,"kind":"resumed"}\n')
    assert [event["kind"] for event in log.events()] == ["resumed"]


def test_processes_are_found_by_family_and_by_where_they_work_and_the_dead_are_not_counted(tmp_path: Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    [child] = family(parent.pid)
    assert child.name() == "sleep"
    assert len(working_in(tmp_path, 0.0)) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert family(parent.pid) == []
    assert working_in(tmp_path, 0.0) == ["sleep 60"]
    assert alive_after([child], 0.0) == ["sleep 60"]
    child.kill()
    assert alive_after([child], 10.0) == []
    assert working_in(tmp_path, 10.0) == []
    assert alive_after([psutil.Process()], 0.0) != []
