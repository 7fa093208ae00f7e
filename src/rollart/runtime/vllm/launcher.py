"""Runs a server below itself for as long as whoever started it lives: `python launcher.py FOLDER COMMAND..`.

Run by the interpreter of the server's own environment, so it uses the standard library only. Owns FOLDER, in which the
server's socket and the weights on their way lie. Invariants: when standard input ends, which it does however the process
that holds the other end goes, or on SIGTERM, every process of the server is ended and FOLDER is removed; when this process is
killed the server is killed with it, and the folder is removed by the next launcher.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

PREFIX = "rollart-vllm-"
LOCK = ".lock"
PR_SET_PDEATHSIG = 1
GRACE_S = 0.5
"""From being told to end to being ended: the server has nothing to save."""
TIDY_S = 10.0
"""Longest wait for what tidies up behind it, which takes a moment but on a machine that is overloaded."""


def main(folder: Path, command: list[str]) -> int:
    lock = _locked(folder)
    if lock is None:
        return 1
    for other in folder.parent.glob(f"{PREFIX}*"):
        if other != folder:
            _remove_left(other)
    # the server's workers are in its group; the group is not ours, so that we outlive its end
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - there is no other thread yet
    )

    told_to_end = threading.Event()

    def end(*_: int | FrameType | None) -> NoReturn:
        told_to_end.set()
        _end_group(server)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def until_end_of_input() -> None:
        while os.read(0, 4096):
            pass
        end()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    threading.Thread(target=until_end_of_input, daemon=True).start()
    code = server.wait()
    if told_to_end.is_set():  # it went because it was told to, and the thread that told it may not have ended us yet
        end()
    _end_group(server)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _locked(folder: Path) -> IO[str] | None:
    """The lock on a folder that is in use, held until this process ends; None when another one has it."""
    try:
        file = (folder / LOCK).open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return file


def _remove_left(folder: Path) -> None:
    """Remove a folder whose launcher was killed. One that is not locked yet has no lock file either."""
    if (folder / LOCK).exists() and (lock := _locked(folder)) is not None:
        with lock:
            shutil.rmtree(folder, ignore_errors=True)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    """Tell all to end, then end them; Python's resource trackers last, which remove the shared memory of the others."""
    _tell(server.pid, signal.SIGTERM)
    _until_gone(server, GRACE_S)
    for pid in _group(server.pid):
        if b"resource_tracker" not in _command_of(pid):
            _kill(pid)
    _until_gone(server, TIDY_S)
    _tell(server.pid, signal.SIGKILL)


def _until_gone(server: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        server.poll()
        if not _group(server.pid):
            return
        time.sleep(0.02)


def _group(leader: int) -> list[int]:
    """Processes of the group that live."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            text = Path("/proc", name, "stat").read_text() if name.isdigit() else ""
        except OSError:
            continue
        state, _, group, *_ = text.rpartition(")")[2].split() or ("Z", "", "0")
        if group == str(leader) and state not in "ZX":
            found.append(int(name))
    return found


def _command_of(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tell(group: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, what)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
