"""Checkpoints on disk: RUN/checkpoints/step-000010/{trainer.safetensors, control.pickle, complete.json}.

Invariants: a checkpoint counts only with its mark, `complete.json`, which holds size and digest of the other files and is
written after they are on disk, into a folder that gets its name last; the record of the run up to the checkpoint is on disk
before the mark is. What is read was checked against the mark first, and unpickling makes values of this package and of numpy
only, so a checkpoint from elsewhere can hold no code.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import StoreError, TrainerError, TrainerLost, failure
from rollart.core.snapshot import GroupState, Snapshot
from rollart.core.types import Failure

FORMAT = "rollart-checkpoint-1"
TRAINER, CONTROL, MARK = "trainer.safetensors", "control.pickle", "complete.json"
PARTIAL, OLD = ".partial", ".old"
"""A folder that is being written; one that is being replaced by another of its step."""
NAMED = re.compile(r"step-(\d+)(?:\.old)?")
CHUNK_BYTES = 1 << 20
"""Read at once for a digest: long enough that hashing, which lets other threads run, takes most of the time."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """The newest whole checkpoint."""

    snapshot: Snapshot
    trainer: Path
    notes: tuple[str, ...]
    """What was passed over on the way, and why."""


class DiskCheckpoints:
    """Implements `ports.Checkpoints` in one folder. All work on files is done in threads."""

    def __init__(self, folder: Path, *, keep: int, flush: Callable[[], None] = lambda: None) -> None:
        """`keep`: how many stay. `flush` puts the run's record on disk, called in a thread before each mark."""
        self._folder = folder.absolute()
        self._keep = keep
        self._flush = flush

    async def save(self, snapshot: Snapshot, keep_trainer: Callable[[str], Awaitable[None]]) -> str | Failure:
        """See `ports.Checkpoints`. Raises TrainerLost when the trainer is lost over it, which is no failure of the disk."""
        final = self._folder / f"step-{snapshot.step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            await asyncio.to_thread(_empty, partial)
            await _trainers_part(partial / TRAINER, keep_trainer)
            await asyncio.to_thread(self._complete, partial, final, snapshot)
        except _Unwritten as error:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            return error.failure
        return str(final / TRAINER)

    def _complete(self, partial: Path, final: Path, snapshot: Snapshot) -> None:
        """Write control's part and the mark, give the folder its name, remove what is not kept any more."""
        files = {
            TRAINER: _synced(partial / TRAINER),
            CONTROL: _written(partial / CONTROL, lambda file: _pickled(snapshot, file)),
        }
        try:
            self._flush()
        except StoreError as error:
            kind = "full" if getattr(error.__cause__, "errno", None) in FULL else "torn"
            raise _Unwritten(failure("store", kind, str(error))) from error
        mark = {
            "format": FORMAT, "step": snapshot.step, "version": snapshot.version, "seq": snapshot.seq,
            "files": {name: {"bytes": one.bytes, "blake2b": one.digest} for name, one in files.items()},
        }  # fmt: skip
        _written(partial / MARK, lambda file: file.write(json.dumps(mark, indent=2).encode() + b"\n"))
        with _naming(final):
            _sync_folder(partial)
            old = final.with_name(final.name + OLD)
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            partial.rename(final)
            _sync_folder(final.parent)
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        """Of other steps, keep the newest before this one. Those after it are of a course of the run that was taken back."""
        step = _step(newest)
        whole = sorted((path for path in _named(self._folder) if path.suffix != OLD), key=_step, reverse=True)
        kept = [path for path in whole if _step(path) <= step][: self._keep]
        for path in self._folder.glob("step-*"):
            if path not in kept:
                shutil.rmtree(path, onerror=lambda _, name, why: log.warning("%s: cannot be removed: %s", name, why[1]))


def latest(folder: Path, *, last_seq: int | None = None) -> Found | None:
    """The newest whole checkpoint of a run; None where there is none at all. Half-written ones do not count.

    `last_seq`: of the last event in the run's log; a checkpoint beyond it cannot be gone on from.
    Raises StoreError, with the reason for each, when there are checkpoints and none is whole.
    """
    if not folder.is_dir():
        return None
    notes = [f"{path}: half-written, left out" for path in sorted(folder.glob(f"step-*{PARTIAL}"))]
    found = sorted(_named(folder), key=lambda path: (_step(path), path.suffix != OLD), reverse=True)
    reasons: list[str] = []
    for path in found:
        try:
            snapshot = _read(path, last_seq)
        except StoreError as error:
            reasons.append(f"{path.name} is passed over: {error}")
            continue
        return Found(snapshot, (path / TRAINER).absolute(), (*reasons, *notes))
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise StoreError(
            f"{folder}: no checkpoint is whole, so the run cannot go on; start it anew under another name\n{listed}"
        )
    return None


# --- writing -------------------------------------------------------------------------------------------------------------


class _Unwritten(Exception):
    """A part of the checkpoint is not on disk."""

    def __init__(self, why: Failure) -> None:
        self.failure = why
        super().__init__(why.detail)


@dataclass(frozen=True, slots=True)
class _File:
    bytes: int
    digest: str


def _unwritten(path: Path, at: int, error: OSError) -> _Unwritten:
    kind = "full" if error.errno in FULL else "missing" if error.errno == errno.ENOENT else "torn"
    text = f"{path}: cannot be written at byte {at}: {error.strerror or error}"
    return _Unwritten(failure("store", kind, text, retryable=kind == "full"))


