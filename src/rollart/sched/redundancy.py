"""Redundant members and groups: launch more than needed, close at the first that suffice, abort the rest at once.

Source: RollArt section on redundant environment rollouts (M10).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["wait", "complete", "hopeless"]


def group_verdict(*, done: int, live: int, group_size: int, given_up: int, min_group_size: int) -> Verdict:
    """Is a group complete?

    It completes at `group_size` scored members. Members given up for good (`given_up`) lower what it waits for once no
    spare member is left to take their place, down to `min_group_size`; below that it is hopeless.
    """
    if done >= group_size:
        return "complete"
    if done + live >= group_size:
        return "wait"
    if live > 0 and done + live >= min_group_size:
        return "wait"
    if live == 0 and given_up > 0 and done >= min_group_size:
        return "complete"
    return "hopeless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A group that is not trained yet, as the choice of losers sees it."""

    group: str
    task: str
    order: int


def losers(
    unfinished: Sequence[Unfinished], buffered: Sequence[Unfinished], *, wanted: Mapping[str, int]
) -> tuple[str, ...]:
    """Which groups to give up when redundant groups over-produced: per task, those beyond what coming batches want.

    A slow task's groups are never given up for what a fast one over-produced. Within a task unfinished groups go first, the
    longest running first: those were overtaken by every group that the batch took. Finished groups follow, the newest
    first, so that what is oldest keeps its turn.
    """
    order = sorted(unfinished, key=lambda u: u.order) + sorted(buffered, key=lambda u: -u.order)
    spare = Counter(u.task for u in order)
    spare.subtract(wanted)
    lost: list[str] = []
    for one in order:
        if spare[one.task] > 0:
            spare[one.task] -= 1
            lost.append(one.group)
    return tuple(lost)
