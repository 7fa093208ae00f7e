"""The pure part of measurements beside peers: from times to rates, from rates to ratios, and the bounds printed beside them.

Invariant: a ratio is that of one interleaved pair, never of two medians; what a machine does to one side of a pair shortly
after the other it does to both. Every bound is computed from what was measured alone, under the same limits.
"""

from __future__ import annotations

import heapq
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

Event = Mapping[str, Any]
PACKAGES = ("rollart", "ray", "torch", "transformers", "numpy", "psutil")
"""What our side runs on."""


class Step(NamedTuple):
    """One trained batch, in seconds since the run began."""

    released_s: float
    finished_s: float
    trajectories: int


class Rate(NamedTuple):
    """What a side did after its warm-up."""

    steps: int
    step_s: float
    """Mean time from the end of one step to the end of the next."""
    per_s: float
    """Trained trajectories a second."""
    rollout_s: float
    """Median of a step's time until its batch was there: all of it where nothing overlaps."""
    train_s: float
    """Median of a step's time from then on: samples, training, publish."""

    def row(self) -> dict[str, float]:
        return {
            "trajectories_per_s": round(self.per_s, 3), "step_s": round(self.step_s, 5), "steps": self.steps,
            "rollout_s": round(self.rollout_s, 5), "train_s": round(self.train_s, 5),
        }  # fmt: skip


class Bounds(NamedTuple):
    """What one step can cost at best, from rollout alone (R) and training alone (T), each on one core."""

    rollout_s: float
    train_s: float

    @property
    def overlap(self) -> float:
        """Largest gain of overlapping the two over taking turns: (R + T) / max(R, T)."""
        return (self.rollout_s + self.train_s) / max(self.rollout_s, self.train_s)

    def row(self, theirs_step_s: float | None = None) -> dict[str, float]:
        """`theirs_step_s`: a peer's step, to bound the ratio to it as well."""
        found = {
            "rollout_alone_s": self.rollout_s, "train_alone_s": self.train_s,
            "overlap": self.overlap,
        }  # fmt: skip
        if theirs_step_s is not None:
            found["one_core_each"] = theirs_step_s / max(self.rollout_s, self.train_s)
            found["two_cores_balanced"] = 2 * theirs_step_s / (self.rollout_s + self.train_s)
        return {name: round(value, 4) for name, value in found.items()}


def steps_of(events: Iterable[Event]) -> list[Step]:
    """The finished steps of a run's log, in order. Its timestamps are those of one clock."""
    released: dict[int, tuple[float, int]] = {}
    steps: list[Step] = []
    for event in events:
        if event["kind"] == "batch_released":
            released[event["step"]] = (event["t"], event["data"]["trajectories"])
        elif event["kind"] == "step_finished":
            at, trajectories = released[event["step"]]
            steps.append(Step(at, event["t"], trajectories))
    return steps


def warm_up_steps(max_staleness: int) -> int:
    """Steps that are not measured: what was sampled ahead, while the first step was slow, is trained in the first
    `max_staleness` + 1 of them."""
    return max_staleness + 2


def least_steps(max_staleness: int) -> int:
    """Of a measurement: what may be in flight at its ends is at most a tenth of what is trained between them."""
    return 10 * (max_staleness + 1)


def sampled_over_trained(events: Sequence[Event], warm_up: int) -> float:
    """Tokens of the trajectories that finished between the ends of the measurement over those of the batches trained
    between them: 1 where a rate is that of both. Below 1, what was sampled ahead of the measurement is trained in it.

    The measurement goes from the end of the last warm-up step to the end of the last step. Raises ValueError when no step
    is left."""
    ended = [event for event in events if event["kind"] == "step_finished"]
    if warm_up < 1 or len(ended) <= warm_up:
        raise ValueError(
            f"{len(ended)} steps, of which {warm_up} are warm-up, leave nothing to measure; run for longer"
        )
    began_s, ended_s = ended[warm_up - 1]["t"], ended[-1]["t"]
    trained = {event["step"] for event in ended[warm_up:]}
    tokens = sum(
        event["data"]["tokens"] for event in events if event["kind"] == "batch_released" and event["step"] in trained
    )
    sampled = sum(
        event["data"]["sampled"] for event in events
        if event["kind"] == "traj_finished" and event["data"]["purpose"] == "train" and began_s < event["t"] <= ended_s
    )  # fmt: skip
    return float(sampled / tokens)


def rate(steps: Sequence[Step], warm_up: int) -> Rate:
    """From the end of the last warm-up step on. Raises ValueError when no step is left."""
    if warm_up < 1 or len(steps) <= warm_up:
        raise ValueError(
            f"{len(steps)} steps, of which {warm_up} are warm-up, leave nothing to measure; run for longer"
        )
    before, measured = steps[warm_up - 1 : -1], steps[warm_up:]
    seconds = measured[-1].finished_s - before[0].finished_s
    return Rate(
        steps=len(measured),
        step_s=seconds / len(measured),
        per_s=sum(step.trajectories for step in measured) / seconds,
        rollout_s=statistics.median(
            max(0.0, step.released_s - last.finished_s) for last, step in zip(before, measured, strict=True)
        ),
        train_s=statistics.median(
            step.finished_s - max(step.released_s, last.finished_s) for last, step in zip(before, measured, strict=True)
        ),
    )


def median_rate(rates: Sequence[Rate]) -> Rate:
    """The one with the median throughput; of two in the middle, the slower one."""
    return sorted(rates, key=lambda one: one.per_s)[(len(rates) - 1) // 2]


def fastest(rates: Mapping[str, Rate]) -> str:
    """The setting of a sweep that trains most."""
    return max(rates, key=lambda name: rates[name].per_s)


# --- rollout only --------------------------------------------------------------------------------------------------------


def per_turn_s(latencies: Sequence[Sequence[float]], environments: int, turn_s: float) -> float:
    """Least time for all rows (one trajectory each: its latency turn by turn) when each turn waits for the slowest of a
    batch of `environments` rows, and generating a turn takes `turn_s`."""
    return sum(
        sum(max(turn) + turn_s for turn in zip(*batch, strict=True)) for batch in _batches(latencies, environments)
    )


def per_batch_s(latencies: Sequence[Sequence[float]], environments: int, turn_s: float) -> float:
    """The same when only the batch waits for its slowest trajectory."""
    return sum(max(_alone(row, turn_s) for row in batch) for batch in _batches(latencies, environments))


def per_trajectory_s(latencies: Sequence[Sequence[float]], environments: int, turn_s: float) -> float:
    """The same when an environment that is free takes the next trajectory at once."""
    free = [0.0] * environments
    heapq.heapify(free)
    for row in latencies:
        heapq.heapreplace(free, free[0] + _alone(row, turn_s))
    return max(free)


def _alone(row: Sequence[float], turn_s: float) -> float:
    return sum(row) + turn_s * len(row)


def _batches(rows: Sequence[Sequence[float]], size: int) -> list[Sequence[Sequence[float]]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# --- cases ---------------------------------------------------------------------------------------------------------------


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of the pairs' ratios."""
    return {
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def case(name: str, ratios: Sequence[float], *, target: float | None, **sides: object) -> dict[str, Any]:
    """One case of a benchmark's JSON. `sides`: figures of ours, theirs and further arms, bounds, versions."""
    found = spread(ratios)
    return {
        "case": name, **found, "pairs": len(ratios), "target": target,
        "met": None if target is None else found["ratio_median"] >= target, **sides,
    }  # fmt: skip


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of Python and these packages, in this environment."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
