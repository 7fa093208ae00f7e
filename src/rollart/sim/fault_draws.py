"""When something fails by itself: lives and outages, drawn from what they are of.

Invariant: a draw is a function of the seed and of what fails (a node and how often it did, the place of an engine and how many
stood there before), so that schedules that are compared meet the same faults as long as they do the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from rollart.config.faults import RewardFaults
from rollart.core.seeds import unit


def life_s(mtbf_s: float, seed: int, *address: object) -> float:
    """Seconds until it fails, exponential with that mean; infinite where the mean is 0."""
    return -mtbf_s * math.log(unit(seed, "fault", *address)) if mtbf_s else math.inf


class Span(NamedTuple):
    """From `begin_s`, which belongs to it, to `end_s`, which does not; loop time."""

    begin_s: float
    end_s: float

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


class Outages:
    """Of the reward service: drawn ones, which never overlap each other, and scripted ones."""

    def __init__(self, law: RewardFaults, seed: int, scripted: Iterable[Span] = ()) -> None:
        self._law = law
        self._seed = seed
        self._scripted = sorted(scripted)
        self._made: list[Span] = []
        self._nth = 0
        """Of the first drawn one that was not over when `next` was asked last."""

    def drawn(self, nth: int) -> Span:
        """The drawn outage of that number, counted from 0; it begins at infinity where none is drawn."""
        while len(self._made) <= nth:
            since_s = self._made[-1].end_s if self._made else 0.0
            begin_s = since_s + life_s(self._law.mtbf_s, self._seed, "rewards", len(self._made))
            self._made.append(Span(begin_s, begin_s + self._law.outage_s))
        return self._made[nth]

    def next(self, now_s: float) -> Span:
        """The first that is not over; it may be under way, or begin at infinity. `now_s` may not fall from call to call."""
        while self.drawn(self._nth).end_s <= now_s:
            self._nth += 1
        while self._scripted and self._scripted[0].end_s <= now_s:
            self._scripted.pop(0)
        # the one that begins first; a longer one may hide behind it, and is found when this one is over
        return min([self.drawn(self._nth), *self._scripted[:1]])
