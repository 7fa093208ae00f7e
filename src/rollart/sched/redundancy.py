"""Redundant members and groups: launch more than needed, close at the first that suffice, abort the rest at once.

Source: RollArt section on redundant environment rollouts (M10).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """An open group, as the choice of losers sees it."""

    group: str
    order: int


def losers(unfinished: Sequence[Unfinished], buffered: Sequence[Unfinished], *, surplus: int) -> tuple[str, ...]:
    """Which groups to give up when redundant groups over-produced: unfinished ones first, the longest running first.

    Those were overtaken by every group that the batch took; finished groups follow, the newest first, so that what is
    oldest keeps its turn.
    """
    order = sorted(unfinished, key=lambda u: u.order) + sorted(buffered, key=lambda u: -u.order)
    return tuple(u.group for u in order[:surplus])
