"""Files of one JSON value per line: written by a thread so that the caller never waits, read with a torn end allowed.

Invariant: what was put is in the file or its loss is an error. A line is whole if and only if it ends in a newline; a
crash can tear the last line only, because a failed write is cut back to the last whole line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import StoreError

FLUSH_S = 0.2
"""Longest time that a line stays in memory: what a killed run may lose, against write calls per second."""

log = logging.getLogger(__name__)
_decode = json.JSONDecoder().decode


class Torn(NamedTuple):
    """A last line without its newline: a writer was killed in the middle of it."""

    path: Path
    offset: int
    """Byte at which the torn line starts."""
    n_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: the last line is torn at byte {self.offset} ({self.n_bytes} bytes); it is left out"


def log_torn(torn: Torn) -> None:
    log.warning("%s", torn)


def to_line(value: object) -> bytes:
    """One line of strict JSON. Numbers that are not finite become null; numpy scalars and arrays become plain ones.

    Raises TypeError for what JSON cannot hold.
    """
    try:
        text = _encode(value)
    except ValueError:
        text = _encode(finite(value))
    return text.encode() + b"\n"


def finite(value: object) -> object:
    """The same value with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _plain(value: Any) -> object:
    for method in ("tolist", "item"):  # numpy arrays and scalars, without importing numpy
        if hasattr(value, method):
            return finite(getattr(value, method)())
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain).encode
"""Made once: `json.dumps` makes an encoder for every value."""


class LineWriter:
    """Appends lines to a file from a thread. `put` only buffers.

    A failed write is raised as StoreError by the next `put` and by `close`; nothing is dropped without that error.
    """

    def __init__(self, path: Path, encode: Callable[[Any], bytes] = to_line, *, append: bool = False) -> None:
        """`encode` makes whole lines of one item, in the thread; an item must not change after `put`."""
        self.path = path
        self._encode = encode
        self._items: deque[Any] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._closed = False
        self._writing = threading.Lock()
        self._error: StoreError | None = None
        self.cut: Torn | None = None
        """The torn last line that was cut off when the file was opened to append."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._whole_bytes = _end_of_last_line(path) if append and path.exists() else 0
            if append and path.exists() and path.stat().st_size > self._whole_bytes:
                self.cut = Torn(path, self._whole_bytes, path.stat().st_size - self._whole_bytes)
            if self._whole_bytes:
                os.truncate(path, self._whole_bytes)
            self._file = path.open("ab" if self._whole_bytes else "wb", buffering=0)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}; check the folder") from error
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    def put(self, item: object) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StoreError(f"{self.path}: written to after close")
        self._items.append(item)
        if len(self._items) == 1:  # else the thread is awake, and looks for more until there is none
            self._wake.set()

    def flush(self) -> None:
        """Return when all that was put before is on disk, synced. Blocks: for a thread. Raises StoreError."""
        if self._error is None and not self._file.closed:
            self._guarded(self._sync)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is left and sync it to disk. Idempotent, except that an error is raised each time."""
        self._closed = True
        self._closing.set()
        self._wake.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._closing.is_set() and self._error is None:
            self._wake.wait()
            self._wake.clear()
            self._closing.wait(FLUSH_S)
            self._guarded(self._drain)
        self._guarded(self._sync)
        with self._writing:
            self._file.close()

    def _sync(self) -> None:
        self._drain()
        os.fsync(self._file.fileno())

    def _guarded(self, write: Callable[[], None]) -> None:
        """One writer at a time; whatever it raises is kept for the next `put`, and nothing is written after it."""
        with self._writing:
            if self._error is None and not self._file.closed:
                self._tried(write)

    def _tried(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._error = StoreError(
                f"{self.path}: cannot be written at byte {self._whole_bytes}: {error.strerror}; what was put since is not "
                "in the file; free space and resume from the last checkpoint"
            )
            self._error.__cause__ = error
            self._cut_back()
        # boundary: a thread's end; whatever `encode` raised must reach the caller
        except Exception as error:  # noqa: BLE001
            self._error = StoreError(f"{self.path}: a line cannot be encoded: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    def _drain(self) -> None:
        lines: list[bytes] = []
        while self._items:
            lines.append(self._encode(self._items.popleft()))
        left = memoryview(b"".join(lines))
        size = len(left)
        while left:
            left = left[self._file.write(left) :]
        self._whole_bytes += size

    def _cut_back(self) -> None:
        """Remove a half-written block, so that the file still ends in a whole line."""
        try:
            self._file.truncate(self._whole_bytes)
        except OSError as error:
            log.warning("%s: cannot be cut back to byte %d: %s", self.path, self._whole_bytes, error.strerror)


def _end_of_last_line(path: Path) -> int:
    """Offset after the last newline: where appending goes on after a torn line."""
    block = 1 << 16
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def raw_lines(path: Path, on_torn: Callable[[Torn], None] = log_torn) -> Iterator[tuple[int, bytes]]:
    """Whole lines as (byte offset, bytes); a torn last line is handed to `on_torn` and left out.

    Raises StoreError when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            offset = 0
            for line in file:
                if not line.endswith(b"\n"):
                    on_torn(Torn(path, offset, len(line)))
                    return
                yield offset, line
                offset += len(line)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def parse(path: Path, offset: int, line: bytes) -> dict[str, Any]:
    """One line as an object. Raises StoreError with file and offset."""
    try:
        value = _decode(line.decode())
    except ValueError as error:
        raise StoreError(f"{path}: the line at byte {offset} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: the line at byte {offset} is a {type(value).__name__}, not an object")
    return value


def read_rows(path: Path, on_torn: Callable[[Torn], None] = log_torn) -> Iterator[dict[str, Any]]:
    """All rows of a file of JSON objects."""
    for offset, line in raw_lines(path, on_torn):
        yield parse(path, offset, line)


def write_whole(path: Path, text: str) -> Path:
    """Write a file so that a reader finds the old one or the new one, never a part.

    Raises StoreError with the byte at which writing failed.
    """
    return _replaced(path, (text.encode(),))


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """As `write_whole`, a line for each row. What the making of a row raises leaves the old file as it was."""
    return _replaced(path, map(to_line, rows))


def _replaced(path: Path, blocks: Iterable[bytes]) -> Path:
    part = path.with_name(path.name + ".part")
    written = 0
    try:
        with part.open("wb", buffering=0) as file:
            for block in blocks:
                left = memoryview(block)
                while left:
                    n = file.write(left)
                    written, left = written + n, left[n:]
        os.replace(part, path)
    except BaseException as error:  # boundary: whatever ended it, what there is of a part is of no use to anyone
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreError(f"{path}: cannot be written at byte {written}: {error.strerror}") from error
        raise
    return path
