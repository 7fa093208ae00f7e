"""The picture of a run's last steps: who worked when, trajectory by trajectory, small enough to put into a page.

Invariant: intervals are drawn where events put them; only what does not fit (more rows or turns than a reader can see)
is left out, by whole groups, and the page says what share is shown.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollart.observe.log import Event
from rollart.observe.metrics import steps_done
from rollart.observe.tally import task_of

TICK_S = 1e-4
"""Unit of time in the page: finer than a pixel at any zoom, and short to write."""
BUCKETS = 600
"""Points of a load curve: about one for each two pixels of a wide screen."""
MAX_TURNS = 5_000
"""Turns drawn one by one; some 100 kB of page."""
MAX_STEPS = 8
MAX_ROWS = 160
MAX_ENGINES = 8
"""Engines drawn one by one; of more, evenly spaced ones."""


class Alive(NamedTuple):
    """An attempt that has not ended."""

    task: str
    group: str
    start_s: float


Key = tuple[str, int]
"""Trajectory and attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """The state of a run at the end of a step: where a window can begin."""

    end_s: float
    turns_before: int
    """`turn_done` events in the log until then."""
    alive: Mapping[Key, Alive]
    versions: Mapping[str, int]
    """What each engine serves."""


class Marks:
    """Feed events in order. Keeps the last few marks."""

    def __init__(self) -> None:
        self.last: deque[StepMark] = deque(maxlen=MAX_STEPS + 1)
        self._since_s = 0.0
        self._turns = 0
        self._alive: dict[Key, Alive] = {}
        self._versions: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "turn_done":
            self._turns += 1
        elif kind == "traj_started":
            self._alive[event["traj"], event["attempt"]] = Alive(event["task"], event["group"], event["t"])
        elif kind == "traj_finished":
            self._alive.pop((event["traj"], event["attempt"]), None)
        elif kind in ("engine_joined", "applied"):
            self._versions[event["engine"]] = event["version"]
        elif kind == "engine_lost":
            self._versions.pop(event["engine"], None)
        elif kind == "resumed":
            self._versions.clear()
        elif kind == "step_finished" or (kind == "group_opened" and not self.last):
            self.last.append(self._mark(event["t"]))

    def _mark(self, t: float) -> StepMark:
        return StepMark(end_s=t, turns_before=self._turns, alive=dict(self._alive), versions=dict(self._versions))

    def window(self) -> tuple[StepMark, float] | None:
        """Where it begins and when it ends: as many of the last steps as hold few enough turns, at least 2.

        None before the first step is finished. The first group's opening counts as the end of a step.
        """
        marks = list(self.last)
        if len(marks) < 2:
            return None
        end, start = marks[-1], marks[-2]
        for count, mark in enumerate(reversed(marks[:-1]), start=1):
            if count > 2 and end.turns_before - mark.turns_before > MAX_TURNS:
                break
            start = mark
        return start, end.end_s


