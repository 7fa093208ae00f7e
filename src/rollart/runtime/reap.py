"""The processes of a run: how they are found when the run's own process is gone, and how they are ended.

Owns `.processes` in the run's folder and the folder of temporary files that Ray gets for the run. Invariants: whatever a
run started and did not end is ended before its folder is used again, and when it finishes; a process is ended only when it
is known by process id *and* start time, or bears the mark of this run, so a reused id or another run is never touched.

What is left after `kill -9` (measured, Ray 2.60): Ray's servers follow within 0.5 s, actors within 3 s, its agents within
a minute; what an environment started in a session of its own stays for ever, and so does Ray's folder. A process belongs
to a run when one of these holds:

    recorded        it was below the run's process at one of the looks that are taken while the run goes on
    inherited       it has the raylet's id in its environment, which Ray gives to every worker and every child inherits
    its output      standard output or error goes into the run's own Ray folder, as that of all Ray processes does
    descent         it is below one of these

Labels of our own in the environment would be inherited as well, but `runtime_env` made the first actors come after 3.6 s
in place of 0.5 s. Not found: what in one go cleared its environment, closed its output and left its parent between two
looks; containers, which are children of their own server. Linux only: elsewhere nothing is found and nothing is ended.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import ClusterError, StoreError

log = logging.getLogger(__name__)

RECORD = ".processes"
"""In the run's folder, as long as something of the run may be left."""
RAY_LOGS = "ray-logs"
"""In the run's folder: Ray's own logs, kept of a run that failed."""
LOOK_S = 5.0
"""Between two looks at what runs below us: one takes about 20 us per process of the machine."""
GRACE_S = 2.0
"""From being told to end to being ended; Ray's processes and well-behaved tools need a fraction."""
GONE_S = 10.0
"""Until what was ended must be gone; only a process stuck in the kernel takes longer."""
NEW = ".new"
RAYLET = "raylet"
PREFIX = "rollart-ray-"
MAX_BASE_CHARS = 20
"""Longest folder for Ray's: 107 characters are the limit of a socket's path, and Ray adds up to 87."""
PROC = Path("/proc")


class Identity(NamedTuple):
    """One process, once: an id is reused, an id with its start time is not (until the machine starts anew)."""

    pid: int
    started: int
    """Clock ticks since the machine started."""


class Seen(NamedTuple):
    who: Identity
    parent: int
    state: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What tells a run's processes from all others."""

    recorded: frozenset[Identity]
    raylets: frozenset[Identity]
    ray_folder: Path


class Label:
    """What a run notes of its processes while it goes on: all that this process has started since, and what those have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._before = frozenset(_below(_everyone(), {os.getpid()}, frozenset()))
        self._known: dict[Identity, str] = {}
        self._written: frozenset[Identity] | None = None
        base = tempfile.gettempdir()
        self.ray_folder = Path(base if len(base) <= MAX_BASE_CHARS else "/tmp") / f"{PREFIX}{uuid.uuid4().hex[:8]}"
        """For Ray's sessions of this run; noted before it exists."""

    def look(self) -> None:
        """Note what runs below this process now, and forget what has ended. Raises StoreError when it cannot be written."""
        with self._lock:
            everyone = _everyone()
            alive = {seen.who: seen for seen in everyone.values()}
            # a raylet that has ended still names its workers
            self._known = {who: name for who, name in self._known.items() if who in alive or name == RAYLET}
            self._known |= {who: alive[who].name for who in _below(everyone, {os.getpid()}, self._before)}
            if frozenset(self._known) != self._written:
                self._write()

    def _write(self) -> None:
        record = {
            "machine": _machine(),
            "run": [os.getpid(), _started(os.getpid()) or 0],
            "ray_folder": str(self.ray_folder),
            "processes": [[*who, name] for who, name in sorted(self._known.items())],
        }
        beside = self._path.with_suffix(NEW)
        try:
            beside.write_text(json.dumps(record), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        self._written = frozenset(self._known)


@contextmanager
def labelled(folder: Path, *, guest: bool = False) -> Iterator[Label]:
    """Label the run in `folder` for as long as the block lasts: for the process that holds the folder's lock.

    First ends what an earlier run in `folder` left. In the end, whatever happened, ends what this one left, and takes Ray's
    folder away; of a run that failed, Ray's logs are kept in the run's folder. `guest`: a process that uses the folder of a
    run without its lock, as an evaluation does; it ends only what it started itself.

    Raises ClusterError when something cannot be ended, StoreError when the folder cannot be written.
    """
    path = folder / (f"{RECORD}-{os.getpid()}" if guest else RECORD)
    told = [] if guest else end_earlier(folder)
    if told:
        log.warning("ended what an earlier run in %s had left: %s", folder, ", ".join(told))
    label = Label(path)
    label.look()
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(label, done), name="rollart-processes", daemon=True)
    watch.start()
    failed = True
    try:
        yield label
        failed = False
    finally:
        done.set()
        watch.join()
        with suppress(StoreError):
            label.look()
        if failed:
            _keep_logs(label.ray_folder, folder)
        _finish(path, failed)


