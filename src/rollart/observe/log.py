"""The event log on disk: `events.jsonl`, the record from which everything else is computed.

Invariant: a reader sees the history of the surviving run. `resumed {from_seq, lost}` takes back every event after
`from_seq` that stands before it in the file; a gap in `seq` is an error, so no event can be missing unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollart.core.errors import StoreError
from rollart.core.events import SCHEMA
from rollart.observe.jsonl import LineWriter, Torn, log_torn, parse, raw_lines

Event = Mapping[str, Any]


class EventWriter:
    """A sink: takes events without waiting and writes them within `FLUSH_S`.

    An event is serialised later, in a thread: whoever emits one must not change its values afterwards. Raises StoreError
    with the file from the next event or from `close` when a write failed.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, append: bool = False) -> None:
        """`append`: go on in the log of an earlier incarnation; its torn last line, if any, is cut off."""
        self._lines = LineWriter(path, append=append)
        self._lines.put(dict(header))

    @property
    def path(self) -> Path:
        return self._lines.path

    def __call__(self, event: Event) -> None:
        self._lines.put(event)

    def flush(self) -> None:
        """Return when every event so far is on disk. Blocks: for a thread. Raises StoreError."""
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventLog:
    """A log that was looked through once: the newest incarnation's header, and where the surviving events are."""

    __slots__ = ("_kept", "header", "path")

    def __init__(self, path: Path, on_torn: Callable[[Torn], None] = log_torn) -> None:
        """A torn last line is handed to `on_torn` (default: a log line with file and offset) and left out.

        Raises StoreError for a missing or foreign file or an unknown schema.
        """
        self.path = path
        self.header, self._kept = _survey(path, on_torn)

    def events(self, since_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """The surviving events from `since_s` on, in order. Raises StoreError for a broken line or a gap in `seq`."""
        return _surviving(self.path, self._kept, since_s)


def read_events(
    path: Path, on_torn: Callable[[Torn], None] = log_torn
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Header and surviving events of a log, as `EventLog` gives them."""
    found = EventLog(path, on_torn)
    return found.header, found.events()


def restated(started: Mapping[str, Any], resumed: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `run_started` said, with what a resume changed of it."""
    return {name: resumed.get(name, value) for name, value in started.items()}


Kept = list[tuple[int, int]]
"""Line numbers [first, last] of the surviving events, ascending."""


def _survey(path: Path, on_torn: Callable[[Torn], None]) -> tuple[dict[str, Any], Kept]:
    """One pass that parses only headers, the event after each, and `resumed`."""
    header: dict[str, Any] | None = None
    runs: list[tuple[int, int, int]] = []  # first line, last line, seq of the first line; contiguous in both
    first, seq_of_first, last = 0, 0, -1  # the run of lines that is growing

    for number, (offset, line) in enumerate(raw_lines(path, on_torn)):
        starts = number == 0 or line.startswith(b'{"schema"')
        if starts:
            header = _checked_header(path, offset, parse(path, offset, line))
            if last >= first:
                runs.append((first, last, seq_of_first))
            first, last = number + 1, number
            continue
        if number == first or b'"resumed"' in line:
            event = parse(path, offset, line)
            if number == first:
                seq_of_first = _seq(path, offset, event)
            if event.get("kind") == "resumed":
                runs.append((first, number - 1, seq_of_first))
                runs = _cut(runs, int(event["data"]["from_seq"]))
                first, seq_of_first = number, _seq(path, offset, event)
        last = number
    if header is None:
        raise StoreError(f"{path}: holds no header; it is empty or not an event log")
    if last >= first:
        runs.append((first, last, seq_of_first))
    return header, [(start, end) for start, end, _ in runs]


def _cut(runs: list[tuple[int, int, int]], from_seq: int) -> list[tuple[int, int, int]]:
    """What is left of `runs` up to and with `from_seq`."""
    return [
        (start, min(end, start + from_seq - seq), seq) for start, end, seq in runs if seq <= from_seq and end >= start
    ]


def _surviving(path: Path, kept: Kept, since_s: float) -> Iterator[dict[str, Any]]:
    lines = raw_lines(path, lambda torn: None)
    at = 0
    for start, end in kept:
        before: tuple[int, int] | None = None  # number and seq of the last line that was parsed
        for number, (offset, line) in enumerate(islice(lines, start - at, end + 1 - at)):
            if since_s > 0 and _time(line) < since_s:
                continue
            event = parse(path, offset, line)
            seq = _seq(path, offset, event)
            if before is not None and seq - before[1] != number - before[0]:
                raise StoreError(
                    f"{path}: event {seq} at byte {offset} follows event {before[1]}; what stood between is missing"
                )
            before = number, seq
            yield event
        at = end + 1


def _time(line: bytes) -> float:
    """`t` of an event without parsing the line; infinite where it is written in another way, so that it is parsed."""
    start = line.find(b'"t":') + 4
    try:
        return float(line[start : line.index(b",", start)])
    except ValueError:
        return math.inf


def _checked_header(path: Path, offset: int, header: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in header:
        raise StoreError(f"{path}: the line at byte {offset} is no header of an event log (no 'schema')")
    if header["schema"] != SCHEMA:
        raise StoreError(
            f"{path}: schema {header['schema']!r} at byte {offset}; this version reads schema {SCHEMA}; use the version "
            "of rollart that wrote the run"
        )
    return header


def _seq(path: Path, offset: int, event: Mapping[str, Any]) -> int:
    seq = event.get("seq")
    if not isinstance(seq, int) or "kind" not in event:
        raise StoreError(f"{path}: the line at byte {offset} is no event (no 'seq' or 'kind')")
    return seq
