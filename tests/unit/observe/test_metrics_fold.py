"""Rows against figures worked out by hand, names against the table, and a live fold against one from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import TASKS, synthetic

from rollart.core.events import Recorder
from rollart.observe.jsonl import read_rows
from rollart.observe.log import read_events
from rollart.observe.metric_docs import table
from rollart.observe.metric_names import METRICS, documented, lookup
from rollart.observe.metric_rows import STEP, Row
from rollart.observe.metrics import MetricsFold, MetricsWriter, rows_of

ROOT = Path(__file__).parents[3]
SECONDS = {"open": 0.5, "generate": 1.0, "step": 0.25, "score": 0.125, "total": 2.0}


class Script:
    """Events by hand at times by hand."""

    def __init__(self) -> None:
        self.t = 0.0
        self.events: list[dict[str, Any]] = []
        self._record = Recorder((lambda event: self.events.append(dict(event)),), lambda: self.t, origin=0.0)
        self.at(
            0, "run_started", recipe="r", steps=2, batch=4, group_size=2, max_staleness=1, sync_order="early",
            mix={"a": 3.0, "b": 1.0}, success_at={"a": 1.0, "b": 5.0},
        )  # fmt: skip
        self.at(0, "engine_joined", engine="e", pool="p", version=0)

    def at(self, t: float, kind: str, **fields: Any) -> None:
        self.t = t
        self._record(kind, **fields)

    def done(self, t: float, traj: str, reward: float | None, **changes: Any) -> None:
        purpose, task, epoch, index, _ = traj.split("/")
        fields: dict[str, Any] = {
            "traj": traj, "attempt": 0, "group": f"{purpose}/{task}/{epoch}/{index}", "task": task, "purpose": purpose,
            "status": "done", "cause": "env_done", "reward": reward, "turns": 2, "bad_actions": 1, "sampled": 10,
            "context": 30, "oldest_version": 0, "newest_version": 1, "spans": 2, "metrics": {}, "seconds": SECONDS,
        }  # fmt: skip
        self.at(t, "traj_finished", **(fields | changes))

    def group(self, t: float, name: str, *rewards: float, **changes: Any) -> None:
        group = f"train/{name}"
        task = name.split("/", maxsplit=1)[0]
        self.at(t, "group_opened", group=group, task=task, members=len(rewards), room=1)
        for member, reward in enumerate(rewards):
            self.done(t, f"{group}/{member}", reward, **changes)
        self.at(
            t,
            "group_completed",
            group=group,
            task=task,
            members=len(rewards),
            reward_mean=sum(rewards),
            oldest_version=0,
        )

    def step(self, t: float, step: int, *groups: str, metrics: dict[str, float] | None = None) -> None:
        names = [f"train/{group}" for group in groups]
        self.at(
            t, "batch_released", step=step, version=step + 1, groups=names, trajectories=4, tokens=40, staleness_mean=1.0,
            staleness_max=1, waited_s=0.75, quota={},
        )  # fmt: skip
        self.at(t, "step_started", step=step, version=step + 1)
        self.at(
            t + 1, "step_finished", step=step, version=step + 1, seconds=1.0, trained_tokens=40,
            metrics={"loss": 0.5} if metrics is None else metrics,
        )  # fmt: skip

    def rows(self) -> list[Row]:
        return rows_of(self.events)


def test_a_step_by_hand() -> None:
    script = Script()
    script.group(1, "a/0/0", 1.0, 0.0)
    script.group(2, "b/0/0", 5.0, 5.0, turns=4, sampled=20, spans=1, oldest_version=1)
    script.step(3, 0, "a/0/0", "b/0/0", metrics={"loss": 0.5, "entropy/a": 0.25, "b/kl": 0.125})
    (row,) = script.rows()
    expected = {
        STEP: 1,
        "reward/a/trained/mean": 0.5, "reward/a/trained/std": 0.5, "reward/b/trained/mean": 5.0,
        "reward/all/trained/mean": 2.75, "reward/all/trained/min": 0.0, "reward/all/trained/max": 5.0,
        "success/a/trained/mean": 0.5, "success/b/trained/mean": 1.0, "success/all/trained/mean": 0.75,
        "rollout/a/response_tokens/mean": 10.0, "rollout/all/response_tokens/mean": 15.0,
        "rollout/all/turns/max": 4, "rollout/all/turns/mean": 3.0, "rollout/a/bad_actions/mean": 1.0,
        "rollout/b/spans/mean": 1.0, "rollout/all/trajectories/count": 4,
        "staleness/a/oldest/mean": 1.0, "staleness/b/oldest/mean": 0.0, "staleness/all/oldest/max": 1,
        "staleness/all/newest/mean": 0.0,
        "groups/a/zero_variance/mean": 0.0, "groups/b/zero_variance/mean": 1.0, "groups/all/zero_variance/mean": 0.5,
        "groups/all/trained/count": 2, "groups/all/size/mean": 2.0,
        "mix/a/wanted/value": 0.75, "mix/a/trained/value": 0.5, "mix/b/trained/value": 0.5,
        "time/all/wait_for_batch/sum": 0.75, "time/all/train_step/sum": 1.0, "time/all/row/value": 3.0,
        "time/all/elapsed/value": 4.0, "time/a/trajectory/mean": 2.0, "time/a/env_open/mean": 0.5,
        "throughput/all/trajectories/per_s": 4 / 3, "throughput/a/trajectories/per_s": 2 / 3,
        "throughput/all/trained_tokens/per_s": 40 / 3,
        "trainer/all/loss/value": 0.5, "trainer/a/entropy/value": 0.25, "trainer/b/kl/value": 0.125,
        "engine/all/idle/mean": 1.0, "engine/all/live/mean": 0.0,
    }  # fmt: skip
    assert {key: row.get(key) for key in expected} == pytest.approx(expected)


def test_every_number_that_an_environment_returns_has_a_metric_per_task() -> None:
    """Field case 42: as mean, and per task."""
    script = Script()
    script.group(1, "a/0/0", 1.0, 0.0, metrics={"path": 6.0, "tests/passed": 2.0})
    script.group(1, "b/0/0", 1.0, 0.0, metrics={"path": 2.0})
    script.step(2, 0, "a/0/0", "b/0/0")
    (row,) = script.rows()
    assert row["env/a/path/mean"] == 6.0
    assert row["env/a/tests.passed/mean"] == 2.0
    assert row["env/b/path/mean"] == 2.0
    assert row["env/all/path/mean"] == 4.0


def test_what_failed_or_was_not_scored_is_in_no_mean() -> None:
    script = Script()
    script.at(1, "group_opened", group="train/a/0/0", task="a", members=3, room=1)
    script.done(1, "train/a/0/0/0", 1.0)
    script.done(1, "train/a/0/0/1", None)
    script.done(1, "train/a/0/0/2", None, status="failed", cause="timeout")
    script.at(1, "failure_decided", traj="train/a/0/0/2", attempt=0, failure="env timeout: no answer", decision="Retry")
    script.done(2, "train/a/0/0/3", None, status="aborted", cause="redundant")
    script.done(2, "train/a/0/0/2", 0.5, attempt=1)
    script.at(2, "group_completed", group="train/a/0/0", task="a", members=2, reward_mean=0.75, oldest_version=0)
    script.done(2, "train/a/0/0/4", 9.0)
    script.step(3, 0, "a/0/0")
    (row,) = script.rows()
    assert row["reward/a/trained/mean"] == 0.75
    assert row["rollout/a/trajectories/count"] == 2
    assert row["drop/a/trajectories_unscored/count"] == 1
    assert row["drop/a/trajectories_redundant/count"] == 2
    assert row["failures/a/env_timeout/count"] == 1
    assert row["failures/all/decided_Retry/count"] == 1


def test_members_that_finish_before_the_group_is_closed_and_are_not_needed_are_redundant() -> None:
    script = Script()
    script.at(1, "group_opened", group="train/a/0/0", task="a", members=3, room=1)
    for member, reward in enumerate((1.0, 0.0, 7.0)):
        script.done(1, f"train/a/0/0/{member}", reward)
    script.at(1, "group_completed", group="train/a/0/0", task="a", members=2, reward_mean=0.5, oldest_version=0)
    script.step(2, 0, "a/0/0")
    (row,) = script.rows()
    assert row["reward/a/trained/max"] == 1.0
    assert row["drop/a/trajectories_redundant/count"] == 1


def test_a_dropped_group_is_counted_by_reason_and_never_trained() -> None:
    script = Script()
    script.group(1, "a/0/0", 1.0, 0.0)
    script.group(1, "a/0/1", 1.0, 1.0)
    script.at(2, "group_dropped", group="train/a/0/1", task="a", reason="stale", tokens=20)
    script.at(
        2, "ledger", sampled=40, trained=0, dropped={"stale": 20}, buffered=20, in_flight=0, eval=0, engines={"e": 40}
    )
    script.step(3, 0, "a/0/0")
    script.at(
        5, "ledger", sampled=40, trained=20, dropped={"stale": 20}, buffered=0, in_flight=0, eval=0, engines={"e": 40}
    )
    script.group(6, "a/0/2", 1.0, 0.0)
    script.step(7, 1, "a/0/2")
    first, second = script.rows()
    assert first["groups/a/dropped_stale/count"] == 1
    assert first["drop/a/trajectories_stale/count"] == 2
    assert first["drop/all/tokens_stale/sum"] == 20
    assert first["ledger/all/dropped_stale/value"] == 20
    assert second["ledger/all/trained/value"] == 20
    assert second["drop/all/tokens_stale/sum"] == 0
    assert "groups/a/dropped_stale/count" not in second


def test_engine_and_turn_times() -> None:
    script = Script()
    turn = {"traj": "train/a/0/0/0", "attempt": 0, "turn": 0, "part": 0, "engine": "e"}
    facts = {"sampled": 5, "spans": [[0, 5]], "finish": "stop", "prefilled": 7, "rebuilt": 3}
    script.at(1, "group_opened", group="train/a/0/0", task="a", members=2, room=1)
    script.at(2, "turn_routed", **turn, load=0, sticky=False)
    script.at(4, "turn_done", **turn, seconds=2.0, **facts)
    for member, reward in enumerate((1.0, 0.0)):
        script.done(4, f"train/a/0/0/{member}", reward)
    script.at(4, "applied", engine="e", version=1, seconds=0.5, exposed_s=0.25, live=1, digest="d", matches=False)
    script.step(5, 0, "a/0/0")
    (row,) = script.rows()
    assert row["engine/all/idle/mean"] == pytest.approx(3 / 5)
    assert row["engine/all/live/mean"] == pytest.approx(2 / 5)
    assert row["time/a/turn/mean"] == 2.0
    assert row["engine/all/prefilled_tokens/sum"] == 7
    assert row["engine/all/rebuilt_tokens/sum"] == 3
    assert row["time/all/exposed/sum"] == 0.25
    assert row["engine/all/apply_mismatch/count"] == 1
    assert row["throughput/a/sampled_tokens/per_s"] == 1.0


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    script = Script()
    script.group(1, "a/0/0", 1.0, 0.0)
    script.step(2, 0, "a/0/0", metrics={"loss": float("nan"), "grad_norm": 1.0})
    (row,) = script.rows()
    assert "trainer/all/loss/value" not in row
    assert row["trainer/all/not_finite/count"] == 1
    assert row["trainer/all/grad_norm/value"] == 1.0


def test_an_evaluation_is_one_row_at_its_end_and_an_unfinished_one_is_incomplete() -> None:
    script = Script()

    def scored(name: str, task: str, success: float) -> None:
        script.at(
            1, "eval_scored", eval=name, task=task, version=3, split="held_out", sampling="sampled", episodes=50,
            success=success, reward_mean=2 * success, complete=True,
        )  # fmt: skip

    scored("before", "a", 0.25)
    scored("before", "b", 0.75)
    script.at(2, "eval_finished", eval="before", version=3, complete=True)
    scored("after", "a", 1.0)
    whole, open_ended = script.rows()
    assert whole["eval/a/success_sampled_held_out/mean"] == 0.25
    assert whole["eval/all/success_sampled_held_out/mean"] == 0.5
    assert whole["eval/b/episodes_sampled_held_out/count"] == 50
    assert (whole["eval/all/version/value"], whole["eval/all/complete/value"]) == (3, 1.0)
    assert open_ended["eval/all/complete/value"] == 0.0


def test_every_name_is_in_the_table_and_every_line_of_the_table_is_used() -> None:
    rows = synthetic(steps=30).rows()
    keys = {key for row in rows for key in row if key != STEP}
    assert [key for key in sorted(keys) if not documented(key)] == []
    used = {lookup(*(key.split("/")[i] for i in (0, 2))) for key in keys}
    rare = {"apply_mismatch", "not_finite", "kl"}
    assert {f"{m.area}/{m.name}" for m in METRICS if m not in used and m.name not in rare} == set()


def test_per_task_and_aggregate_always_come_together() -> None:
    rows = synthetic().rows()
    for row in rows:
        for key in row:
            area, scope, *rest = key.split("/")
            if area in ("reward", "success", "rollout", "staleness", "groups") and scope != "all":
                assert "/".join([area, "all", *rest]) in row
        if "reward/all/trained/mean" in row:
            assert {f"reward/{task}/trained/mean" for task in TASKS} <= set(row)


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == table(), "run `make docs`"


def test_live_rows_equal_rows_read_from_disk(tmp_path: Path) -> None:
    run = synthetic()
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for event in run.events:
        writer(event)
    writer.close()
    run.write(tmp_path)
    again = rows_of(read_events(tmp_path / "events.jsonl")[1])
    assert list(read_rows(tmp_path / "metrics.jsonl")) == json.loads(json.dumps(again))


def test_a_resumed_run_goes_on_in_the_same_stream_with_steps_rising_only(tmp_path: Path) -> None:
    run = synthetic()
    kinds = [event["kind"] for event in run.events]
    checkpoint = [at for at, kind in enumerate(kinds) if kind == "ledger"][5] + 1
    resumed = {
        "seq": checkpoint + 1, "t": run.events[checkpoint]["t"], "kind": "resumed",
        "data": {"from_seq": checkpoint, "lost": 700},
    }  # fmt: skip
    writer = MetricsWriter(tmp_path / "metrics.jsonl", history=run.events[:checkpoint])
    for event in (resumed, *run.events[checkpoint:]):
        writer(event)
    writer.close()
    steps = [row[STEP] for row in read_rows(tmp_path / "metrics.jsonl") if "time/all/train_step/sum" in row]
    assert steps == list(range(1, run.steps + 1))


def test_the_fold_keeps_only_what_is_open() -> None:
    fold, most = MetricsFold(), 0
    for event in synthetic(steps=30).events:
        fold(event)
        most = max(most, len(fold.members))
    assert 0 < most <= 2 * 64 + 64
    assert len(fold.members) == 0