def _finish(path: Path, failed: bool) -> None:
    try:
        _end_recorded(path)
    except ClusterError as error:
        if not failed:
            raise
        log.warning("%s", error)  # the error that ended the run is the one to be told


def _watch(label: Label, done: threading.Event) -> None:
    told = False
    while not done.wait(LOOK_S):
        try:
            label.look()
        except StoreError as error:
            if not told:
                log.warning("what this run starts can no longer be noted, so less is found after a kill: %s", error)
            told = True


def end_earlier(folder: Path) -> list[str]:
    """End every process that an earlier run in `folder` left, and remove Ray's folder of it. Returns what was ended.

    Call it before the folder is used or removed. Raises ClusterError when that run is alive, or when a process cannot be
    ended.
    """
    ended: list[str] = []
    for path in sorted(folder.glob(f"{RECORD}*")):
        if path.suffix == NEW:
            path.unlink(missing_ok=True)
        elif path.name == RECORD or not _lives(_read(path)):
            ended += _end_recorded(path)
    return ended


def _end_recorded(path: Path) -> list[str]:
    record = _read(path)
    if record is None:
        return []
    run = record["run"][0]
    if run != os.getpid() and _lives(record):
        raise ClusterError(f"the run in {path.parent} is alive (process {run}); end it first, or use name=NAME")
    ended: list[str] = []
    left = Path(record["ray_folder"])
    if record["machine"] == _machine():
        noted = {Identity(pid, started): name for pid, started, name in record["processes"]}
        raylets = frozenset(who for who, name in noted.items() if name == RAYLET)
        ended = _end_all(Marks(recorded=frozenset(noted), raylets=raylets, ray_folder=left), path.parent)
    if left.name.startswith(PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    path.unlink(missing_ok=True)
    return ended


def _lives(record: Mapping[str, Any] | None) -> bool:
    """The process that wrote the record is there."""
    if record is None or record["machine"] != _machine():
        return False
    pid, started = record["run"]
    return bool(_started(pid) == started)


def find(marks: Marks) -> dict[Identity, str]:
    """Living processes of a run, without this one and those above it; by identity, with their names."""
    everyone = _everyone()
    ours = _above(everyone, os.getpid())
    found = {
        seen.who.pid for seen in everyone.values() if seen.who.pid not in ours and _bears(seen.who, marks, everyone)
    }
    found |= {who.pid for who in _below(everyone, found, frozenset()) if who.pid not in ours}
    return {everyone[pid].who: everyone[pid].name for pid in found if everyone[pid].state not in "ZX"}


# --- ending --------------------------------------------------------------------------------------------------------------


def _end_all(marks: Marks, folder: Path) -> list[str]:
    """Told to end, then ended, until none is left: one may start others while it is looked for."""
    ended: dict[Identity, str] = {}
    began_s = time.monotonic()
    while left := find(marks):
        if time.monotonic() > began_s + GRACE_S + GONE_S:
            names = ", ".join(f"{name} ({who.pid})" for who, name in sorted(left.items()))
            raise ClusterError(f"processes of the run in {folder} cannot be ended: {names}; end them, then try again")
        for who in left:
            if time.monotonic() > began_s + GRACE_S:
                _send(who, signal.SIGKILL)
            elif who not in ended:
                _send(who, signal.SIGTERM)
        ended |= left
        time.sleep(0.05)
    return [f"{name} ({who.pid})" for who, name in sorted(ended.items())]


def _send(who: Identity, what: signal.Signals) -> None:
    """Through a handle that stays with the process, so that an id reused in between is not hit."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return
    try:
        if _started(who.pid) == who.started:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, what)
    finally:
        os.close(handle)


# --- telling whose a process is ------------------------------------------------------------------------------------------


def _bears(who: Identity, marks: Marks, everyone: Mapping[int, Seen]) -> bool:
    return who in marks.recorded or _inherited(who, marks.raylets, everyone) or _writes_into(who.pid, marks.ray_folder)


def _inherited(who: Identity, raylets: frozenset[Identity], everyone: Mapping[int, Seen]) -> bool:
    """Ray's variable names the raylet's id; another raylet that got the id later has other, younger workers."""
    for raylet in raylets:
        if who.started < raylet.started or not _has_variable(who.pid, f"RAY_RAYLET_PID={raylet.pid}"):
            continue
        now = everyone.get(raylet.pid)
        if now is None or now.who == raylet or who.started < now.who.started:
            return True
    return False


def _has_variable(pid: int, wanted: str) -> bool:
    try:
        return wanted.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _writes_into(pid: int, folder: Path) -> bool:
    """Output only: who merely reads a log there is a person looking."""
    for number in (1, 2):
        with suppress(OSError):
            if (PROC / str(pid) / "fd" / str(number)).readlink().is_relative_to(folder):
                return True
    return False


def family() -> dict[int, str]:
    """All processes below this one, by id, with their names, which the system cuts to 15 characters."""
    everyone = _everyone()
    return {who.pid: everyone[who.pid].name for who in _below(everyone, {os.getpid()}, frozenset())}


# --- the table of processes ----------------------------------------------------------------------------------------------


def _everyone() -> dict[int, Seen]:
    if not PROC.is_dir():
        return {}
    found = (_seen(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {seen.who.pid: seen for seen in found if seen is not None}


def _seen(pid: int) -> Seen | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name, in brackets, may hold blanks and brackets itself; counted from the state, the start time is the 20th field
    rest = text[text.rindex(")") + 2 :].split()
    name = text[text.index("(") + 1 : text.rindex(")")]
    return Seen(Identity(pid, int(rest[19])), int(rest[1]), rest[0], name)


def _started(pid: int) -> int | None:
    seen = _seen(pid)
    return None if seen is None else seen.who.started


def _below(everyone: Mapping[int, Seen], roots: set[int], without: frozenset[Identity]) -> set[Identity]:
    """All descendants of `roots`, apart from `without` and theirs."""
    children: dict[int, list[Seen]] = {}
    for seen in everyone.values():
        children.setdefault(seen.parent, []).append(seen)
    found: set[Identity] = set()
    waiting = list(roots)
    while waiting:
        for seen in children.get(waiting.pop(), []):
            if seen.who not in found and seen.who not in without:
                found.add(seen.who)
                waiting.append(seen.who.pid)
    return found


def _above(everyone: Mapping[int, Seen], pid: int) -> set[int]:
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        pid = everyone[pid].parent if pid in everyone else 0
    return found


def _machine() -> str:
    """This start of this machine, and whose process ids: after another one, or in another container, ids mean nothing."""
    boot, space = PROC / "sys" / "kernel" / "random" / "boot_id", PROC / "self" / "ns" / "pid"
    try:
        return f"{boot.read_text(encoding='ascii').strip()} {space.readlink()}"
    except OSError:
        return "unknown"


def _read(path: Path) -> dict[str, Any] | None:
    """None without a record. Raises ClusterError for one that is not whole, which a run never leaves."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path} cannot be read ({error}); remove it, and end what that run left by hand") from error
    return record


def _keep_logs(ray_folder: Path, folder: Path) -> None:
    """What Ray and its workers printed is the only trace of a process that crashed."""
    for session in ray_folder.glob("session_*/logs"):
        if not session.parent.is_symlink():
            with suppress(OSError):
                shutil.rmtree(folder / RAY_LOGS, ignore_errors=True)
                shutil.copytree(session, folder / RAY_LOGS, ignore_dangling_symlinks=True)
