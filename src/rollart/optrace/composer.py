"""Nodes placed in time: every rank has streams that run in the order of issue, and ranks wait for each other.

Owns the graph of events and its longest paths. Invariant: times are whole ticks and every event is at the latest of (another
event plus a lag), so the placement is a sum of maxima: a longer node never makes anything earlier, and delaying one node by d
moves no other by more than d. Why ticks: sums of floats depend on their order, and two ways of composing one step (operator
by operator, or task by task) must give the same bytes. Why events: a collective is one event for all of its members, so it
starts when the last of them arrives and nothing else has to know about ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from rollart.core.errors import ConfigError, DeadlockError, InvariantBroken

TICKS_PER_S = 10**12
"""Picoseconds: the shortest kernel is a million of them, a day fits in 57 bits."""
NEVER = -(1 << 62)
"""An input that nothing waits for; adding all lags of a step to it leaves it far below any time."""
MOST_NAMED = 12
"""Waiting nodes that an error names; a stuck schedule has thousands, and the first say why."""

Edge = tuple[int, int]
"""(event, ticks): not before that event plus so many ticks."""
Label = tuple[object, ...]


def ticks(seconds: float) -> int:
    """Whole ticks of a duration above 0, at least one: work that is there takes time."""
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"a duration of {seconds} s cannot be placed; every operator needs a finite time above 0")
    return max(1, round(seconds * TICKS_PER_S))


def seconds(whole_ticks: int) -> float:
    """Seconds of so many ticks."""
    return whole_ticks / TICKS_PER_S


@dataclass(slots=True)
class Graph:
    """Events with the edges that lead to each."""

    labels: list[Label] = field(default_factory=list)
    edges: list[list[Edge]] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    """Members that have not come yet, by event."""
    ordered: bool = True
    """Whether every edge leads from an earlier event to a later one, so that one walk places all."""

    def event(self, label: Label, edges: Iterable[Edge] = (), *, members: int = 1) -> int:
        """A new event, the first of whose `members` brings `edges`."""
        event = len(self.edges)
        self.labels.append(label)
        self.edges.append([])
        if members > 1:
            self.missing[event] = members
            self.join(event, edges)
        else:
            self.wait(event, edges)
        return event

    def wait(self, event: int, edges: Iterable[Edge]) -> None:
        """Add edges to an event."""
        into = self.edges[event]
        for edge in edges:
            into.append(edge)
            if edge[0] >= event:
                self.ordered = False

    def join(self, event: int, edges: Iterable[Edge]) -> None:
        """Another member arrives at a meeting; raises `InvariantBroken` if all had come."""
        left = self.missing.get(event, 0) - 1
        if left < 0:
            raise InvariantBroken(f"one member too many comes to {_said(self.labels[event])}")
        self.missing[event] = left
        self.wait(event, edges)

    def place(self, given: Mapping[int, int] | None = None) -> list[int]:
        """Ticks of every event; `given`: not before these. Raises `DeadlockError` naming the events that wait for ever."""
        given = given or {}
        if self.ordered and not any(self.missing.values()):
            return self._walk(given)
        times = [given.get(event, 0 if not into else NEVER) for event, into in enumerate(self.edges)]
        pending = [len(into) for into in self.edges]
        for event, left in self.missing.items():
            pending[event] += left  # members that never come keep it waiting
        after: list[list[Edge]] = [[] for _ in self.edges]
        for event, into in enumerate(self.edges):
            for source, lag in into:
                after[source].append((event, lag))
        queue = deque(event for event, count in enumerate(pending) if count == 0)
        done = 0
        while queue:
            source = queue.popleft()
            done += 1
            base = times[source]
            for event, lag in after[source]:
                times[event] = max(times[event], base + lag)
                pending[event] -= 1
                if pending[event] == 0:
                    queue.append(event)
        if done < len(times):
            raise DeadlockError(self._waiting(pending))
        return times

    def _walk(self, given: Mapping[int, int]) -> list[int]:
        times: list[int] = []
        for event, into in enumerate(self.edges):
            at = given.get(event, NEVER if into else 0)
            for source, lag in into:
                reached = times[source] + lag
                at = max(at, reached)
            times.append(at)
        return times

    def _waiting(self, pending: list[int]) -> list[str]:
        """Who waits for whom, meetings that lack members first."""
        stuck = [event for event, count in enumerate(pending) if count]
        stuck.sort(key=lambda event: (self.missing.get(event, 0) == 0, event))
        named = []
        for event in stuck[:MOST_NAMED]:
            waits = [_said(self.labels[source]) for source, _ in self.edges[event] if pending[source]]
            if self.missing.get(event, 0):
                waits.insert(0, f"{self.missing[event]} more to come")
            named.append(f"{_said(self.labels[event])} (waits for {', '.join(dict.fromkeys(waits))})")
        if len(stuck) > MOST_NAMED:
            named.append(f"and {len(stuck) - MOST_NAMED} more")
        return named


def _said(label: Label) -> str:
    return " ".join(str(word) for word in label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Work of one rank on one stream: from `event` for `duration` ticks."""

    event: int
    duration: int


@dataclass(slots=True)
class Composer:
    """Builds a graph of nodes: first in, first out on each (rank, stream)."""

    graph: Graph = field(default_factory=Graph)
    nodes: list[Node] = field(default_factory=list)
    _last: dict[Hashable, Node] = field(default_factory=dict)
    _meetings: dict[Hashable, int] = field(default_factory=dict)

    def run(
        self, rank: int, stream: Hashable, name: str, duration: int, *, after: Iterable[int] = (), edges: Iterable[Edge] = (),
        meeting: Hashable = None, members: int = 1,
    ) -> int:  # fmt: skip
        """Issue a node; returns its number.

        `duration`: ticks, above 0; `after`: nodes that must have ended; `meeting`: all `members` nodes of one meeting start
        together.
        """
        if duration <= 0:
            raise ConfigError(f"{name} of rank {rank} takes {duration} ticks; every node needs a time above 0")
        waits = list(edges)
        last = self._last.get((rank, stream))
        if last is not None:
            waits.append((last.event, last.duration))
        for number in after:
            node = self.nodes[number]
            waits.append((node.event, node.duration))
        if meeting is None or members == 1:
            event = self.graph.event((name, "of rank", rank), waits)
        elif meeting in self._meetings:
            event = self._meetings[meeting]
            self.graph.join(event, waits)
        else:
            event = self.graph.event((name, "met first by rank", rank), waits, members=members)
            self._meetings[meeting] = event
        node = Node(event=event, duration=duration)
        self._last[rank, stream] = node
        self.nodes.append(node)
        return len(self.nodes) - 1

    def finish(self, times: list[int]) -> int:
        """Ticks at which the last node ends; raises `InvariantBroken` when nothing ran."""
        if not self.nodes:
            raise InvariantBroken("nothing was composed: a step without a node has no time")
        return max(times[node.event] + node.duration for node in self.nodes)
