"""Checkpoints as they are read: which one is the newest that a run can go on from, and what is wrong with the others.

Invariants: nothing counts that its mark does not vouch for, or that is not of the run as its event log tells of it; whatever
stands in a checkpoint's files, what is wrong is said with the file, and the one before it is tried. Unpickling makes values
of this package and of numpy only, so a checkpoint from elsewhere can hold no code.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import StoreError
from rollart.core.snapshot import Snapshot
from rollart.observe.past import Past

FORMAT = "rollart-checkpoint-2"
TRAINER, CONTROL, MARK = "trainer.safetensors", "control.pickle", "complete.json"
PARTIAL, OLD = ".partial", ".old"
"""A folder that is being written; one that is being replaced by another of its step."""
NAMED = re.compile(r"step-(\d+)(?:\.old)?")
CHUNK_BYTES = 1 << 20
"""Read at once for a digest: long enough that hashing, which lets other threads run, takes most of the time."""

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


def known(module: str, name: str) -> bool:
    """Whether a class or function may be named in a checkpoint."""
    return module in OWN or (module, name) in ALLOWED


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not known(module, name):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return super().find_class(module, name)


# --- the newest ------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The newest checkpoint that can be gone on from."""

    snapshot: Snapshot
    trainer: Path
    notes: tuple[str, ...]
    """What was passed over on the way, and why."""


class Vouched(NamedTuple):
    """What a mark says of a file beside it."""

    n_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    incarnation: int
    """Of the run, when it kept the checkpoint."""
    seq: int
    """Of the last event before it."""
    files: Mapping[str, Vouched]


def latest(folder: Path, past: Past | None = None, *, thorough: bool = True) -> Found | None:
    """The newest whole checkpoint of a run; None where there is none at all. Half-written ones do not count.

    `past`: what the run's log says; a checkpoint beyond it, or of a course that was taken back, cannot be gone on from.
    `thorough`: read every byte; else files are held to their sizes only.
    Raises StoreError, with the reason for each, when there are checkpoints and none can be gone on from.
    """
    if not folder.is_dir():
        return None
    notes = [f"{path}: half-written, left out" for path in sorted(folder.glob(f"step-*{PARTIAL}"))]
    try:
        found = sorted(named(folder), key=lambda path: (step_of(path), path.suffix != OLD), reverse=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read: {error.strerror}") from error
    reasons: list[str] = []
    whole = False
    for path in found:
        try:
            mark, snapshot = _read(path, thorough=thorough)
        except StoreError as error:
            reasons.append(f"{path.name} is passed over: {error}")
            continue
        against = past.against(mark.incarnation, snapshot.seq) if past is not None else ""
        if not against:
            return Found(snapshot, (path / TRAINER).absolute(), (*reasons, *notes))
        whole = True
        reasons.append(f"{path.name} is passed over: {path}: {against}")
    if not reasons:
        return None
    head = f"{folder}: no checkpoint is whole, so the run cannot go on"
    if whole and past is not None:
        head = f"{past.path} {past.state}, and no whole checkpoint in {folder} goes with it, so the run cannot go on"
    raise StoreError("\n".join((head, *(f"  {reason}" for reason in reasons))))


def named(folder: Path) -> list[Path]:
    """All that have a checkpoint's name, in no order; half-written ones have not."""
    return [path for path in folder.iterdir() if NAMED.fullmatch(path.name) and path.is_dir()]


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(OLD).rpartition("-")[2])


def _read(path: Path, *, thorough: bool) -> tuple[Mark, Snapshot]:
    """Mark and snapshot of a whole checkpoint. Raises StoreError that says what is wrong with it, and where."""
    mark = _mark(path / MARK)
    for name, file in mark.files.items():
        _check(path / name, file, thorough=thorough)
    control = path / CONTROL
    try:
        with control.open("rb") as handle:
            snapshot = _Unpickler(handle).load()
    # what a pickle raises depends on its bytes, and these may have been written by anyone
    except (OSError, pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError,
            LookupError, ArithmeticError, RecursionError, MemoryError) as error:  # fmt: skip
        raise StoreError(f"{control}: cannot be read by this version of rollart: {error}") from error
    if not isinstance(snapshot, Snapshot):
        raise StoreError(f"{control}: holds a {type(snapshot).__name__}, no snapshot")
    missing = [field.name for field in fields(snapshot) if not hasattr(snapshot, field.name)]
    if missing:
        raise StoreError(f"{control}: was written by another version of rollart; it lacks {', '.join(missing)}")
    if snapshot.seq != mark.seq:
        raise StoreError(f"{control}: is of event {snapshot.seq}, but its mark is of event {mark.seq}")
    return mark, snapshot


# --- the mark --------------------------------------------------------------------------------------------------------


def _mark(path: Path) -> Mark:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"{path}: is missing, so the checkpoint was never completed") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise StoreError(f"{path}: is not JSON at byte {error.pos}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: is no mark of a checkpoint: {error}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise StoreError(f"{path}: is no mark of a checkpoint: it has no 'format'")
    if found["format"] != FORMAT:
        raise StoreError(f"{path}: is a mark of format {found['format']!r}; this version reads {FORMAT!r}")
    files = found.get("files")
    if not isinstance(files, dict) or set(files) != {TRAINER, CONTROL}:
        raise StoreError(
            f"{path}: is no mark of a checkpoint: 'files' must be of {TRAINER} and {CONTROL}, not {files!r}"
        )
    return Mark(
        incarnation=_number(path, found, "incarnation"),
        seq=_number(path, found, "seq"),
        files={name: _vouched(path, name, file) for name, file in files.items()},
    )


def _vouched(path: Path, name: str, file: object) -> Vouched:
    digest = file.get("blake2b") if isinstance(file, dict) else None
    if not isinstance(file, dict) or not isinstance(digest, str):
        raise StoreError(f"{path}: is no mark of a checkpoint: size and digest of {name} are {file!r}")
    return Vouched(_number(path, file, "bytes", of=f" of {name}"), digest)


def _number(path: Path, values: Mapping[str, object], key: str, *, of: str = "") -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StoreError(f"{path}: is no mark of a checkpoint: {key!r}{of} is {value!r}, no count")
    return value


def _check(path: Path, vouched: Vouched, *, thorough: bool) -> None:
    size, digest, at = vouched.n_bytes, hashlib.blake2b(), 0
    try:
        if thorough:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    at += len(chunk)
        else:
            at = path.stat().st_size
    except FileNotFoundError as error:
        raise StoreError(f"{path}: is missing ({size} bytes)") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read at byte {at}: {error.strerror}") from error
    if at < size:
        raise StoreError(f"{path}: truncated at byte {at} of {size}")
    if at > size:
        raise StoreError(f"{path}: goes on beyond byte {size}, {at} in all; it is not what was written")
    if thorough and digest.hexdigest() != vouched.digest:
        raise StoreError(f"{path}: {size} bytes as written, but with another content (its digest differs)")
