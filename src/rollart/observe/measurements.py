"""From a run's folder to the laws of the run and of its machine: `rollart calibrate`.

Owns the fits. Invariants: only recorded facts go in (the event log, the kept trajectories, the configuration); a part of a
cost that the record cannot tell from another keeps the proportion of what such calls usually cost (`USUAL`), so that the
total is that of the record; a record that lacks what is needed is refused with what to do.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollart.config.load import load_file
from rollart.core.errors import ConfigError
from rollart.observe.jsonl import read_rows
from rollart.observe.log import EventLog
from rollart.perf.measured import (
    WOKEN_CALLS,
    Calibrated,
    ControlLaw,
    EngineLaw,
    Fit,
    HostLaw,
    Origin,
    Played,
    TaskLaw,
    TrainerLaw,
    WeightsLaw,
)

Event = Mapping[str, Any]
Floats = NDArray[np.float64]

WARM_STEPS = 2
"""First steps that are left out: processes fill their caches and compile what they need."""
LEAST_STEPS, LEAST_WINDOWS = 6, 8
"""Below these there is more chance than law in a record."""
MOST_PLAYED = 512
"""Examples of a task that are kept, evenly over the run."""
QUANTILES = 64
OPEN_CALLS = 2
"""Opening a session and resetting it."""
TICK_S = 0.01
"""In which the system counts the CPU time of other processes."""
NOISE = 0.05
"""Of a window's CPU time, beside the tick."""
DOUBT = 0.7
"""How far, relative to what is usual, a cost is let go before the record must insist."""

