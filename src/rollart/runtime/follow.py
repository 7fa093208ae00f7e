"""A run of this machine as seen from outside: its log as it grows, its processes, what is left of it.

Invariant: the follower hands out every whole line once, in the order of the file, those that a later `resumed` takes back
too: it shows what happened, `observe.log` what stands. Processes are told by id and start time, so that an id which the
system gives out again is never taken for the old process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

COMMAND: Sequence[str] = (sys.executable, "-m", "rollart.cli.main")
"""The command line of this installation, whatever the shell would find."""


class Following:
    """New whole lines of a log since the last look. A file that is not there yet has none."""

    __slots__ = ("_offset", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> list[bytes]:
        """A torn last line waits until it is whole; when a resumed run cuts it off, it was never handed out."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()

    def events(self) -> list[dict[str, Any]]:
        """The same without headers, parsed."""
        return [json.loads(line) for line in self.lines() if not line.startswith(b'{"schema"')]


def family(pid: int) -> list[psutil.Process]:
    """All processes below `pid`; none when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def actors_of(processes: Iterable[psutil.Process], actor: str) -> list[psutil.Process]:
    """Those that are Ray workers of the actor class: Ray writes it into the title of the process."""
    found = []
    for process in processes:
        try:
            if any(f"ray::{actor}" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def alive_after(processes: Iterable[psutil.Process], within_s: float) -> list[str]:
    """Command lines of those that are there after `within_s` still; returns as soon as none is."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    return [told for one in alive if (told := _cmdline(one))]


def working_in(folder: Path, within_s: float) -> list[str]:
    """Command lines of processes that work in `folder` after `within_s` still: a run that was started there left them."""
    until = time.monotonic() + within_s
    while True:
        found = [_cmdline(one) for one in psutil.process_iter() if _works_in(one, folder)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.5)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


def _cmdline(process: psutil.Process) -> str:
    """Empty for one that is gone or a zombie. Ray pads the titles of its workers with blanks."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
