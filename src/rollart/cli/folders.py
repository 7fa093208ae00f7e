"""Run folders as the command line sees them: is there one, is there none, is it in use.

Invariant: nothing is removed that is not the folder of a finished run, and only where the user asked for it.
"""

from __future__ import annotations

import difflib
import fcntl
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollart.config.load import Resolved
from rollart.core.errors import ConfigError, StoreError

MARK = "config.yaml"
"""A run writes it when it starts, before its record: a folder without it is not a run's."""
LOCK = ".lock"
"""The file that a run keeps locked while it lives."""
BEFORE_THE_START = (LOCK, ".processes", ".processes.new")
"""All that is in the folder of a run that was refused, or killed, before it started."""


def folder_of(resolved: Resolved) -> Path:
    """Where a run writes."""
    return Path(resolved.config.output_dir).expanduser() / resolved.config.name


def claim(folder: Path, *, overwrite: bool, end_earlier: Callable[[Path], object]) -> None:
    """Make sure that a new run can have `folder`. Raises ConfigError with the ways out when it is taken.

    end_earlier: ends the processes that the run in a folder has left; their record goes with the folder.
    """
    if not folder.exists():
        return
    if folder.is_dir() and all(path.name in BEFORE_THE_START for path in folder.iterdir()) and not in_use(folder):
        end_earlier(folder)
        return
    if not overwrite:
        raise ConfigError(
            f"{folder} exists already; choose another name with name=NAME, or replace that run with --overwrite"
        )
    if in_use(folder):
        raise ConfigError(f"{folder} belongs to a run that is alive; end it first, or use name=NAME")
    if not (folder / MARK).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run (it has no {MARK}), so it is not replaced; use name=NAME"
        )
    end_earlier(folder)
    shutil.rmtree(folder)


def in_use(folder: Path) -> bool:
    """A process holds the folder's lock; the lock ends with its process, however that ends. Raises StoreError."""
    try:
        with (folder / LOCK).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise StoreError(
            f"{folder / LOCK}: cannot be opened: {error.strerror}; it is a file, which a run keeps locked while it lives: if "
            "no run has the folder, remove it"
        ) from error
    return False


@contextmanager
def told_how_to_resume(folder: Path, can_go_on: Callable[[Path], bool]) -> Iterator[None]:
    """Whoever interrupts a run, or whose run failed, is told how to go on with it, if it can be gone on with.

    can_go_on: whether the run in a folder has a whole checkpoint that `resume` would take.
    """
    try:
        yield
    except ConfigError:  # a refusal, which says itself what can be done
        raise
    except (KeyboardInterrupt, Exception):  # boundary: whatever ended the run, a bug too, passes on
        if _free(folder) and can_go_on(folder):
            sys.stderr.write(f"to go on with it: {shlex.join(['rollart', 'resume', str(folder)])}\n")
        raise


def _free(folder: Path) -> bool:
    try:
        return not in_use(folder)
    except StoreError:
        return False


def existing(run: str) -> Path:
    """The folder of a run that is there. Raises ConfigError naming the nearest one."""
    folder = Path(run).expanduser()
    if (folder / MARK).is_file():
        return folder
    what = f"{run} holds no run (no {MARK})" if folder.is_dir() else f"there is no run at {run}"
    runs = sorted(str(mark.parent) for base in {folder.parent, Path("runs")} for mark in base.glob(f"*/{MARK}"))
    near = difflib.get_close_matches(run, runs, n=1, cutoff=0.0)
    raise ConfigError(what + (f"; did you mean {near[0]}?" if near else "; start one with rollart train first_run"))
