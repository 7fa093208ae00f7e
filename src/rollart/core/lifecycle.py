"""One table of legal transitions per lifecycle: the only place where a transition becomes legal.

A trajectory attempt ends in exactly one terminal state; a group is trained or dropped exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rollart.core.errors import InvariantBroken

AttemptState = Literal["opening", "generating", "stepping", "scoring", "done", "aborted", "failed"]
GroupState = Literal["open", "buffered", "training", "trained", "dropped"]

ATTEMPT: Mapping[str, frozenset[str]] = {
    "opening": frozenset({"generating", "done", "aborted", "failed", "scoring"}),
    "generating": frozenset({"stepping", "scoring", "done", "aborted", "failed"}),
    "stepping": frozenset({"generating", "scoring", "done", "aborted", "failed"}),
    "scoring": frozenset({"done", "aborted", "failed"}),
    "done": frozenset(),
    "aborted": frozenset(),
    "failed": frozenset(),
}
GROUP: Mapping[str, frozenset[str]] = {
    "open": frozenset({"buffered", "dropped"}),
    "buffered": frozenset({"training", "dropped"}),
    # back to buffered: a lost trainer repeats the step with the samples that it kept
    "training": frozenset({"trained", "buffered", "dropped"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}


class Lifecycle:
    """The present state of one subject; moves only along its table."""

    __slots__ = ("_table", "state", "subject")

    def __init__(self, table: Mapping[str, frozenset[str]], subject: str, state: str) -> None:
        if state not in table:
            raise InvariantBroken(f"{subject}: unknown state {state!r}; one of {sorted(table)}")
        self._table = table
        self.subject = subject
        self.state = state

    def to(self, state: str) -> None:
        if state not in self._table[self.state]:
            raise InvariantBroken(f"{self.subject}: {self.state} -> {state} is not a legal transition")
        self.state = state

    @property
    def terminal(self) -> bool:
        return not self._table[self.state]
