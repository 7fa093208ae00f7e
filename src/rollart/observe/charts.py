"""The report's curves: which metric rows become which chart, with unit, range and a line for what was promised.

Invariant: a chart shows rows of `metrics.jsonl` as they are; where there are more steps than points, each point is the
mean of equally many steps, and the chart says how many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.observe.metric_rows import STEP, Row

MAX_POINTS = 400
"""About one per pixel of a chart: more cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`key` holds `{task}` for one line per task; `lines` adds named lines that are not of a task."""

    title: str
    unit: str
    key: str | None = None
    lines: tuple[tuple[str, str], ...] = ()
    low: float | None = 0.0
    high: float | None = None
    learning: bool = False
    """About what is learned: a simulated trainer learns nothing and a simulated reward is drawn."""


CHARTS = (
    Chart(title="Reward", unit="per trained trajectory", key="reward/{task}/trained/mean", low=None, learning=True),
    Chart(
        title="Success",
        unit="share of trained trajectories",
        key="success/{task}/trained/mean",
        high=1.0,
        learning=True,
    ),
    Chart(
        title="Staleness",
        unit="versions",
        key="staleness/{task}/oldest/mean",
        lines=(("largest", "staleness/all/oldest/max"),),
    ),
    Chart(
        title="Entropy",
        unit="nats per token",
        key="trainer/{task}/entropy/value",
        lines=(("all tasks", "trainer/all/entropy/value"),),
        learning=True,
    ),
    Chart(
        title="Throughput",
        unit="trained trajectories per second",
        key="throughput/{task}/trajectories/per_s",
        lines=(("all tasks", "throughput/all/trajectories/per_s"),),
    ),
    Chart(
        title="Time of a step",
        unit="seconds",
        lines=(("wait for batch", "time/all/wait_for_batch/sum"), ("train", "time/all/train_step/sum")),
    ),
    Chart(title="Response length", unit="sampled tokens per trajectory", key="rollout/{task}/response_tokens/mean"),
    Chart(title="Turns", unit="per trajectory", key="rollout/{task}/turns/mean"),
    Chart(title="Unreadable actions", unit="per trajectory", key="rollout/{task}/bad_actions/mean", learning=True),
    Chart(
        title="Equal-reward groups",
        unit="share; they teach nothing",
        key="groups/{task}/zero_variance/mean",
        high=1.0,
        learning=True,
    ),
    Chart(title="Loss", unit="policy loss", lines=(("loss", "trainer/all/loss/value"),), low=None, learning=True),
    Chart(
        title="Gradient norm",
        unit="before clipping",
        lines=(("grad norm", "trainer/all/grad_norm/value"),),
        learning=True,
    ),
    Chart(
        title="Engine against trainer",
        unit="mean gap of log-probabilities, staleness counts",
        lines=(("mean", "trainer/all/mismatch_abs_mean/value"),),
        learning=True,
    ),
    Chart(title="Live requests", unit="per engine, mean over time", lines=(("live", "engine/all/live/mean"),)),
)


def env_charts(steps: Sequence[Row], tasks: Sequence[str]) -> list[Chart]:
    """One chart for each number that environments returned, with a line per task that has it."""
    names: dict[str, None] = {}
    for row in steps:
        for key in row:
            area, _, rest = key.partition("/")
            scope, _, name = rest.removesuffix("/mean").partition("/")
            if area == "env" and scope in tasks:
                names.setdefault(name)
    return [
        Chart(
            title=f"Environment: {name}", unit="mean over trained trajectories", low=None,
            key="env/{task}/" + name.replace("{", "{{").replace("}", "}}") + "/mean",
        )
        for name in sorted(names)
    ]  # fmt: skip


def charts_of(
    rows: Sequence[Row], tasks: Sequence[str], started: Mapping[str, Any], *, learns: bool = True
) -> list[dict[str, Any]]:
    """Charts with at least one line that has numbers. Values are rounded to what a screen can show.

    `learns`: false leaves out what says nothing of a simulated run.
    """
    steps = [row for row in rows if "time/all/train_step/sum" in row]
    stride = -(-len(steps) // MAX_POINTS) or 1
    buckets = [steps[at : at + stride] for at in range(0, len(steps), stride)]
    x = [bucket[-1][STEP] for bucket in buckets]
    made = []
    for chart in (*(one for one in CHARTS if learns or not one.learning), *env_charts(steps, tasks)):
        named = [(task, chart.key.format(task=task), index) for index, task in enumerate(tasks)] if chart.key else []
        named += [(name, key, -1 - at) for at, (name, key) in enumerate(chart.lines)]
        drawn = [(name, index, [_mean(bucket, key) for bucket in buckets]) for name, key, index in named]
        lines = [
            {"name": name, "task": index, "values": values}
            for name, index, values in drawn
            if any(value is not None for value in values)
        ]
        if lines:
            made.append(
                {
                    "title": chart.title,
                    "unit": chart.unit,
                    "x": x,
                    "lines": lines,
                    "low": chart.low,
                    "high": chart.high,
                    "stride": stride,
                    "bound": started.get("max_staleness") if chart.title == "Staleness" else None,
                    "points": _evaluations(rows, tasks) if chart.title == "Success" else [],
                }
            )
    return made


def _mean(bucket: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in bucket if key in row]
    return float(f"{sum(values) / len(values):.5g}") if values else None


def _evaluations(rows: Sequence[Row], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Sampled evaluations, on held-back instances where there are any, as points on the success chart."""
    points = []
    for row in rows:
        for index, task in enumerate(tasks):
            for split in ("held_out", "train"):
                success = row.get(f"eval/{task}/success_sampled_{split}/mean")
                if success is not None:
                    points.append({"x": row[STEP], "y": success, "task": index, "split": split.replace("_", " ")})
                    break
    return points
