"""Small accumulators that every fold over events shares: moments of a number, live requests of engines, busy time.

Invariant: they need memory for what is open now (live requests), never for what has passed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from rollart.sched.staleness import Lineage

Z95 = 1.959964
"""Normal quantile of a 95 % interval."""


@dataclass(slots=True)
class Stat:
    """Moments of a series of numbers. Numbers that are missing or not finite are left out."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        self.n += 1
        self.total += value
        self.squares += value * value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def add_all(self, values: Iterable[float | None]) -> None:
        """As if each had been added, to the last bit: sums grow one by one."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        self.n += len(finite)
        self.total = reduce(add, finite, self.total)
        self.squares = reduce(add, [value * value for value in finite], self.squares)
        self.low = min([self.low, *finite])
        self.high = max([self.high, *finite])

    def merge(self, other: Stat) -> None:
        """As if its numbers had been added here too."""
        self.n += other.n
        self.total += other.total
        self.squares += other.squares
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None

    @property
    def std(self) -> float | None:
        """Population deviation."""
        if not self.n:
            return None
        mean = self.total / self.n
        return math.sqrt(max(0.0, self.squares / self.n - mean * mean))

    @property
    def min(self) -> float | None:
        return self.low if self.n else None

    @property
    def max(self) -> float | None:
        return self.high if self.n else None


@dataclass(slots=True)
class _Engine:
    since: float
    live: set[Hashable] = field(default_factory=set)
    seen_s: float = 0.0
    idle_s: float = 0.0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """What engines did in a stretch of time, summed over engines."""

    seen_s: float
    """Engine-seconds in which an engine was there."""
    idle_s: float
    """Engine-seconds without a live request."""
    request_s: float
    """Request-seconds: the integral of the number of live requests."""

    @property
    def idle_share(self) -> float | None:
        return self.idle_s / self.seen_s if self.seen_s > 0 else None

    @property
    def mean_live(self) -> float | None:
        """Live requests per engine, averaged over time."""
        return self.request_s / self.seen_s if self.seen_s > 0 else None


class EngineMeter:
    """How many requests are live on each engine. A request is live from `turn_routed` to its `turn_done`."""

    __slots__ = ("_engines", "_gone")

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._gone = [0.0, 0.0, 0.0]

    def joined(self, engine: str, t: float) -> None:
        self._engines.setdefault(engine, _Engine(t))

    def lost(self, engine: str, t: float) -> None:
        """The engine and its live requests are gone."""
        gone = self._engines.pop(engine, None)
        if gone is not None:
            _advance(gone, t)
            for index, value in enumerate((gone.seen_s, gone.idle_s, gone.request_s)):
                self._gone[index] += value

    def all_lost(self, t: float) -> None:
        """The run was resumed: none of the engines before it is there any more."""
        for engine in list(self._engines):
            self.lost(engine, t)

    def routed(self, engine: str, request: Hashable, t: float) -> None:
        now = self._engines.get(engine)
        if now is None:
            now = self._engines[engine] = _Engine(t)
        _advance(now, t)
        now.live.add(request)

    def done(self, engine: str, request: Hashable, t: float) -> None:
        now = self._engines.get(engine)
        if now is not None:
            _advance(now, t)
            now.live.discard(request)

    def live_on(self, engine: str) -> int:
        """Live requests of one engine."""
        found = self._engines.get(engine)
        return len(found.live) if found is not None else 0

    @property
    def live(self) -> dict[str, int]:
        # a copy: who shows it may ask in a thread of its own
        return {name: len(engine.live) for name, engine in self._engines.copy().items()}

    def read(self, t: float) -> EngineTime:
        """Totals since the start or the last `reset`."""
        for engine in self._engines.values():
            _advance(engine, t)
        seen_s, idle_s, request_s = self._gone
        for engine in self._engines.values():
            seen_s += engine.seen_s
            idle_s += engine.idle_s
            request_s += engine.request_s
        return EngineTime(seen_s=seen_s, idle_s=idle_s, request_s=request_s)

    def reset(self, t: float) -> None:
        self._gone = [0.0, 0.0, 0.0]
        for engine in self._engines.values():
            engine.since, engine.seen_s, engine.idle_s, engine.request_s = t, 0.0, 0.0, 0.0


def _advance(engine: _Engine, t: float) -> None:
    passed_s = t - engine.since
    if passed_s <= 0.0:
        return
    engine.since = t
    engine.seen_s += passed_s
    if engine.live:
        engine.request_s += passed_s * len(engine.live)
    else:
        engine.idle_s += passed_s


class Versions:
    """Staleness as it counts: in batches between versions. Numbers are skipped when the same weights are published again."""

    __slots__ = ("_lineage",)

    def __init__(self) -> None:
        self._lineage = Lineage()

    def published(self, event: Mapping[str, Any]) -> None:
        again = event["data"].get("again")
        if again is not None:
            self._lineage = self._lineage.again(again, event["version"])

    def staleness(self, trained_at: int, sampled_at: int) -> int:
        return self._lineage.batches(trained_at) - self._lineage.batches(sampled_at)


class Busy:
    """Union of intervals that are reported when they end, in order of their ends."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []

    def add(self, start_s: float, end_s: float) -> None:
        intervals = self._intervals
        while intervals and intervals[-1][1] >= start_s:
            start_s = min(start_s, intervals.pop()[0])
        intervals.append((start_s, end_s))

    def within(self, start_s: float, end_s: float) -> float:
        """Seconds of [start, end] that are covered."""
        return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in self._intervals)


def task_of(traj: str) -> str:
    """The task in a trajectory's or group's id (`purpose/task/epoch/index[/member]`)."""
    return traj.split("/", 2)[1]


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n (Wilson's score interval)."""
    if n <= 0:
        return 0.0, 1.0
    middle = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
