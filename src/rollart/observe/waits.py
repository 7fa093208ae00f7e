"""What waited for what: where trainer, engines and trajectories spent their time.

Invariant: each split adds up to its whole, because its last part is what no event claims and is named `other`.
Times of trainer and engines are counted in one window, from the start of the first step to the end of the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.observe.log import Event
from rollart.observe.metrics import request_of
from rollart.observe.tally import Busy, EngineMeter, EngineTime


@dataclass(slots=True)
class _Window:
    start_s: float
    end_s: float
    engines: EngineTime
    exposed_s: float = 0.0


class WaitsFold:
    """Feed events in order; `result` at any time."""

    def __init__(self) -> None:
        self._train, self._work, self._claimed = Busy(), Busy(), Busy()
        self._meter = EngineMeter()
        self._window: _Window | None = None
        self._exposed_s = 0.0
        self._generating: dict[tuple[str, int], float] = {}
        self._spent: dict[str, dict[str, float]] = {}
        self._done: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        kind, t, data = event["kind"], event["t"], event["data"]
        if kind == "turn_routed":
            self._meter.routed(event["engine"], request_of(event), t)
        elif kind == "turn_done":
            self._meter.done(event["engine"], request_of(event), t)
            if event["traj"].startswith("train/"):
                key = event["traj"], event["attempt"]
                self._generating[key] = self._generating.get(key, 0.0) + data["seconds"]
        elif kind == "traj_finished":
            self._trajectory(event)
        elif kind == "engine_joined":
            self._meter.joined(event["engine"], t)
        elif kind == "engine_lost":
            self._meter.lost(event["engine"], t)
        elif kind == "resumed":
            self._meter.all_lost(t)
        elif kind == "applied":
            self._exposed_s += data["exposed_s"]
        else:
            self._trainer(kind, t, data)

    def _trainer(self, kind: str, t: float, data: Mapping[str, Any]) -> None:
        if kind == "batch_released":
            self._claimed.add(t - data["waited_s"], t)
        elif kind == "step_started" and self._window is None:
            self._meter.reset(t)
            self._exposed_s = 0.0
            self._window = _Window(t, t, self._meter.read(t))
        elif kind == "step_finished":
            for busy in (self._train, self._work, self._claimed):
                busy.add(t - data["seconds"], t)
            if self._window is not None:
                self._window.end_s, self._window.engines = t, self._meter.read(t)
                self._window.exposed_s = self._exposed_s
        elif kind == "published":
            for busy in (self._work, self._claimed):
                busy.add(t - data["seconds"], t)

    def _trajectory(self, event: Event) -> None:
        generating_s = self._generating.pop((event["traj"], event["attempt"]), 0.0)
        if event["data"]["purpose"] != "train" or event["data"]["status"] != "done":
            return
        task, seconds = event["task"], event["data"]["seconds"]
        parts = {
            "env_open": seconds["open"],
            "wait_for_engine": max(0.0, seconds["generate"] - generating_s),
            "generate": generating_s,
            "env_step": seconds["step"],
            "score": seconds["score"],
        }
        parts["other"] = max(0.0, seconds["total"] - sum(parts.values()))
        spent = self._spent.setdefault(task, dict.fromkeys(parts, 0.0))
        for phase, part_s in parts.items():
            spent[phase] += part_s
        self._done[task] = self._done.get(task, 0) + 1

    @property
    def window_s(self) -> float:
        return self._window.end_s - self._window.start_s if self._window else 0.0

    @property
    def trainer_idle(self) -> float | None:
        """Share of the window in which the trainer neither trained nor published."""
        window = self._window
        if window is None or self.window_s <= 0:
            return None
        return max(0.0, 1 - self._work.within(window.start_s, window.end_s) / self.window_s)

    @property
    def engine_idle(self) -> float | None:
        """Share of engine time in the window without a live request."""
        return self._window.engines.idle_share if self._window else None

    def result(self) -> dict[str, Any]:
        """Seconds: of the trainer in the window; of all engines in the window; per trajectory, by task."""
        trajectories = {
            task: {phase: seconds / self._done[task] for phase, seconds in spent.items()}
            for task, spent in self._spent.items()
        }
        window = self._window
        if window is None:
            return {"window_s": 0.0, "trainer": {}, "engines": {}, "trajectory": trajectories}
        start, end = window.start_s, window.end_s
        train, work, claimed = (busy.within(start, end) for busy in (self._train, self._work, self._claimed))
        engines = window.engines
        return {
            "window_s": end - start,
            "trainer": {
                "train": train,
                "publish": work - train,
                "wait_for_batch": claimed - work,
                "other": max(0.0, end - start - claimed),
            },
            "engines": {
                "generate": max(0.0, engines.seen_s - engines.idle_s - window.exposed_s),
                "stopped_by_apply": window.exposed_s,
                "no_request": engines.idle_s,
            },
            "trajectory": trajectories,
        }
