"""A run that is killed at once leaves processes behind; the next one in its folder finds and ends them, for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollart.runtime.reap import end_earlier

pytestmark = pytest.mark.ray

RUN = """
import subprocess, sys, time
from pathlib import Path
import ray
from rollart.config.schema import LocalWorld
from rollart.runtime.actors import RayActors, start_ray, stop_ray
from rollart.runtime.reap import labelled

class Host:
    def spawn(self):
        daemon = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n"
        daemon += "os.write(1, str(os.getpid()).encode())\\nos.close(1)\\nos.close(2)\\ntime.sleep(120)"
        return int(subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, check=True).stdout)

folder, ending = Path(sys.argv[1]), sys.argv[2]
with labelled(folder) as label:
    start_ray(LocalWorld(object_store_mb=80), namespace="reaped", label=label)
    try:
        print(ray.get(RayActors().start(Host).spawn.remote()), label.ray_folder, flush=True)
        if ending == "killed":
            time.sleep(120)
    finally:
        stop_ray()
"""


def started(folder: Path, ending: str) -> tuple[subprocess.Popen[str], psutil.Process, Path]:
    """A run whose environment host has started a daemon: its process, the daemon, Ray's folder."""
    process = subprocess.Popen([sys.executable, "-c", RUN, str(folder), ending], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    words = process.stdout.readline().split()
    process.stdout.close()
    return process, psutil.Process(int(words[0])), Path(words[1])


def test_after_a_kill_and_a_restart_nothing_of_the_run_is_left(tmp_path: Path) -> None:
    """Field case 32: Ray's processes, its folder, and a daemon of an environment that no parent leads to."""
    process, daemon, ray_folder = started(tmp_path, "killed")
    family = [daemon, *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 5
    assert daemon.ppid() != process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert daemon.is_running()
    assert end_earlier(tmp_path) != []
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not ray_folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_finishes_ends_its_environments_daemons(tmp_path: Path) -> None:
    """Field case 32: without a restart."""
    process, daemon, ray_folder = started(tmp_path, "finished")
    assert process.wait(timeout=60) == 0
    until_s = time.monotonic() + 10
    while daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE
    assert not ray_folder.exists()
    assert list(tmp_path.iterdir()) == []
