"""Checkpoints on disk: RUN/checkpoints/step-000010/{trainer.safetensors, control.pickle, complete.json}.

Invariants: a checkpoint counts only with its mark, `complete.json`, which holds size and digest of the other files and is
written after they are on disk, into a folder that gets its name last; the record of the run up to the checkpoint is on disk
before the mark is. The mark tells of which event of which incarnation of the run it is. `checkpoint_reading.py` reads them.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollart.core.errors import (
    FULL,
    REFUSED,
    StoreError,
    TrainerError,
    TrainerLost,
    failure,
    store_failure,
    store_kind,
)
from rollart.core.snapshot import GroupState, Snapshot
from rollart.core.types import Failure
from rollart.runtime.checkpoint_reading import (
    CHUNK_BYTES,
    CONTROL,
    FORMAT,
    MARK,
    OLD,
    PARTIAL,
    TRAINER,
    known,
    named,
    step_of,
)

log = logging.getLogger(__name__)


class DiskCheckpoints:
    """Implements `ports.Checkpoints` in one folder. All work on files is done in threads."""

    def __init__(self, folder: Path, *, keep: int, incarnation: int, flush: Callable[[], None] = lambda: None) -> None:
        """`keep`: how many stay. `flush` puts the run's record on disk, called in a thread before each mark.

        `incarnation`: of the run, as in the header of its event log.
        """
        self._folder = folder.absolute()
        self._incarnation = incarnation
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
            raise _Unwritten(store_failure(error)) from error
        mark = {
            "format": FORMAT, "incarnation": self._incarnation, "seq": snapshot.seq, "step": snapshot.step,
            "version": snapshot.version,
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
        step = step_of(newest)
        whole = sorted((path for path in named(self._folder) if path.suffix != OLD), key=step_of, reverse=True)
        kept = [path for path in whole if step_of(path) <= step][: self._keep]
        for path in self._folder.glob("step-*"):
            if path not in kept:
                shutil.rmtree(path, onerror=lambda _, name, why: log.warning("%s: cannot be removed: %s", name, why[1]))


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
    kind = store_kind(error.errno)
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
        raise _Unwritten(failure("store", "refused", text, retryable=False)) from error


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
        # another process wrote, of whose error there is the text only
        kind = next((store_kind(number) for number in (*FULL, *REFUSED) if os.strerror(number) in text), "torn")
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


# --- what is pickled -----------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Refuses what could not be read back, where it is written: then the run is there to be mended."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        module = kind.__module__
        if kind.__name__ not in ("type", "function", "builtin_function_or_method") and not (
            module.partition(".")[0] == "numpy" or known(module, kind.__qualname__)
        ):
            raise pickle.PicklingError(f"a {module}.{kind.__qualname__} is no part of a checkpoint")
        return NotImplemented


def _pickled(snapshot: Snapshot, file: _Counting) -> None:
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(
        replace(snapshot, groups=tuple(_without_evidence(group) for group in snapshot.groups))
    )


def _without_evidence(group: GroupState) -> GroupState:
    """Evidence is any object of a user's; its readers, scorers and the record, had it when the trajectory ended."""
    if not any(trajectory.evidence for trajectory in group.done):
        return group
    return replace(group, done=tuple(replace(trajectory, evidence=()) for trajectory in group.done))
