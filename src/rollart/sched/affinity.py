"""Affinity: which pools suit a task. A hot decision: O(pools) a turn, whatever the number of engines.

`Table` is RollArt's static mapping of domains to hardware (M2, `hw_mapping`). `Auto` finds it while the run goes on, from the
time that turns took, by task and kind of pool. Time and not tokens: prompts are most of the tokens of a long task and may be a
small part of its time (PEARL, arXiv 2609.35158: 97 % of the tokens, 26 % of the time).
Invariants: pools of one kind are alike, so with one kind nothing is preferred and nothing is sent elsewhere; until every kind
has been seen with a task, its turns go wherever there is room, which is how it is seen; no random numbers of its own.

Why times are compared with those of the other tasks: the devices are there and are to be used, so a task belongs where it gains
most compared with the others, not where it is cheapest, which may be one pool for all (comparative advantage). What a pool
costs, and how full it is, is the same factor for all tasks there and drops out; what it costs is reported beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean
from typing import Protocol

EVIDENCE = 8.0
"""Turns of a task, as they count after forgetting, from which a kind of pool is judged."""
SHARPNESS = 4.0
"""A kind that takes twice as long for a task, compared with the others, gets 1/16 of what the other gets; one that takes 10 %
longer two thirds: a task that is nearly as well served in both is split."""


class Affinity(Protocol):
    """What routing asks and tells."""

    @property
    def draws(self) -> bool:
        """`order` looks at its draw."""
        ...

    def place(self, pool: str) -> str:
        """Where engines of `pool` stand in an order: the name that they share with those of pools like it."""
        ...

    def order(self, domain: str, draw: float) -> Sequence[str]:
        """Places in order of preference; empty: all are alike. draw: in (0, 1), one for each trajectory."""
        ...

    def measured(self, domain: str, pool: str, *, seconds: float, tokens: int) -> None:
        """A turn of `domain` in `pool` took so long for so many sampled tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Pools by domain, in order of preference; a domain without an entry has that of `default`."""

    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    """Pools that the table does not name -> the pool that stands for them."""
    draws: bool = False

    def place(self, pool: str) -> str:
        return self.alike.get(pool, pool)

    def order(self, domain: str, draw: float) -> Sequence[str]:
        return self.pools.get(domain) or self.pools.get("default", ())

    def measured(self, domain: str, pool: str, *, seconds: float, tokens: int) -> None:
        """A table does not learn."""


OFF = Table()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What makes pools alike, and what one of their engines costs for a second."""

    name: str
    cost: float


@dataclass(slots=True)
class _Seen:
    """Turns of one domain on one kind of pool, older ones counting less."""

    turns: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int, keep: float) -> None:
        self.turns = self.turns * keep + 1.0
        self.seconds = self.seconds * keep + seconds
        self.tokens = self.tokens * keep + tokens


class Auto:
    """Preferences from measured time, each task's compared with the others'."""

    def __init__(self, pools: Mapping[str, Kind], *, explore: float, half_life: int) -> None:
        """pools: every pool that samples. explore: least share of what is not the best kind, so that it goes on being measured;
        below 1/2.
        half_life: turns after which a measurement counts half."""
        self._kinds = {kind.name: kind for kind in pools.values()}
        self._kind_of = {pool: kind.name for pool, kind in pools.items()}
        self._explore = min(explore, 0.5)
        self._keep = 0.5 ** (1.0 / half_life)
        # with a short half-life no number of turns ever counts as many
        self._evidence = min(EVIDENCE, 0.5 / (1.0 - self._keep))
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._shares: dict[str, dict[str, float]] = {}
        """By domain, of the kinds that are judged; made anew when something was measured."""
        self.draws = len(self._kinds) > 1

    def place(self, pool: str) -> str:
        return self._kind_of.get(pool, pool)

    def measured(self, domain: str, pool: str, *, seconds: float, tokens: int) -> None:
        kind = self._kind_of.get(pool)
        if not self.draws or kind is None or tokens < 1 or seconds <= 0:
            return
        self._seen.setdefault(domain, {}).setdefault(kind, _Seen()).add(seconds, tokens, self._keep)
        self._shares.clear()

    def costs(self, domain: str) -> Mapping[str, float]:
        """Kind -> cost of a sampled token of the domain there, all that it waits for included; only kinds that are judged."""
        seen = self._seen.get(domain, {})
        return {
            name: seen[name].seconds / seen[name].tokens * kind.cost
            for name, kind in self._kinds.items()
            if name in seen and seen[name].turns >= self._evidence
        }

    def shares(self, domain: str) -> Mapping[str, float]:
        """Kind -> share of the domain's new trajectories; empty: there is nothing to compare with yet, or only one kind."""
        known = self._shares.get(domain)
        if known is None:
            known = self._shares[domain] = self._divide(domain) if self.draws else {}
        return known

    def _divide(self, domain: str) -> dict[str, float]:
        judged = {name: costs for name in self._seen if len(costs := self.costs(name)) == len(self._kinds)}
        if domain not in judged or len(judged) < 2:
            return {}
        usual = {kind: fmean(log(costs[kind]) for costs in judged.values()) for kind in self._kinds}
        gains = {kind: usual[kind] - log(cost) for kind, cost in judged[domain].items()}
        most = max(gains.values())
        wanted = {kind: exp(SHARPNESS * (gain - most)) for kind, gain in gains.items()}
        floor = self._explore / (len(wanted) - 1)
        rest = (1.0 - len(wanted) * floor) / sum(wanted.values())
        return {kind: floor + rest * one for kind, one in wanted.items()}

    def order(self, domain: str, draw: float) -> Sequence[str]:
        shares = self.shares(domain)
        if not shares:
            return ()
        left, chosen = draw, ""
        for name, share in shares.items():
            chosen = name
            if left < share:
                break
            left -= share
        return (chosen, *sorted((name for name in shares if name != chosen), key=lambda name: -shares[name]))
