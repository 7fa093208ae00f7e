"""Every metric's name, once: `<area>/<task|all>/<name>/<stat>`, with unit and meaning.

Invariant: the fold can emit nothing that is not in this table, and `docs/metrics.md` is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["both", "task", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One quantity and the statistics of it that are written. A name in braces stands for any name of that kind."""

    area: str
    name: str
    stats: tuple[str, ...]
    unit: str
    meaning: str
    scope: Scope = "both"


def _metrics(area: str, *rows: tuple[str, str, str, str] | tuple[str, str, str, str, Scope]) -> tuple[Metric, ...]:
    return tuple(
        Metric(
            area=area, name=row[0], stats=tuple(row[1].split()), unit=row[2], meaning=row[3], scope=(*row, "both")[4]
        )
        for row in rows
    )


METRICS: tuple[Metric, ...] = (
    *_metrics(
        "reward",
        ("trained", "mean std min max", "reward", "of the trajectories trained in this step"),
        ("finished", "mean", "reward", "of all scored training trajectories that ended since the row before"),
    ),
    *_metrics(
        "success",
        (
            "trained",
            "mean",
            "share",
            "trajectories trained in this step with a reward of at least the task's `success_at`",
        ),
        ("finished", "mean", "share", "the same over all scored training trajectories that ended since the row before"),
    ),
    *_metrics(
        "rollout",
        ("trajectories", "count", "trajectories", "trained in this step"),
        ("response_tokens", "mean max", "tokens", "sampled by the policy in a trajectory trained in this step"),
        ("context_tokens", "mean max", "tokens", "of a trained trajectory with what its environment wrote"),
        ("turns", "mean max", "turns", "of a trained trajectory"),
        ("bad_actions", "mean", "actions", "that the environment could not read, in a trained trajectory"),
        ("spans", "mean max", "versions", "runs of tokens of one version in a trained trajectory"),
    ),
    *_metrics(
        "staleness",
        (
            "oldest",
            "mean max",
            "versions",
            "trainer's version minus that of a trained trajectory's oldest sampled token",
        ),
        ("newest", "mean max", "versions", "trainer's version minus that of its newest sampled token"),
    ),
    *_metrics(
        "groups",
        ("trained", "count", "groups", "trained in this step"),
        ("size", "mean min", "trajectories", "scored members of a trained group"),
        ("zero_variance", "mean", "share", "trained groups whose rewards are all equal: their advantages are 0"),
        ("dropped_{reason}", "count", "groups", "given up since the row before"),
    ),
    *_metrics(
        "mix",
        ("trained", "value", "share", "of all trajectories trained so far", "task"),
        ("wanted", "value", "share", "of what is trained, as configured", "task"),
    ),
    *_metrics(
        "env", ("{metric}", "mean", "as given", "every number that the environment returned, over trained trajectories")
    ),
    *_metrics(
        "drop",
        ("trajectories_{reason}", "count", "trajectories", "that will not be trained, since the row before"),
        ("tokens_{reason}", "sum", "tokens", "sampled and dropped since the row before", "all"),
    ),
    *_metrics(
        "failures",
        ("{boundary}_{kind}", "count", "attempts", "that failed since the row before; none is a reward of 0"),
        ("decided_{decision}", "count", "attempts", "what was done about a failure since the row before"),
    ),
    *_metrics(
        "throughput",
        ("trajectories", "per_s", "1/s", "trained in this step, per second since the row before"),
        ("sampled_tokens", "per_s", "1/s", "sampled for training since the row before, per second"),
        ("trained_tokens", "per_s", "1/s", "in the loss of this step, per second since the row before", "all"),
    ),
    *_metrics(
        "time",
        ("turn", "mean max", "s", "from sending a turn to an engine to its answer"),
        ("env_step", "mean max", "s", "an environment's reply to an action"),
        ("env_open", "mean max", "s", "opening and resetting the environment of an attempt that ended done"),
        ("score", "mean max", "s", "scoring a trajectory"),
        ("trajectory", "mean max", "s", "the whole life of an attempt that ended done"),
        ("wait_for_batch", "sum", "s", "trainer waiting for enough trajectories (long: rollout-bound)", "all"),
        ("train_step", "sum", "s", "this step, from its first sample to the changed weights", "all"),
        ("publish", "sum", "s", "offering a version", "all"),
        ("prefetch", "mean max", "s", "an engine fetching a version while it serves", "all"),
        ("apply", "mean max", "s", "an engine changing to a version", "all"),
        ("exposed", "sum", "s", "engines standing still with live requests because of an apply", "all"),
        ("loop_lag", "max", "s", "the control loop waking late, at worst since the row before", "all"),
        ("loop_lag_p99", "max", "s", "the same at the 99th percentile, in the worst ten seconds of them", "all"),
        ("row", "value", "s", "since the row before", "all"),
        ("elapsed", "value", "s", "since the run began", "all"),
    ),
    *_metrics(
        "engine",
        ("live", "mean", "requests", "live on an engine, averaged over time and engines", "all"),
        ("idle", "mean", "share", "of engine time without a live request", "all"),
        ("sticky", "mean", "share", "of turns that went to the engine of the turn before", "all"),
        ("prefilled_tokens", "sum", "tokens", "of prompts, computed for the first time", "all"),
        (
            "rebuilt_tokens",
            "sum",
            "tokens",
            "computed again because new weights or a preemption dropped their cache",
            "all",
        ),
        ("apply_mismatch", "count", "applies", "after which an engine did not serve the published fingerprint", "all"),
    ),
    *_metrics(
        "trainer",
        (
            "{metric}",
            "value",
            "as given",
            "every number of the trainer for this step (loss, grad_norm, lr, entropy, ..)",
        ),
        ("not_finite", "count", "metrics", "trainer metrics of this step that are NaN or infinite", "all"),
    ),
    *_metrics(
        "ledger",
        (
            "{term}",
            "value",
            "tokens",
            "sampled, trained, buffered, in_flight, eval, dropped_{reason}; since the run began",
            "all",
        ),
    ),
    *_metrics(
        "eval",
        (
            "success_{sampling}_{split}",
            "mean",
            "share",
            "successes of an evaluation (sampled or greedy; train or held_out)",
        ),
        ("reward_{sampling}_{split}", "mean", "reward", "of an evaluation"),
        ("episodes_{sampling}_{split}", "count", "episodes", "of an evaluation"),
        ("version", "value", "version", "that was evaluated; the row's step is the last one finished by then", "all"),
        ("complete", "value", "0 or 1", "whether every episode of the evaluation was scored", "all"),
    ),
    *_metrics(
        "baseline",
        ("success_{policy}", "mean", "share", "of random actions, and of the best constant answer", "task"),
        ("episodes_{policy}", "count", "episodes", "that the baseline rests on", "task"),
    ),
    *_metrics(
        "warm_start",
        ("steps", "value", "steps", "supervised, before the first rollout", "all"),
        ("tokens", "value", "tokens", "trained on; not in the ledger", "all"),
        ("loss", "value", "nats", "of the last supervised step", "all"),
        ("seconds", "value", "s", "that it took", "all"),
    ),
)

EXACT = {(metric.area, metric.name): metric for metric in METRICS if "{" not in metric.name}
OPEN: dict[str, tuple[Metric, ...]] = {}
for _metric in METRICS:
    if "{" in _metric.name:
        OPEN[_metric.area] = (*OPEN.get(_metric.area, ()), _metric)


def lookup(area: str, name: str) -> Metric | None:
    """The table's line for a name: itself, or the open name of its area with the longest fixed beginning that fits."""
    exact = EXACT.get((area, name))
    if exact is not None:
        return exact
    fitting = [metric for metric in OPEN.get(area, ()) if name.startswith(metric.name.split("{")[0])]
    return max(fitting, key=lambda metric: len(metric.name.split("{")[0]), default=None)


def documented(key: str) -> bool:
    """Whether `<area>/<scope>/<name>/<stat>` is in the table."""
    area, scope, name, stat = key.split("/")
    metric = lookup(area, name)
    if metric is None or stat not in metric.stats:
        return False
    return metric.scope == "both" or (metric.scope == "all") == (scope == "all")
