"""The folder of a run of any world: who may write it, the configuration that it keeps, what is computed at its end.

Invariants: one process has the folder at a time; whatever happens to a run, the summary, the report and the timeline are
written from its log.
"""

from __future__ import annotations

import fcntl
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.config.load import Resolved, dump, load_file
from rollart.core.errors import ClusterError, StoreError
from rollart.observe.jsonl import write_whole
from rollart.observe.report import write_results
from rollart.observe.timeline import write_trace

CONFIG, EVENTS, METRICS = "config.yaml", "events.jsonl", "metrics.jsonl"

log = logging.getLogger(__name__)


@contextmanager
def held(folder: Path, *, instead: str = "") -> Iterator[None]:
    """Only one process may write a run; the lock ends with its process.

    `instead`: what else can be done, beside waiting, when another process has the run.
    Raises ClusterError when another one has it, StoreError when the folder cannot be written.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}; check the folder") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(f"{folder} is in use by another process; wait for it or end it{instead}") from error
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be locked: {error.strerror}; keep runs on a disk with file locks"
            ) from error
        yield


def keep_config(folder: Path, resolved: Resolved) -> None:
    """Write the configuration that a run goes on with; one that differs from it is kept as config-0.yaml, config-1.yaml, .."""
    path, number = folder / CONFIG, 0
    if path.is_file():
        if load_file(path).config == resolved.config:
            return
        while (folder / f"config-{number}.yaml").exists():
            number += 1
        write_whole(folder / f"config-{number}.yaml", path.read_text(encoding="utf-8"))
    write_whole(path, dump(resolved))


@contextmanager
def results(folder: Path) -> Iterator[None]:
    """At the end, summary, report and timeline, also of a run that failed: what happened is in its log.

    Raises StoreError when they cannot be written, unless the run failed: then its own error is the one to see.
    """
    try:
        yield
    except BaseException:  # boundary: however a run ends, what happened in it is written down
        try:
            _write_results(folder)
        except StoreError as error:
            log.warning("%s", error)
        raise
    _write_results(folder)


def _write_results(folder: Path) -> None:
    if (folder / EVENTS).is_file():
        write_results(folder)
        write_trace(folder)


def checkout() -> str:
    """The commit of the code that runs, where it runs from a checkout."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
