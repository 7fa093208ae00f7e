"""Who belongs to a group that is trained: the scored attempts that stand between `traj_finished` and the trainer.

Invariant: a trained trajectory is given out once, with its batch; one that came after its group was complete, or whose
group is gone, is told apart as redundant. Memory is that of the groups that are open or buffered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollart.observe.log import Event


class Finished(NamedTuple):
    """What stays of a scored trajectory until its group is trained or dropped."""

    traj: str
    attempt: int
    task: str
    reward: float
    response_tokens: int
    context_tokens: int
    turns: int
    bad_actions: int
    oldest_version: int | None
    newest_version: int | None
    spans: int
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, event: Event) -> Finished:
        data = event["data"]
        return cls(
            event["traj"],
            event["attempt"],
            event["task"],
            data["reward"],
            data["sampled"],
            data["context"],
            data["turns"],
            data["bad_actions"],
            data["oldest_version"],
            data["newest_version"],
            data["spans"],
            data["metrics"],
        )


class Members:
    """Scored members of the groups that are neither trained nor dropped."""

    __slots__ = ("_complete", "_groups")

    def __init__(self) -> None:
        self._groups: dict[str, list[Finished]] = {}
        self._complete: set[str] = set()

    def __len__(self) -> int:
        """How many trajectories wait."""
        # a display looks from a thread of its own, while groups come and go
        return sum(map(len, list(self._groups.values())))

    def opened(self, group: str) -> None:
        self._groups[group] = []

    def finished(self, event: Event) -> bool:
        """Keep a scored trajectory; False: its group needs it no more."""
        group = event["group"]
        if group not in self._groups or group in self._complete:
            return False
        self._groups[group].append(Finished.of(event))
        return True

    def completed(self, group: str, members: int) -> int:
        """The first `members` to finish make the group; returns how many came after them."""
        kept = self._groups.get(group, [])
        surplus = kept[members:]
        del kept[members:]
        self._complete.add(group)
        return len(surplus)

    def take(self, group: str) -> list[Finished]:
        """The members of a group that is released or dropped; later ones find no group."""
        self._complete.discard(group)
        return self._groups.pop(group, [])