@dataclass(slots=True)
class _Life:
    task: int
    start: float
    group: str
    parts: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, end, version; -1 for the environment)."""
    end: float | None = None
    status: str = "open"


class Load:
    """How many of something are going on, per task, as an average over equal stretches of [start, end]."""

    def __init__(self, start: float, end: float, tasks: int) -> None:
        self._start, self._width = start, max((end - start) / BUCKETS, 1e-9)
        self.values = [[0.0] * BUCKETS for _ in range(tasks)]

    def add(self, task: int, start: float, end: float) -> None:
        first, last = (start - self._start) / self._width, (end - self._start) / self._width
        first, last = max(0.0, first), min(float(BUCKETS), last)
        row = self.values[task]
        while first < last:
            bucket = int(first)
            stop = min(last, bucket + 1.0)
            row[bucket] += stop - first
            if stop <= first:
                break
            first = stop

    def rounded(self) -> list[list[float]]:
        return [[round(value, 2) for value in row] for row in self.values]


class WindowFold:
    """Feed the events since `begin` in order; `result` gives what the page draws, in ticks since the window's start."""

    def __init__(self, begin: StepMark, end_s: float, tasks: Sequence[str]) -> None:
        self.start, self.end = begin.end_s, end_s
        self._task = {task: index for index, task in enumerate(tasks)}
        self._lives: dict[Key, _Life] = {}
        for key, alive in begin.alive.items():
            self._started(key, alive)
        self._ended: list[tuple[str, _Life]] = []
        self._engine_load: dict[str, Load] = {}
        self._env_load = Load(begin.end_s, end_s, len(tasks))
        self._versions = {engine: [[0, version]] for engine, version in begin.versions.items()}
        self._spans: dict[str, list[list[int]]] = {"steps": [], "waits": [], "publishes": [], "applies": []}

    def __call__(self, event: Event) -> None:
        kind, t = event["kind"], event["t"]
        if t <= self.start:
            return
        if kind in ("engine_joined", "applied") and t <= self.end:
            self._versions.setdefault(event["engine"], []).append([self._tick(t), event["version"]])
        if kind == "traj_started" and t <= self.end:
            self._started((event["traj"], event["attempt"]), Alive(event["task"], event["group"], t))
        elif kind == "traj_finished":
            self._finished(event)
        else:
            self._inside(kind, t, event, event["data"])

    def _started(self, key: Key, alive: Alive) -> None:
        task = self._task.get(alive.task)
        if task is not None:
            self._lives[key] = _Life(task, alive.start_s, alive.group)

    def _inside(self, kind: str, t: float, event: Event, data: Mapping[str, Any]) -> None:
        if kind == "turn_done":
            engine = self._engine_load.setdefault(event["engine"], Load(self.start, self.end, len(self._task)))
            self._part(event, data["spans"][-1][0] if data["spans"] else -1, engine)
        elif kind in ("env_stepped", "env_opened"):
            self._part(event, -1, self._env_load)
        elif kind == "step_finished":
            self._span("steps", t - data["seconds"], t, steps_done(event))
        elif kind == "batch_released":
            self._span("waits", t - data["waited_s"], t, steps_done(event))
        elif kind == "published":
            self._span("publishes", t - data["seconds"], t, event["version"])
        elif kind == "applied":
            self._span("applies", t - data["seconds"], t, event["version"])

    def _part(self, event: Event, version: int, load: Load) -> None:
        start, t = event["t"] - event["data"]["seconds"], event["t"]
        task = self._task.get(task_of(event["traj"]))
        life = self._lives.get((event["traj"], event["attempt"]))
        if task is not None and start < self.end:
            load.add(task, start, t)
            if life is not None:
                life.parts.append((start, t, version))

    def _finished(self, event: Event) -> None:
        life = self._lives.pop((event["traj"], event["attempt"]), None)
        if life is not None:
            life.end, life.status = event["t"], event["data"]["status"]
            self._ended.append((event["traj"], life))

    def _span(self, name: str, start: float, end: float, label: int) -> None:
        if start < self.end and end > self.start:
            self._spans[name].append([self._tick(max(start, self.start)), self._tick(min(end, self.end)), label])

    def _tick(self, t: float) -> int:
        return round((t - self.start) / TICK_S)

    def result(self) -> dict[str, Any]:
        """Plain values for JSON."""
        lives = self._ended + [(traj, life) for (traj, _), life in self._lives.items()]
        shown = _fitting(lives, self.end)
        names = sorted(self._versions)
        engines = names[:: -(-len(names) // MAX_ENGINES) or 1]
        return {
            "t0": round(self.start, 4),
            "length": self._tick(self.end),
            "tick_s": TICK_S,
            **self._spans,
            "versions": {name: list(self._versions[name]) for name in engines},
            "engines": {name: self._engine_load[name].rounded() for name in engines if name in self._engine_load},
            "engines_shown": [len(engines), len(names)],
            "envs": self._env_load.rounded(),
            "trajectories": [self._drawn(traj, life, row) for traj, life, row in shown],
            "shown": [len(shown), len(lives)],
        }

    def _drawn(self, traj: str, life: _Life, row: int) -> list[Any]:
        parts = [value for start, end, version in life.parts for value in (self._tick(start), self._tick(end), version)]
        end = self._tick(life.end) if life.end is not None else None
        return [row, self._tick(life.start), end, life.task, life.status, traj, parts]


def _fitting(lives: Iterable[tuple[str, _Life]], end: float) -> list[tuple[str, _Life, int]]:
    """Trajectories with their rows; groups are thinned out evenly until rows and turns fit."""
    by_group: dict[str, list[tuple[str, _Life]]] = {}
    for traj, life in lives:
        by_group.setdefault(life.group, []).append((traj, life))
    names = sorted(by_group, key=lambda name: by_group[name][0][1].start)
    stride = 1
    while True:
        kept = [item for name in names[::stride] for item in by_group[name]]
        placed = _in_rows(kept, end)
        rows = max((row for *_, row in placed), default=0) + 1
        turns = sum(len(life.parts) for _, life in kept)
        if (rows <= MAX_ROWS and turns <= 2 * MAX_TURNS) or stride >= len(names):
            return placed
        stride *= 2


def _in_rows(lives: Iterable[tuple[str, _Life]], end: float) -> list[tuple[str, _Life, int]]:
    """Each trajectory in the lowest row that is free when it starts."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    placed: list[tuple[str, _Life, int]] = []
    for traj, life in sorted(lives, key=lambda item: item[1].start):
        while busy and busy[0][0] <= life.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end if life.end is None else life.end, row))
        placed.append((traj, life, row))
    return placed
