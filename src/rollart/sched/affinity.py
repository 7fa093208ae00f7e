"""Affinity: which pools suit a task. A hot decision: O(pools) a turn, whatever the number of engines.

`Table` is RollArt's static mapping of domains to hardware (M2, `hw_mapping`). `Auto` finds it while the run goes on. Both see
pools of one kind as one place, so that pools that are alike are never told apart; no random numbers of their own.

How `Auto` chooses: by the seconds that a turn costs all who wait, which are its own and those by which it delays the others
on its engine. A prompt that is read stands in the way of every sequence that decodes there; one sequence more makes each step
longer. Where engines idle this is the fastest pool; where they are full, tasks go where they gain most compared with the
others, as what is in the way of many must be short (a price of congestion; Pigou 1920: choices at marginal cost give the least
total time). A full pool spills into the other as soon as that costs less, and a pool with more engines takes more, which is
how pools are compared at equal cost. Seconds are the profile's for the tokens that turns of the task were seen to read and
sample, times what they took in truth by what they should have taken. Time and not tokens: prompts are most of the tokens of a
long task and may be a small part of its time (PEARL, arXiv 2609.35158: 97 % of the tokens, 26 % of the time).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple, Protocol

from rollart.core.profile import Profile

EVIDENCE = 8.0
"""Turns for which what is believed of a task beforehand counts."""
MOST_OFF = 4.0
"""A measurement that is more times its prediction, or a smaller part of it, is one of something else (a queue, a stall): it
counts as this much."""


class Ahead(NamedTuple):
    """What is known of a turn before it is sampled."""

    domain: str
    context: int
    """Tokens that it begins with."""
    cached: int
    """Of which so many need not be read where the trajectory was last; -1: it was nowhere yet."""
    draw: float
    """In (0, 1), one for each trajectory."""


class Seen(NamedTuple):
    """A turn that has ended."""

    domain: str
    pool: str
    seconds: float
    read: int
    """Prompt tokens that were computed, again or for the first time."""
    sampled: int
    context: int
    """Tokens that it began with."""
    live: float
    """Other turns on its engine, meanwhile."""
    steady: bool
    """Nothing but sampling went on: no weights changed and nothing failed."""


class Affinity(Protocol):
    """What routing asks and tells."""

    @property
    def learns(self) -> bool:
        """Routing goes by `cost_s`, which follows what was `measured`; else by `order`."""
        ...

    def place(self, pool: str) -> str:
        """Where engines of `pool` stand: the name that they share with those of pools like it."""
        ...

    def order(self, domain: str) -> Sequence[str]:
        """Places in order of preference; empty: all are alike."""
        ...

    def cost_s(self, turn: Ahead, place: str, live: int, *, home: bool) -> float:
        """What a turn costs all who wait on an engine of `place` with `live` others; `home`: the trajectory was last there."""
        ...

    def measured(self, seen: Seen) -> None:
        """A turn has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Places by domain, in order of preference; a domain without an entry has that of `default`."""

    order_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Pool -> the place where it stands; itself where it is not named."""
    learns = False

    def place(self, pool: str) -> str:
        return self.places.get(pool, pool)

    def order(self, domain: str) -> Sequence[str]:
        return self.order_of.get(domain) or self.order_of.get("default", ())

    def cost_s(self, turn: Ahead, place: str, live: int, *, home: bool) -> float:
        return 0.0

    def measured(self, seen: Seen) -> None:
        """A table does not learn."""


OFF = Table()


@dataclass(slots=True)
class _Usual:
    """Turns of one task, older ones counting less."""

    read: float
    sampled: float
    context: float
    turns: float = 0.0

    def add(self, seen: Seen, keep: float) -> None:
        self.turns = self.turns * keep + 1.0
        share = 1.0 / (self.turns + EVIDENCE)
        self.read += share * (seen.read - self.read)
        self.sampled += share * (seen.sampled - self.sampled)
        self.context += share * (seen.context - self.context)


