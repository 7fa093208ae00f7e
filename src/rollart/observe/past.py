"""What the log of a run that ended or was killed says to whoever wants to go on with it.

Invariants: one pass that parses every line, so what is broken is known before anything is written; what was taken back
counts where numbers and names must not come again (versions, engines, hosts), and a line that cannot be read counts as if it
had used the next of each; the surviving run alone counts where it asks how far the run has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.core.errors import StoreError
from rollart.observe.jsonl import Torn, parse, raw_lines

HEADER = b'{"schema"'
END = 1 << 62
"""A `seq` beyond the last one, whatever that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A place in the log without the event that must be there."""

    incarnation: int
    seq: int
    """Of the event that is missing."""
    why: str
    """With file and byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    path: Path = field(default=Path("events.jsonl"))
    state: str = "is missing"
    """Of the file, to follow its path in a message: is missing | is empty | is broken | ends at event 7."""
    incarnations: int = 0
    """Headers so far: the number of the next one."""
    ends: tuple[int, ...] = ()
    """Of each incarnation, `seq` of its last event; 0: it has none."""
    resumes: tuple[tuple[int, int], ...] = ()
    """(incarnation, event after which it went on): all after that event in earlier incarnations was taken back."""
    broken: tuple[Broken, ...] = ()
    last_seq: int = 0
    """Of the last event. `seq` has no gaps in the surviving run, so as many events survive."""
    highest_version: int = -1
    """Ever published."""
    next_engine: int = 0
    next_host: int = 0
    checkpointed: bool = False
    """Whether a checkpoint was ever completed."""
    unkept: str = ""
    """What was said of the last checkpoint that could not be kept."""
    trained: bool = False
    """Whether a step was ever finished."""
    ended: Mapping[str, Any] | None = None
    """Status and reason, when the last event is the run's end."""
    torn: Torn | None = None
    """The last line, when its writer was killed in it."""

    def lost(self, from_seq: int) -> int:
        """Events that are taken back when the run goes on after `from_seq`."""
        return max(0, self.last_seq - from_seq)

    def against(self, incarnation: int, seq: int) -> str:
        """Why a run cannot go on after event `seq` of an incarnation; empty when it can."""
        if not self.incarnations:
            return f"is of event {seq}, but the event log {self.path} {self.state}"
        if incarnation >= self.incarnations:
            return f"is of incarnation {incarnation} of the run, which the event log {self.path} does not tell of"
        if seq > self.ends[incarnation]:
            return f"is of event {seq}, but the event log ends at {self.ends[incarnation]} ({self.path})"
        back = min((after for later, after in self.resumes if later > incarnation), default=seq)
        if seq > back:
            return f"is of event {seq} of a course that was taken back: the run went on after event {back} instead"
        gaps = [one for one in self.broken if self._before(one, incarnation, seq)]
        return f"is of event {seq}, and the event log is broken before that: {gaps[0].why}" if gaps else ""

    def broken_after(self, incarnation: int, seq: int) -> tuple[Broken, ...]:
        """What is broken in the surviving run after an event of it."""
        last = self.incarnations - 1
        return tuple(
            one for one in self.broken if self._before(one, last, END) and not self._before(one, incarnation, seq)
        )

    def _before(self, one: Broken, incarnation: int, seq: int) -> bool:
        """Whether it is in the history of event `seq` of an incarnation."""
        if one.incarnation > incarnation:
            return False
        went_on = (after for later, after in self.resumes if one.incarnation < later <= incarnation)
        return one.seq <= min(went_on, default=seq)


def past_of(path: Path) -> Past:
    """Read `events.jsonl`; nothing has happened where there is none. Raises StoreError when it cannot be read at all."""
    if not path.exists():
        return Past(path=path)
    torn: list[Torn] = []
    reading = _Reading(path)
    for offset, line in raw_lines(path, torn.append):
        reading.take(offset, line)
    return reading.past(torn[0] if torn else None)


class _Reading:
    """What is known after so many lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends: list[int] = []
        self.resumes: list[tuple[int, int]] = []
        self.broken: list[Broken] = []
        self.awaited: int | None = None
        """`seq` of the next event; None: any, as for the first of an incarnation."""
        self.last_seq, self.highest = 0, -1
        self.named = {"engine": -1, "host": -1}
        self.checkpointed = self.trained = False
        self.unkept = ""
        self.ended: Mapping[str, Any] | None = None

    def take(self, offset: int, line: bytes) -> None:
        if not self.ends or line.startswith(HEADER):
            self.ends.append(0)
            self.awaited = None
            return
        try:
            event = parse(self.path, offset, line)
            self._event(event, int(event["seq"]), offset)
        except StoreError as error:
            self._gap(1, str(error))
        except (KeyError, TypeError, ValueError) as error:
            self._gap(1, f"{self.path}: the line at byte {offset} is no event as rollart writes them: {error!r}")

    def _event(self, event: Mapping[str, Any], seq: int, offset: int) -> None:
        kind, data = event["kind"], event["data"]
        if self.awaited not in (None, seq):
            assert self.awaited is not None
            text = f"{self.path}: event {seq} at byte {offset} is not event {self.awaited}, which must be there"
            self._gap(max(1, seq - self.awaited), text)
        if kind == "resumed":
            self.resumes.append((len(self.ends) - 1, int(data["from_seq"])))
        elif kind == "published":
            self.highest = max(self.highest, int(event["version"]))
        elif kind in ("engine_joined", "host_joined"):
            what = kind.removesuffix("_joined")
            self.named[what] = max(self.named[what], number_of(event[what]))
        elif kind == "advisory" and data["code"] == "checkpoint_failed":
            self.unkept = str(data["text"])
        self.checkpointed |= kind == "checkpointed"
        self.trained |= kind == "step_finished"
        self.ended = data if kind == "run_finished" else None
        self.ends[-1] = self.last_seq = seq
        self.awaited = seq + 1

    def _gap(self, events: int, why: str) -> None:
        """So many events cannot be read: what they were is not known, so each counts as one that used a number."""
        seq = self.last_seq + 1 if self.awaited is None else self.awaited
        self.broken.append(Broken(incarnation=len(self.ends) - 1, seq=seq, why=why))
        self.highest += events
        self.named = {what: number + events for what, number in self.named.items()}
        self.ended = None
        self.awaited = seq + events

    def past(self, torn: Torn | None) -> Past:
        state = "is broken" if self.broken else f"ends at event {self.last_seq}" if self.ends else "is empty"
        return Past(
            path=self.path,
            state=state,
            incarnations=len(self.ends),
            ends=tuple(self.ends),
            resumes=tuple(self.resumes),
            broken=tuple(self.broken),
            last_seq=self.last_seq,
            highest_version=self.highest,
            next_engine=self.named["engine"] + 1,
            next_host=self.named["host"] + 1,
            checkpointed=self.checkpointed,
            unkept=self.unkept,
            trained=self.trained,
            ended=self.ended,
            torn=torn,
        )


def number_of(name: str) -> int:
    """3 for `engine-3`; -1 for a name that ends in no number."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1