USUAL: Mapping[str, tuple[float, ...]] = {
    # engine: step, row, token, context; its shape only, the record decides all four
    "step": (2e-3, 2e-5, 4e-5, 5e-8),
    # waking a process is most of a message; the last: the loop's own turn between two steps
    "engine": (1.5e-4, 2e-4, 6e-5, 3e-4),
    "env": (1.5e-4, 1.5e-4, 1e-4),
    "control": (1.5e-4, 1.5e-4, 2e-4, 4e-4, 1e-2, 2e-2),
    # a micro-batch costs what 180 tokens do, the rest of a step (the optimiser, the digest of the weights) as much, and so do
    # the calls by which a batch comes
    "trainer": (360.0, 180.0, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened between two records of usage."""

    begin_s: float
    seconds: float
    cpu_s: Mapping[str, float]
    submits: Mapping[str, float]
    answers: Mapping[str, float]
    work: tuple[float, ...]
    """Of all engines: steps, rows, tokens, context, CPU seconds of steps."""
    seen: Mapping[str, int]
    """Events by kind."""


@dataclass(slots=True)
class _Facts:
    """What one pass over the log keeps."""

    machine: Mapping[str, Any] = field(default_factory=dict)
    usage: list[Event] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=lambda: [{}])
    """Events by kind before each record of usage and after the one before; the last one is open."""
    steps: list[Event] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    latency_s: dict[str, list[float]] = field(default_factory=dict)
    """By task: a step of its environment, as control saw it."""
    tasks: dict[str, str] = field(default_factory=dict)


COUNTED = frozenset(
    {"turn_done", "env_opened", "env_stepped", "traj_finished", "step_finished", "published", "applied"}
)
TIMED = frozenset({"published", "prefetched", "applied", "env_opened"})


def calibrate(run_dir: Path) -> Calibrated:
    """The laws of a recorded run. Raises ConfigError or StoreError when there is no such run or it cannot tell them."""
    log = EventLog(run_dir / "events.jsonl")
    config = load_file(run_dir / "config.yaml").config
    facts = _read(log.events())
    if log.header["world"] not in ("local", "cluster"):
        raise ConfigError(
            f"{run_dir} is a run of the {log.header['world']} world, which has no workers of its own to measure; calibrate "
            "on a run with world.kind=local"
        )
    begin_s, end_s = _steady(facts)
    windows = [one for one in _windows(facts) if begin_s <= one.begin_s and one.begin_s + one.seconds <= end_s]
    _enough(run_dir, facts, windows)
    weights = _weights(facts)
    engine, trainer = _engine(facts, windows, weights), _trainer(facts, windows, weights)
    tasks = _tasks(run_dir, facts, tuple(config.tasks))
    total_s = sum(window.seconds for window in windows)
    return Calibrated(
        origin=Origin(
            run=str(log.header["run"]), git=str(log.header["git"]), engine=config.engine.kind,
            versions={name: str(one) for name, one in facts.machine["versions"].items()},
            cpu=str(facts.machine["cpu"]), cores=int(facts.machine["cores"]), steps=len(facts.steps),
            others=_round(sum(window.cpu_s.get("others", 0.0) for window in windows) / total_s),
        ),
        engine=engine, trainer=trainer, weights=weights, host=_host(windows, _waiting(facts, tasks)),
        control=_control(windows), tasks=tasks,
        ray=_round(sum(window.cpu_s.get("ray", 0.0) for window in windows) / total_s),
        step_s=_round(step_period_s(facts.steps)),
    )  # fmt: skip


def step_period_s(steps: Sequence[Event]) -> float:
    """Mean time between the ends of two steps, the first ones left out."""
    ends: list[float] = [event["t"] for event in steps[WARM_STEPS - 1 :]]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


# --- reading -------------------------------------------------------------------------------------------------------------


def _read(events: Iterable[Event]) -> _Facts:
    facts = _Facts()
    for event in events:
        kind = event["kind"]
        if kind in COUNTED:
            facts.counts[-1][kind] = facts.counts[-1].get(kind, 0) + 1
        if kind in TIMED:
            facts.seconds.setdefault(kind, []).append(event["data"]["seconds"])
        if kind == "usage":
            facts.usage.append(event)
            facts.counts.append({})
        elif kind == "machine":
            facts.machine = event["data"]
        elif kind == "step_finished":
            facts.steps.append(event)
        elif kind == "traj_started":
            facts.tasks[event["traj"]] = event["task"]
        elif kind == "env_stepped":
            facts.latency_s.setdefault(facts.tasks[event["traj"]], []).append(event["data"]["seconds"])
    return facts


def _windows(facts: _Facts) -> Iterator[Window]:
    for (before, after), seen in zip(itertools.pairwise(facts.usage), facts.counts[1:], strict=False):
        old, new = before["data"], after["data"]
        traffic = {role: (old["traffic"].get(role, (0, 0)), pair) for role, pair in new["traffic"].items()}
        work = [_less(sums, old["work"].get(engine, ())) for engine, sums in new["work"].items() if sums]
        yield Window(
            begin_s=before["t"], seconds=after["t"] - before["t"], seen=seen,
            cpu_s={role: max(0.0, s - old["cpu_s"].get(role, 0.0)) for role, s in new["cpu_s"].items()},
            submits={role: pair[0] - was[0] for role, (was, pair) in traffic.items()},
            answers={role: pair[1] - was[1] for role, (was, pair) in traffic.items()},
            work=tuple(float(sum(column)) for column in zip(*work, strict=True)) or (0.0,) * 5,
        )  # fmt: skip


def _less(new: Sequence[float], old: Sequence[float]) -> list[float]:
    return [one - (old[index] if index < len(old) else 0.0) for index, one in enumerate(new)]


def _steady(facts: _Facts) -> tuple[float, float]:
    """From when to when the record counts: while steps follow one another."""
    if len(facts.steps) < WARM_STEPS:
        return 0.0, 0.0
    return float(facts.steps[WARM_STEPS - 1]["t"]), float(facts.steps[-1]["t"])


def _enough(run_dir: Path, facts: _Facts, windows: Sequence[Window]) -> None:
    if not facts.machine:
        raise ConfigError(
            f"{run_dir} has no record of what its processes used (no event `machine`): it is of an earlier version, or its "
            "system has no /proc; make a new run"
        )
    if len(facts.steps) < LEAST_STEPS or len(windows) < LEAST_WINDOWS:
        raise ConfigError(
            f"{run_dir} has {len(facts.steps)} steps and {len(windows)} s after the first {WARM_STEPS} of them; use a run with "
            f"{LEAST_STEPS} steps and {LEAST_WINDOWS + 1} s of them or more"
        )
    if not all("computed_tokens" in step["data"]["metrics"] for step in facts.steps):
        raise ConfigError(
            f"{run_dir}: its trainer does not say what it computed (no metric `computed_tokens`): it is of an earlier version; "
            "make a new run"
        )
    if not any(window.work[0] for window in windows):
        raise ConfigError(f"{run_dir}: its engines do not say what they compute; use a run with engine.kind=native")


# --- fits ----------------------------------------------------------------------------------------------------------------


def fitted(features: Floats, target: Floats, usual: Sequence[float]) -> tuple[tuple[float, ...], Fit]:
    """Non-negative coefficients so that features @ coefficients is near `target`, near what is usual where that is open.

    `features` (windows, n), `target` (windows,). What is usual gives proportions: it is scaled to the target's total first.
    """
    rough = np.asarray(usual, np.float64)
    scale = float(target.sum() / max(1e-12, (features @ rough).sum()))
    rough = rough * max(scale, 1e-9)
    sigma = TICK_S + NOISE * target
    doubt = DOUBT * rough
    stacked = np.vstack([features / sigma[:, None], np.diag(1.0 / doubt)])
    wanted = np.concatenate([target / sigma, rough / doubt])
    free = np.ones(len(rough), np.bool_)
    found = np.zeros(len(rough))
    while free.any():
        found[:] = 0.0
        found[free] = np.linalg.lstsq(stacked[:, free], wanted, rcond=None)[0]
        if (found[free] >= 0).all():
            break
        free &= found >= 0
    guess = features @ found
    some = target > TICK_S
    error = float(np.median(np.abs(guess[some] / target[some] - 1.0))) if some.any() else 0.0
    return tuple(_round(one) for one in found), Fit(windows=len(target), error=_round(error))


def _rows(*columns: Iterable[float]) -> Floats:
    return np.array([list(column) for column in columns], np.float64).T


def _engine(facts: _Facts, windows: Sequence[Window], weights: WeightsLaw) -> EngineLaw:
    work = np.array([window.work for window in windows], np.float64)
    (step_s, row_s, token_s, context_s), fit = fitted(work[:, :4], work[:, 4], USUAL["step"])
    new_s = weights.prefetch_s + weights.apply_s
    rest = [window.cpu_s.get("engine", 0.0) - new_s * window.seen.get("applied", 0) for window in windows] - work[:, 4]
    traffic = _rows(
        (window.submits["engine"] for window in windows), (window.answers["engine"] for window in windows),
        (window.seen.get("turn_done", 0) for window in windows), (window.work[0] for window in windows),
    )  # fmt: skip
    (batch_s, answer_s, turn_s, loop_s), _ = fitted(traffic, np.maximum(rest, 0.0), USUAL["engine"])
    return EngineLaw(
        step_s=step_s + loop_s, row_s=row_s, token_s=token_s, context_s=context_s, batch_s=batch_s,
        answer_s=answer_s, turn_s=turn_s, fit=fit,
    )  # fmt: skip


def _host(windows: Sequence[Window], waiting: float) -> HostLaw:
    """`waiting`: share of the steps of environments that wait for something."""
    traffic = _rows(
        (window.submits["env"] for window in windows), (window.answers["env"] for window in windows),
        (_calls(window.seen, waiting) for window in windows),
    )  # fmt: skip
    target = np.array([window.cpu_s.get("env", 0.0) for window in windows])
    (batch_s, answer_s, call_s), fit = fitted(traffic, target, USUAL["env"])
    return HostLaw(batch_s=batch_s, answer_s=answer_s, call_s=call_s, fit=fit)


def _calls(seen: Mapping[str, int], waiting: float) -> float:
    stepped = (1.0 + WOKEN_CALLS * waiting) * seen.get("env_stepped", 0)
    return OPEN_CALLS * seen.get("env_opened", 0) + stepped + seen.get("traj_finished", 0)


def _waiting(facts: _Facts, tasks: Mapping[str, TaskLaw]) -> float:
    steps = {name: len(seconds) for name, seconds in facts.latency_s.items()}
    waited = sum(steps.get(name, 0) for name, law in tasks.items() if law.step_latency_s)
    return waited / max(1, sum(steps.values()))


def _control(windows: Sequence[Window]) -> ControlLaw:
    used = _rows(
        (sum(window.submits.values()) for window in windows), (sum(window.answers.values()) for window in windows),
        *([window.seen.get(kind, 0) for window in windows] for kind in ("turn_done", "traj_finished", "step_finished")),
        (window.seconds for window in windows),
    )  # fmt: skip
    target = np.array([window.cpu_s["control"] for window in windows])
    (batch_s, answer_s, turn_s, trajectory_s, step_s, idle), fit = fitted(used, target, USUAL["control"])
    return ControlLaw(
        batch_s=batch_s, answer_s=answer_s, turn_s=turn_s, trajectory_s=trajectory_s, step_s=step_s, idle=idle, fit=fit
    )  # fmt: skip


def _trainer(facts: _Facts, windows: Sequence[Window], weights: WeightsLaw) -> TrainerLaw:
    """The shape from the steps' durations, the level from the CPU time of all of them."""
    steps = facts.steps[WARM_STEPS:]
    metrics = [step["data"]["metrics"] for step in steps]
    parts = _rows(
        (1.0 for _ in steps), (one["micro_batches"] for one in metrics), (one["computed_tokens"] for one in metrics)
    )
    shape, fit = fitted(parts, np.array([step["data"]["seconds"] for step in steps]), USUAL["trainer"])
    # steps do not end where windows do: what is used over the whole record belongs to that many steps
    cpu_s = sum(window.cpu_s.get("trainer", 0.0) for window in windows)
    whole_s = sum(window.seconds for window in windows)
    per_step_s = cpu_s * (steps[-1]["t"] - facts.steps[WARM_STEPS - 1]["t"]) / whole_s / len(steps)
    level = (per_step_s - weights.publish_s) / float((parts @ np.array(shape)).mean())
    step_s, pass_s, token_s = (_round(level * one) for one in shape)
    return TrainerLaw(step_s=step_s, pass_s=pass_s, token_s=token_s, fit=fit)


def _weights(facts: _Facts) -> WeightsLaw:
    """Durations of the quicker half: what they take while nobody is in the way."""
    quick = {kind: float(np.quantile(facts.seconds.get(kind) or [0.0], 0.25)) for kind in TIMED}
    return WeightsLaw(
        publish_s=_round(quick["published"]), prefetch_s=_round(quick["prefetched"]), apply_s=_round(quick["applied"])
    )


# --- tasks ---------------------------------------------------------------------------------------------------------------


def _tasks(run_dir: Path, facts: _Facts, names: Sequence[str]) -> dict[str, TaskLaw]:
    played: dict[str, list[Played]] = {name: [] for name in names}
    for found in read_rows(run_dir / "trajectories.jsonl"):
        if found.get("status") == "done" and found["purpose"] == "train" and found["segments"] == 1:
            played[found["task"]].append(_played(found))
    usual_s = statistics.median(facts.seconds.get("env_opened") or [0.0])
    for name, ones in played.items():
        if not ones:
            raise ConfigError(f"{run_dir} has no finished trajectory of the task {name!r}; use a longer run")
    return {
        name: TaskLaw(played=tuple(_spread(ones)), step_latency_s=_latency(facts.latency_s.get(name, ()), usual_s))
        for name, ones in played.items()
    }


def _played(found: Mapping[str, Any]) -> Played:
    runs = [(bool(own), len(list(tokens))) for own, tokens in itertools.groupby(found["loss_mask"])]
    prompt = runs.pop(0)[1] if runs and not runs[0][0] else 0
    sampled = tuple(n for own, n in runs if own)
    observed = [n for own, n in runs if not own]
    return Played(
        reward=float(found["reward"] or 0.0), prompt=prompt, sampled=sampled,
        observed=tuple(observed + [0] * (len(sampled) - len(observed))),
    )  # fmt: skip


def _spread(played: Sequence[Played]) -> Sequence[Played]:
    """At most MOST_PLAYED of them, evenly over the run."""
    return played if len(played) <= MOST_PLAYED else played[:: -(-len(played) // MOST_PLAYED)]


def _latency(seconds: Sequence[float], usual_s: float) -> tuple[float, ...]:
    """What steps wait beyond what a call takes that has nothing to wait for."""
    if not seconds or statistics.median(seconds) < 2.0 * usual_s + TICK_S:
        return ()
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return tuple(_round(max(0.0, float(one) - usual_s)) for one in np.quantile(seconds, places))


def _round(value: float) -> float:
    """Six digits: no record says more, and files stay readable."""
    return float(f"{value:.6g}")