@dataclass(slots=True)
class _Off:
    """By how much turns of one task on one kind of engine took longer than the profile says: mean of the logarithm, in which
    the belief that they do not counts as `EVIDENCE` turns."""

    turns: float = 0.0
    total: float = 0.0
    factor: float = 1.0

    def add(self, ratio: float, keep: float) -> None:
        self.turns = self.turns * keep + 1.0
        self.total = self.total * keep + log(max(1 / MOST_OFF, min(MOST_OFF, ratio)))
        self.factor = exp(self.total / (self.turns + EVIDENCE))


class Auto:
    """Preferences from predicted seconds, corrected by measured ones."""

    learns = True

    def __init__(
        self, places: Mapping[str, str], profile: Profile, *, sampled: Mapping[str, float], explore: float, half_life: int
    ) -> None:  # fmt: skip
        """places: every pool that samples -> its kind, as the profile knows it.
        sampled: task -> tokens of a turn, as far as is known beforehand.
        explore: share of new trajectories that go to any kind, so that all go on being measured.
        half_life: turns after which a measurement counts half."""
        self._places = dict(places)
        self._kinds = tuple(dict.fromkeys(places.values()))
        self._profile = profile
        self._sampled = dict(sampled)
        self._explore = explore
        self._keep = 0.5 ** (1.0 / half_life)
        self._usual: dict[str, _Usual] = {}
        self._off: dict[tuple[str, str], _Off] = {}

    def place(self, pool: str) -> str:
        return self._places.get(pool, pool)

    def order(self, domain: str) -> Sequence[str]:
        return ()

    def measured(self, seen: Seen) -> None:
        kind = self._places.get(seen.pool)
        if kind is None:
            return
        usual = self._usual.get(seen.domain)
        if usual is None:
            usual = self._usual[seen.domain] = _Usual(seen.read, self._first(seen.domain), seen.context)
        usual.add(seen, self._keep)
        if not seen.steady or not seen.sampled or seen.seconds <= 0:
            return
        expected_s = self._alone_s(kind, seen)
        if expected_s > 0:
            self._off.setdefault((seen.domain, kind), _Off()).add(seen.seconds / expected_s, self._keep)

    def _first(self, domain: str) -> float:
        return max(1.0, self._sampled.get(domain, 1.0))

    def _alone_s(self, kind: str, seen: Seen) -> float:
        """What a turn that has ended should have taken."""
        context = seen.context + seen.sampled / 2.0
        read_s = self._profile.prefill_s(kind, seen.read, live=seen.live, context=context) if seen.read else 0.0
        return read_s + seen.sampled * self._profile.decode_s(kind, live=seen.live + 1.0, context=context)

    def factor(self, domain: str, kind: str) -> float:
        """Measured seconds by predicted ones, of the task there."""
        off = self._off.get((domain, kind))
        return 1.0 if off is None else off.factor

    def cost_s(self, turn: Ahead, place: str, live: int, *, home: bool) -> float:
        if turn.cached < 0 and turn.draw < self._explore:
            at = int(turn.draw / self._explore * len(self._kinds))
            if place == self._kinds[at]:
                return 0.0
        usual = self._usual.get(turn.domain)
        sampled = self._first(turn.domain) if usual is None else usual.sampled
        if turn.cached >= 0:  # moving pays when it does so for this turn
            read, before = float(turn.context - turn.cached if home else turn.context), float(turn.context)
        elif usual is None:
            read = before = float(turn.context)
        else:  # for all of its turns, of which this is only the first
            read, before = usual.read, usual.context
        context, profile = before + sampled / 2.0, self._profile
        there_s = profile.decode_s(place, live=live, context=context) if live else 0.0
        decode_s = (live + 1) * profile.decode_s(place, live=live + 1, context=context) - live * there_s
        read_s = profile.prefill_s(place, read, live=live, context=context) if read >= 1 else 0.0
        return self.factor(turn.domain, place) * ((live + 1) * read_s + sampled * decode_s)