class _Counting(io.RawIOBase):
    """An unbuffered file that knows its size and digest, and at which byte writing failed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self.at = 0
        self.digest = hashlib.blake2b()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            n = self._file.write(left)
            self.digest.update(left[:n])
            self.at, left = self.at + n, left[n:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()

    def sync(self) -> None:
        os.fsync(self._file.fileno())


def _written(path: Path, fill: Callable[[_Counting], object]) -> _File:
    at = 0
    try:
        with _Counting(path) as file:
            try:
                fill(file)
                file.sync()
            finally:
                at = file.at
            return _File(file.at, file.digest.hexdigest())
    except OSError as error:
        raise _unwritten(path, at, error) from error
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        text = f"{path}: control's state cannot be written: {type(error).__name__}: {error}"
        raise _Unwritten(failure("store", "torn", text, retryable=False)) from error


def _empty(partial: Path) -> None:
    """A new folder in place of what an earlier attempt left."""
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise _unwritten(Path(str(error.filename or partial)), 0, error) from error


async def _trainers_part(path: Path, keep_trainer: Callable[[str], Awaitable[None]]) -> None:
    try:
        await keep_trainer(str(path))
    except TrainerLost:
        raise
    except (TrainerError, StoreError) as error:
        text = str(error)
        at = await asyncio.to_thread(_largest, path.parent)
        kind = "full" if any(os.strerror(number) in text for number in FULL) else "torn"
        why = failure("store", kind, f"{path}: cannot be written at byte {at}: {text}")
        raise _Unwritten(why) from error


def _largest(folder: Path) -> int:
    """How far a writer in another process came: the size of its file, whatever it calls it while it writes."""
    try:
        return max((path.stat().st_size for path in folder.iterdir() if path.is_file()), default=0)
    except OSError:
        return 0


def _synced(path: Path) -> _File:
    """Size and digest of a file that another process wrote, after it is on disk."""
    digest, at = hashlib.blake2b(), 0
    try:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                at += len(chunk)
    except OSError as error:
        raise _unwritten(path, at, error) from error
    return _File(at, digest.hexdigest())


@contextmanager
def _naming(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritten(final, 0, error) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- what may be in a checkpoint -----------------------------------------------------------------------------------------

OWN = ("rollart.core.types", "rollart.core.snapshot", "rollart.core.ledger")
ALLOWED = {
    ("rollart.runtime.payload", "TokenPayload"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("_core", "core")),
}
"""Beside the classes of `OWN`: all that a snapshot is made of."""


def _known(module: str, name: str) -> bool:
    return module in OWN or (module, name) in ALLOWED


class _Pickler(pickle.Pickler):
    """Refuses what could not be read back, where it is written: then the run is there to be mended."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        module = kind.__module__
        if kind.__name__ not in ("type", "function", "builtin_function_or_method") and not (
            module.partition(".")[0] == "numpy" or _known(module, kind.__qualname__)
        ):
            raise pickle.PicklingError(f"a {module}.{kind.__qualname__} is no part of a checkpoint")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _known(module, name):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return super().find_class(module, name)


def _pickled(snapshot: Snapshot, file: _Counting) -> None:
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(
        replace(snapshot, groups=tuple(_without_evidence(group) for group in snapshot.groups))
    )


def _without_evidence(group: GroupState) -> GroupState:
    """Evidence is any object of a user's; its readers, scorers and the record, had it when the trajectory ended."""
    if not any(trajectory.evidence for trajectory in group.done):
        return group
    return replace(group, done=tuple(replace(trajectory, evidence=()) for trajectory in group.done))


# --- reading -------------------------------------------------------------------------------------------------------------


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if NAMED.fullmatch(path.name) and path.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.removesuffix(OLD).rpartition("-")[2])


def _read(path: Path, last_seq: int | None) -> Snapshot:
    """A whole checkpoint's snapshot. Raises StoreError that says what is wrong with it, and where."""
    mark = _mark(path / MARK)
    for name, file in mark["files"].items():
        _check(path / name, int(file["bytes"]), str(file["blake2b"]))
    try:
        with (path / CONTROL).open("rb") as handle:
            snapshot = _Unpickler(handle).load()
    except (OSError, pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError) as error:
        raise StoreError(f"{path / CONTROL}: cannot be read by this version of rollart: {error}") from error
    if not isinstance(snapshot, Snapshot):
        raise StoreError(f"{path / CONTROL}: holds a {type(snapshot).__name__}, no snapshot")
    if last_seq is not None and snapshot.seq > last_seq:
        raise StoreError(f"{path}: is of event {snapshot.seq}, but the event log ends at {last_seq}")
    return snapshot


def _mark(path: Path) -> Mapping[str, Any]:
    try:
        mark = json.loads(path.read_bytes())
        wrong = mark["format"] != FORMAT or not {TRAINER, CONTROL} <= mark["files"].keys()
    except FileNotFoundError as error:
        raise StoreError(f"{path}: is missing, so the checkpoint was never completed") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise StoreError(f"{path}: is not JSON at byte {error.pos}: {error.msg}") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: is no mark of a checkpoint: {error!r}") from error
    if wrong:
        raise StoreError(f"{path}: is a mark of format {mark['format']!r}; this version reads {FORMAT!r}")
    found: Mapping[str, Any] = mark
    return found


def _check(path: Path, size: int, digest: str) -> None:
    found, at = hashlib.blake2b(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                found.update(chunk)
                at += len(chunk)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: is missing ({size} bytes)") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read at byte {at}: {error.strerror}") from error
    if at < size:
        raise StoreError(f"{path}: truncated at byte {at} of {size}")
    if at > size:
        raise StoreError(f"{path}: goes on beyond byte {size}, {at} in all; it is not what was written")
    if found.hexdigest() != digest:
        raise StoreError(f"{path}: {size} bytes as written, but with another content (its digest differs)")
