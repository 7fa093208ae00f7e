"""What is known of a run when its promises are checked: its log, and what others remember of it.

Invariant: nothing here is changed once it is read; the surviving history is folded from the log as its readers do it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rollart.core.types import Trajectory
from rollart.sched.staleness import NO_BOUND

Row = dict[str, Any]
"""An event with its `data` beside its ids."""


def bound_of(started: Mapping[str, Any]) -> int:
    """The staleness that a run promises to keep; NO_BOUND where it is checked at admission only."""
    return NO_BOUND if started.get("enforce") == "admission" else int(started["max_staleness"])


@dataclass(kw_only=True)
class Record:
    """What is known of a run."""

    log: Sequence[Mapping[str, Any]]
    """Events of all incarnations as they were written, those that were taken back as well."""
    order: Callable[[str, int], Sequence[int]] | None = None
    """(task, epoch) -> indices of its instances in the order in which they are issued; None: not known."""
    learned: Sequence[Sequence[str]] | None = None
    """Trajectories of each optimiser step, from the trainer that the run ended with; None: not known."""
    kept: Sequence[Trajectory] = ()
    """Terminal trajectories that the world was given, of all incarnations."""
    min_members: int = 1
    """Members with which a group may be complete."""
    _of: dict[str, list[Row]] = field(default_factory=dict)

    @cached_property
    def written(self) -> list[Row]:
        return [{**event, **event["data"]} for event in self.log]

    @cached_property
    def rows(self) -> list[Row]:
        """The history of the surviving run: without what a `resumed` has taken back."""
        rows: list[Row] = []
        for row in self.written:
            if row["kind"] == "resumed":
                del rows[row["from_seq"] :]
            rows.append(row)
        return rows

    def of(self, kind: str) -> list[Row]:
        """Surviving events of a kind."""
        if not self._of:
            for row in self.rows:
                self._of.setdefault(row["kind"], []).append(row)
        return self._of.get(kind, [])

    @property
    def done(self) -> bool:
        return bool(self.rows) and self.rows[-1]["kind"] == "run_finished" and self.rows[-1]["status"] == "done"

    @cached_property
    def started(self) -> Row:
        return self.of("run_started")[0]

    def last_said(self, name: str) -> Any:
        """A number of the schedule as it was at last: whoever resumes a run may change it."""
        return next((row[name] for row in reversed(self.of("resumed")) if name in row), self.started[name])

    @cached_property
    def members(self) -> dict[str, list[Row]]:
        """Group -> the scored attempts that completed it."""
        over: set[str] = set()
        members: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            if row["kind"] in ("group_completed", "group_dropped"):
                over.add(row["group"])
            elif row["kind"] == "traj_finished" and _scored(row) and row["group"] not in over:
                members[row["group"]].append(row)
        return members


def _scored(row: Row) -> bool:
    return bool(row["status"] == "done" and row["purpose"] == "train")
