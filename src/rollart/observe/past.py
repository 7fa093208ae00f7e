"""What the log of a run that ended or was killed says to whoever wants to go on with it.

Invariant: one pass over the file; what was taken back counts where numbers and names must not come again (versions,
engines, hosts), the surviving run alone counts where it asks how far the run has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.observe.jsonl import Torn, parse, raw_lines

HEADER = b'{"schema"'
KINDS = (b'"kind":"published"', b'"kind":"engine_joined"', b'"kind":"host_joined"', b'"kind":"checkpointed"')
"""Events that are looked into, as the writer of the log spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    incarnations: int = 0
    """Headers so far: the number of the next one."""
    last_seq: int = 0
    """Of the last event. `seq` has no gaps in the surviving run, so as many events survive."""
    highest_version: int = -1
    """Ever published."""
    next_engine: int = 0
    next_host: int = 0
    checkpointed: bool = False
    """Whether a checkpoint was ever completed."""
    trained: bool = False
    """Whether a step was ever finished."""
    ended: Mapping[str, Any] | None = None
    """Status and reason, when the last event is the run's end."""
    torn: Torn | None = None
    """The last line, when its writer was killed in it."""

    def lost(self, from_seq: int) -> int:
        """Events that are taken back when the run goes on after `from_seq`."""
        return max(0, self.last_seq - from_seq)


def past_of(path: Path) -> Past:
    """Read `events.jsonl`; nothing has happened where there is none. Raises StoreError."""
    if not path.exists():
        return Past()
    torn: list[Torn] = []
    incarnations, highest, checkpointed, trained = 0, -1, False, False
    named = {"engine": -1, "host": -1}
    last: tuple[int, bytes] | None = None
    for offset, line in raw_lines(path, torn.append):
        if line.startswith(HEADER):
            incarnations += 1
            continue
        last = offset, line
        trained = trained or b'"kind":"step_finished"' in line
        if not any(kind in line for kind in KINDS):
            continue
        event = parse(path, offset, line)
        if event["kind"] == "published":
            highest = max(highest, int(event["version"]))
        elif event["kind"] == "checkpointed":
            checkpointed = True
        else:
            what = "engine" if event["kind"] == "engine_joined" else "host"
            named[what] = max(named[what], number_of(event[what]))
    end = parse(path, *last) if last else {}
    return Past(
        incarnations=incarnations,
        last_seq=int(end.get("seq", 0)),
        highest_version=highest,
        next_engine=named["engine"] + 1,
        next_host=named["host"] + 1,
        checkpointed=checkpointed,
        trained=trained,
        ended=end["data"] if end.get("kind") == "run_finished" else None,
        torn=torn[0] if torn else None,
    )


def number_of(name: str) -> int:
    """3 for `engine-3`; -1 for a name that ends in no number."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1
