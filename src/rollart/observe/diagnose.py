"""Advice in plain words: what is starved, saturated, blocked or learning nothing.

Invariant: pure functions of metric rows and the summary, hence of events; each piece of advice says the figure that
it rests on and what to change. Source: field cases, "Seeing".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollart.core.errors import times
from rollart.observe.metric_rows import STEP, Row

Severity = Literal["bad", "warn", "note"]

RECENT = 10
"""Rows that "the last steps" means: enough to even out a batch, few enough to be about now."""
ZERO_VARIANCE = 0.5
"""Half of the groups teach nothing: the batch is in effect half as large."""
SOLVED, HOPELESS = 0.95, 0.05
"""Success beyond which equal rewards mean that a task is solved, or out of reach."""
MOST = 0.5
"""Beyond half of the window, something is what the time goes to, whatever else there is."""
WAITING = 0.3
"""A third of the window: more than the jitter of a balanced run, and worth a change of settings."""
STALE = 0.05
WASTE = 0.2
"""Shares of sampled tokens; redundancy on purpose stays below the second."""
GROWTH, MISMATCH_FLOOR = 3.0, 1e-3
"""Mismatch between engine and trainer is worth a word when it grew threefold and is not rounding (fp32: 1e-6)."""
SLOW_TASK = 3.0
FAILING = 0.05
BAD_ACTIONS = 0.2
EXPOSED = 0.1
"""Share of engine time that stands still for applies; they are meant to cost next to nothing."""
LAGGING_S = 0.25
"""How late the control loop may wake: the limit above which the run itself looks for the call that blocks it."""
COLLAPSED = 0.02
"""Entropy in nats per token below which a policy explores no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`code` is stable; `text` is for people."""

    code: str
    severity: Severity
    text: str


def diagnose(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[Advice]:
    """All advice for a run, the most severe first."""
    steps = [row for row in rows if "time/all/train_step/sum" in row]
    simulated = summary.get("figures") == "simulated"
    rules = [rule for rule in RULES if not (simulated and rule in OF_LEARNING)]
    found = [advice for rule in rules for advice in rule(steps, summary)]
    return sorted(found, key=lambda advice: ("bad", "warn", "note").index(advice.severity))


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return sum(values) / len(values) if values else None


def _tasks(summary: Mapping[str, Any]) -> list[str]:
    return list(summary["success"])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _weights(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    wrong = sum(row.get("engine/all/apply_mismatch/count", 0) for row in steps)
    if wrong:
        text = f"{wrong:.0f} applies left an engine with other weights than were published: it samples another policy."
        yield Advice(code="wrong_weights", severity="bad", text=text)
    frozen = [row[STEP] for row in steps if row.get("trainer/all/weights_changed/value") == 0]
    if frozen:
        text = f"The weights did not change in {len(frozen)} steps (first: step {frozen[0]:.0f}); check optimizer.lr."
        yield Advice(code="frozen_weights", severity="bad", text=text)
    broken = [row[STEP] for row in steps if row.get("trainer/all/not_finite/count")]
    if broken:
        text = (
            f"The trainer reported numbers that are not finite in {len(broken)} steps, first in step {broken[0]:.0f}."
        )
        yield Advice(code="not_finite", severity="bad", text=text)


def _ledger(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    tokens = summary["tokens"]
    if tokens is None or not tokens["sampled"]:
        return
    dropped = sum(tokens["dropped"].values())
    accounted = tokens["trained"] + dropped + tokens["buffered"] + tokens["in_flight"] + tokens["eval"]
    if accounted != tokens["sampled"]:
        text = (
            f"The token ledger does not close: {tokens['sampled']} tokens were sampled, {accounted} are accounted for."
        )
        yield Advice(code="ledger_open", severity="bad", text=text)
    stale = tokens["dropped"].get("stale", 0) / tokens["sampled"]
    if stale >= STALE:
        text = (
            f"{_percent(stale)} of the sampled tokens were dropped as stale (bound {summary['staleness']['bound']}). "
            "Raise schedule.max_staleness, or lower the batch or the number of groups that are open at once."
        )
        yield Advice(code="stale_drops", severity="warn", text=text)
    if dropped / tokens["sampled"] >= WASTE:
        most = max(tokens["dropped"], key=lambda reason: tokens["dropped"][reason])
        text = (
            f"{_percent(dropped / tokens['sampled'])} of the sampled tokens were never trained, most of them as {most}."
        )
        yield Advice(code="waste", severity="warn", text=text)


def _balance(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    window_s, trainer = summary["window_s"], summary["waits"]["trainer"]
    if not window_s:
        return
    waiting, away = trainer["wait_for_batch"] / window_s, trainer["other"] / window_s
    idle = summary["engine_idle_frac"] or 0.0
    if away >= MOST and idle >= WAITING:
        yield _trainer_away(away, idle, summary)
    elif waiting >= WAITING and idle >= WAITING:
        text = (
            f"Trainer and engines take turns: the trainer waited for batches {_percent(waiting)} of the time, engines had "
            f"no request {_percent(idle)} of it. A schedule.max_staleness above {summary['staleness']['bound']} lets them "
            "overlap."
        )
        yield Advice(code="no_overlap", severity="warn", text=text)
    elif waiting >= WAITING:
        text = (
            f"Rollout-bound: the trainer waited for batches {_percent(waiting)} of the time between first and last step. "
            "More engines or environments, or shorter trajectories, would speed the run up; a faster trainer would not."
        )
        yield Advice(code="rollout_bound", severity="note", text=text)
    elif idle >= WAITING:
        text = (
            f"Trainer-bound: engines had no request {_percent(idle)} of the time between first and last step. A faster "
            "trainer, or fewer engines, would pay; more engines would not."
        )
        yield Advice(code="trainer_bound", severity="note", text=text)
    engines = summary["waits"]["engines"]
    exposed = engines["stopped_by_apply"] / (sum(engines.values()) or 1.0)
    if exposed >= EXPOSED:
        text = (
            f"Engines stood still for weight applies {_percent(exposed)} of the time; look at apply and prefetch times."
        )
        yield Advice(code="exposed_sync", severity="warn", text=text)


def _trainer_away(away: float, idle: float, summary: Mapping[str, Any]) -> Advice:
    """Where steps are not what takes the time, nothing that makes them shorter helps."""
    lost = summary.get("interruptions", {}).get("trainer")
    went = f"checkpoints and recovery (it was lost {times(lost['count'])})" if lost else "checkpoints"
    pays = "trainers that are lost less often, or start and load sooner, or another checkpoint.every"
    if not lost:
        went += ", or to standing by until engines serve a version (schedule.sync_order=paper)"
        pays = "a larger checkpoint.every, faster storage, or schedule.sync_order=early"
    text = (
        f"Most of the trainer's time between first and last step ({_percent(away)}) went to {went}, and engines had no request "
        f"{_percent(idle)} of it. What would pay: {pays}; more engines would not."
    )
    return Advice(code="trainer_away", severity="warn", text=text)


def _slow_task(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    lives = {task: sum(parts.values()) for task, parts in summary["waits"]["trajectory"].items()}
    window_s = summary["window_s"]
    if len(lives) < 2 or not window_s or summary["waits"]["trainer"]["wait_for_batch"] / window_s < WAITING:
        return
    slow = max(lives, key=lambda task: lives[task])
    others = max(seconds for task, seconds in lives.items() if task != slow)
    if others > 0 and lives[slow] >= SLOW_TASK * others:
        phase = max(summary["waits"]["trajectory"][slow], key=lambda name: summary["waits"]["trajectory"][slow][name])
        text = (
            f"Batches wait for {slow}: a trajectory of it takes {lives[slow]:.2g} s, {lives[slow] / others:.1f} times that "
            f"of the next task, most of it in {phase.replace('_', ' ')}. The mix is kept, so its quota sets the pace."
        )
        yield Advice(code="slow_task", severity="note", text=text)


def _zero_variance(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    recent = steps[-RECENT:]
    for task in _tasks(summary):
        share = _mean(recent, f"groups/{task}/zero_variance/mean")
        success = _mean(recent, f"success/{task}/trained/mean")
        if share is None or success is None or share < ZERO_VARIANCE:
            continue
        opening = f"{_percent(share)} of {task}'s groups in the last {len(recent)} steps had equal rewards and taught nothing: "
        if success >= SOLVED:
            why = f"the task is solved (success {success:.2f}); stop, or give it harder instances or a smaller ratio."
            yield Advice(code="zero_variance", severity="note", text=opening + why)
        elif success <= HOPELESS:
            why = f"it hardly ever succeeds (success {success:.2f}); try a longer warm start, easier instances, larger groups."
            yield Advice(code="zero_variance", severity="warn", text=opening + why)
        else:
            why = f"instances are either solved or out of reach (success {success:.2f}); larger groups help."
            yield Advice(code="zero_variance", severity="warn", text=opening + why)


def _loop(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    lags = {row[STEP]: row["time/all/loop_lag/max"] for row in steps if "time/all/loop_lag/max" in row}
    late = {step: lag for step, lag in lags.items() if lag >= LAGGING_S}
    if late:
        worst = max(late, key=lambda step: late[step])
        text = (
            f"The control loop stood still for up to {late[worst]:.2g} s (before the end of step {worst:.0f}; "
            f"{len(late)} of {len(steps)} steps had more than {LAGGING_S} s): every engine and environment waited meanwhile. "
            "The loop_blocked advisories of the log name the call, or say that the machine gave the process no time."
        )
        yield Advice(code="loop_blocked", severity="warn", text=text)


def _policy(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    quarter = max(1, len(steps) // 4)
    for key in sorted({key for row in steps for key in row if key.startswith("trainer/") and "mismatch" in key}):
        first, last = _mean(steps[:quarter], key), _mean(steps[-quarter:], key)
        if first is None or last is None or len(steps) < 4 or last < MISMATCH_FLOOR or last < GROWTH * first:
            continue
        text = (
            f"The gap between engine and trainer grows: {key.split('/')[2]} went from {first:.2g} to {last:.2g}. Staleness "
            "counts in it; where that did not grow, compare precision on both sides. Keep algorithm.correction on."
        )
        yield Advice(code="mismatch_grows", severity="warn", text=text)
    recent = steps[-RECENT:]
    entropy, success = _mean(recent, "trainer/all/entropy/value"), _mean(recent, "success/all/trained/mean")
    if entropy is not None and success is not None and entropy < COLLAPSED and success < 0.5:
        text = (
            f"The policy explores no more (entropy {entropy:.2g} nats) while only {_percent(success)} succeed; lower "
            "optimizer.lr or raise algorithm.loss.eps_clip_high."
        )
        yield Advice(code="entropy_collapsed", severity="warn", text=text)


def _environments(steps: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Advice]:
    by = summary["trajectories_by"]
    failed = sum(by["failed"].values())
    ended = failed + by["trained"] + sum(by["dropped"].values())
    if failed and failed / ended >= FAILING:
        most = max(by["failed"], key=lambda kind: by["failed"][kind])
        text = (
            f"{_percent(failed / ended)} of the attempts failed, most often with {most} ({times(by['failed'][most])})."
        )
        yield Advice(code="failures", severity="warn", text=text)
    recent = steps[-RECENT:]
    for task in _tasks(summary):
        bad, turns = _mean(recent, f"rollout/{task}/bad_actions/mean"), _mean(recent, f"rollout/{task}/turns/mean")
        if bad is not None and turns and bad / turns >= BAD_ACTIONS:
            text = (
                f"{_percent(bad / turns)} of {task}'s actions in the last {len(recent)} steps could not be read by the "
                "environment; a longer warm start teaches the format."
            )
            yield Advice(code="bad_actions", severity="warn", text=text)


Rule = Callable[[Sequence[Row], Mapping[str, Any]], Iterator[Advice]]
RULES: tuple[Rule, ...] = (_weights, _ledger, _balance, _slow_task, _zero_variance, _policy, _loop, _environments)
OF_LEARNING: tuple[Rule, ...] = (_zero_variance, _policy)
"""A simulated trainer learns nothing, and a simulated reward is drawn."""
