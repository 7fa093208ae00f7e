"""From events to metric rows: `{"train/step": n, "<area>/<task|all>/<name>/<stat>": value}`.

Invariant: a pure fold. The same events give the same rows, live or read back from disk; memory is that of what is open
(groups not yet trained), never of the run. One row per finished step, per evaluation, per baseline and for the warm start.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from rollart.observe.jsonl import LineWriter, write_rows
from rollart.observe.log import Event
from rollart.observe.members import Finished, Members
from rollart.observe.metric_docs import table
from rollart.observe.metric_rows import STEP, Row, Tallies, in_order, put
from rollart.observe.tally import EngineMeter, Stat, Versions, task_of


class MetricsFold:
    """Feed events in order; each call returns the rows that it completed."""

    def __init__(self) -> None:
        self.mix: Mapping[str, float] = {}
        self.step = 0
        self.last: Row = {}
        """Of the last step that was finished."""
        self._success_at: Mapping[str, float] = {}
        self.members = Members()
        self._released: dict[int, list[tuple[list[Finished], int]]] = {}
        self._since = Tallies()
        self._row_t: float | None = None
        self._engines = EngineMeter()
        self._versions = Versions()
        self._ledger: Mapping[str, float] = {}
        self._trained_by_task: dict[str, int] = {}
        self._evals: dict[str, Row] = {}
        self._eval_scores: dict[str, dict[tuple[str, str], Stat]] = {}
        self._on: dict[str, Callable[[Event, Mapping[str, Any]], Row | None]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def __call__(self, event: Event) -> list[Row]:
        handle = self._on.get(event["kind"])
        row = handle(event, event["data"]) if handle else None
        if not row:
            return []
        ordered = in_order(row)
        if event["kind"] == "step_finished":
            self.last = ordered
        return [ordered]

    @property
    def live(self) -> Mapping[str, int]:
        """Live requests per engine."""
        return self._engines.live

    def close(self) -> list[Row]:
        """Rows of evaluations that never ended."""
        return [in_order(self._eval_row(name, complete=False)) for name in list(self._evals)]

    # --- the run

    def _on_run_started(self, event: Event, data: Mapping[str, Any]) -> None:
        total = sum(data["mix"].values()) or 1.0
        self.mix = {task: share / total for task, share in data["mix"].items()}
        self._success_at = data["success_at"]

    def _on_resumed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._engines.all_lost(event["t"])
        self._engines.reset(event["t"])
        self._row_t = event["t"]

    def _on_ledger(self, event: Event, data: Mapping[str, Any]) -> None:
        terms = {name: data[name] for name in ("sampled", "trained", "buffered", "in_flight")}
        dropped = {f"dropped_{reason}": tokens for reason, tokens in data["dropped"].items()}
        ledger = {**terms, "eval": event["eval"], **dropped}
        for reason in data["dropped"]:
            newly = ledger[f"dropped_{reason}"] - self._ledger.get(f"dropped_{reason}", 0)
            self._since.note("drop", "all", f"tokens_{reason}", newly)
        self._ledger = ledger

    def _on_baseline(self, event: Event, data: Mapping[str, Any]) -> Row:
        row: Row = {STEP: self.step}
        put(row, "baseline", event["task"], f"success_{data['policy']}", mean=data["success"])
        put(row, "baseline", event["task"], f"episodes_{data['policy']}", count=data["episodes"])
        return row

    def _on_warm_started(self, event: Event, data: Mapping[str, Any]) -> Row:
        row: Row = {STEP: self.step}
        for name in ("steps", "tokens", "loss", "seconds"):
            put(row, "warm_start", "all", name, value=data[name])
        return row

    def _on_loop_lag(self, event: Event, data: Mapping[str, Any]) -> None:
        self._since.note("time", "all", "loop_lag", data["worst_s"])
        self._since.note("time", "all", "loop_lag_p99", data["p99_s"])

    # --- evaluation

    def _on_eval_scored(self, event: Event, data: Mapping[str, Any]) -> None:
        name, task = event["eval"], event["task"]
        row = self._evals.setdefault(name, {STEP: self.step})
        put(row, "eval", "all", "version", value=event["version"])
        what = f"{data['sampling']}_{data['split']}"
        put(row, "eval", task, f"success_{what}", mean=data["success"])
        put(row, "eval", task, f"reward_{what}", mean=data["reward_mean"])
        put(row, "eval", task, f"episodes_{what}", count=data["episodes"])
        scores = self._eval_scores.setdefault(name, {})
        for quantity, value in (("success", data["success"]), ("reward", data["reward_mean"])):
            scores.setdefault((quantity, what), Stat()).add(value)

    def _on_eval_finished(self, event: Event, data: Mapping[str, Any]) -> Row | None:
        return self._eval_row(event["eval"], complete=bool(data["complete"])) if event["eval"] in self._evals else None

    def _eval_row(self, name: str, *, complete: bool) -> Row:
        row = self._evals.pop(name)
        row[STEP] = self.step
        for (quantity, what), stat in self._eval_scores.pop(name).items():
            put(row, "eval", "all", f"{quantity}_{what}", mean=stat.mean)
        put(row, "eval", "all", "complete", value=float(complete))
        return row

    # --- engines and environments

    def _on_engine_joined(self, event: Event, data: Mapping[str, Any]) -> None:
        self._engines.joined(event["engine"], event["t"])

    def _on_engine_lost(self, event: Event, data: Mapping[str, Any]) -> None:
        self._engines.lost(event["engine"], event["t"])

    def _on_turn_routed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._engines.routed(event["engine"], request_of(event), event["t"])
        self._since.note("engine", "all", "sticky", float(data["sticky"]))

    def _on_turn_done(self, event: Event, data: Mapping[str, Any]) -> None:
        note, traj = self._since.note, event["traj"]
        self._engines.done(event["engine"], request_of(event), event["t"])
        note("engine", "all", "prefilled_tokens", data["prefilled"])
        note("engine", "all", "rebuilt_tokens", data["rebuilt"])
        if traj.startswith("train/"):
            task = task_of(traj)
            note("time", task, "turn", data["seconds"])
            note("throughput", task, "sampled_tokens", data["sampled"])

    def _on_env_stepped(self, event: Event, data: Mapping[str, Any]) -> None:
        traj = event["traj"]
        if traj.startswith("train/"):
            self._since.note("time", task_of(traj), "env_step", data["seconds"])

    def _on_scored(self, event: Event, data: Mapping[str, Any]) -> None:
        traj = event["traj"]
        if traj.startswith("train/"):
            self._since.note("time", task_of(traj), "score", data["seconds"])

    # --- trajectories and groups

    def _on_group_opened(self, event: Event, data: Mapping[str, Any]) -> None:
        self.members.opened(event["group"])
        if self._row_t is None:
            self._row_t = event["t"]
            self._engines.reset(event["t"])

    def _on_traj_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        if data["purpose"] != "train":
            return
        task = event["task"]
        if data["status"] == "aborted":
            self._since.note("drop", task, f"trajectories_{data['cause']}")
        elif data["status"] == "done":
            self._since.note("time", task, "trajectory", data["seconds"]["total"])
            self._since.note("time", task, "env_open", data["seconds"]["open"])
            if data["reward"] is None:
                self._since.note("drop", task, "trajectories_unscored")
                return
            self._since.note("reward", task, "finished", data["reward"])
            self._since.note("success", task, "finished", self._success(task, data["reward"]))
            if not self.members.finished(event):
                self._since.note("drop", task, "trajectories_redundant")

    def _on_failure_decided(self, event: Event, data: Mapping[str, Any]) -> None:
        if not event["traj"].startswith("train/"):
            return
        task = task_of(event["traj"])
        self._since.note("failures", task, failure_type(data["failure"]).replace("/", "_"))
        self._since.note("failures", task, f"decided_{data['decision']}")

    def _on_group_completed(self, event: Event, data: Mapping[str, Any]) -> None:
        for _ in range(self.members.completed(event["group"], data["members"])):
            self._since.note("drop", event["task"], "trajectories_redundant")

    def _on_group_dropped(self, event: Event, data: Mapping[str, Any]) -> None:
        self._since.note("groups", event["task"], f"dropped_{data['reason']}")
        for _ in self.members.take(event["group"]):
            self._since.note("drop", event["task"], f"trajectories_{data['reason']}")

    def _success(self, task: str, reward: float) -> float:
        return float(reward >= self._success_at.get(task, 1.0))

    # --- training

    def _on_batch_released(self, event: Event, data: Mapping[str, Any]) -> None:
        self._since.note("time", "all", "wait_for_batch", data["waited_s"])
        batch = self._released.setdefault(event["step"], [])
        batch += [(self.members.take(group), event["version"]) for group in data["groups"]]

    def _on_published(self, event: Event, data: Mapping[str, Any]) -> None:
        self._versions.published(event)
        self._since.note("time", "all", "publish", data["seconds"])

    def _on_prefetched(self, event: Event, data: Mapping[str, Any]) -> None:
        self._since.note("time", "all", "prefetch", data["seconds"])

    def _on_applied(self, event: Event, data: Mapping[str, Any]) -> None:
        self._since.note("time", "all", "apply", data["seconds"])
        self._since.note("time", "all", "exposed", data["exposed_s"])
        if not data["matches"]:
            self._since.note("engine", "all", "apply_mismatch")

    def _on_step_finished(self, event: Event, data: Mapping[str, Any]) -> Row:
        self.step, t = steps_done(event), event["t"]
        row: Row = {STEP: self.step}
        self._since.note("time", "all", "train_step", data["seconds"])
        for members, version in self._released.pop(event["step"], []):
            self._note_trained(members, version)
        self._trainer_metrics(row, data["metrics"])
        self._rates(row, t, data["trained_tokens"])
        self._since.into(row)
        for task, share in self.mix.items():
            put(row, "mix", task, "wanted", value=share)
        trained = sum(self._trained_by_task.values())
        for task, count in self._trained_by_task.items():
            put(row, "mix", task, "trained", value=count / trained)
        for term, tokens in self._ledger.items():
            put(row, "ledger", "all", term, value=tokens)
        put(row, "time", "all", "elapsed", value=t)
        self._since = Tallies()
        self._row_t = t
        self._engines.reset(t)
        return row

    def _note_trained(self, members: list[Finished], version: int) -> None:
        """One trained group."""
        if not members:
            return
        note, note_all, task = self._since.note, self._since.note_all, members[0].task
        rewards = [member.reward for member in members]
        note("groups", task, "trained")
        note("groups", task, "size", len(members))
        note("groups", task, "zero_variance", float(len(set(rewards)) == 1))
        self._trained_by_task[task] = self._trained_by_task.get(task, 0) + len(members)
        note_all("reward", task, "trained", rewards)
        note_all("success", task, "trained", [self._success(task, reward) for reward in rewards])
        for name in ("response_tokens", "context_tokens", "turns", "bad_actions", "spans"):
            note_all("rollout", task, name, list(map(attrgetter(name), members)))
        note_all("rollout", task, "trajectories", [1.0] * len(members))
        staleness = self._versions.staleness
        for member in members:
            if member.oldest_version is not None and member.newest_version is not None:
                note("staleness", task, "oldest", staleness(version, member.oldest_version))
                note("staleness", task, "newest", staleness(version, member.newest_version))
            for name, value in member.metrics.items():
                note("env", task, name, value)

    def _trainer_metrics(self, row: Row, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            first, _, rest = name.partition("/")
            last = name.rpartition("/")
            if last[0] and last[2] in self.mix:
                task, short = last[2], last[0]
            elif rest and first in self.mix:
                task, short = first, rest
            else:
                task, short = "all", name
            if value is not None and math.isfinite(value):
                put(row, "trainer", task, short, value=value)
            else:
                self._since.note("trainer", "all", "not_finite")

    def _rates(self, row: Row, t: float, trained_tokens: int) -> None:
        row_s = t - self._row_t if self._row_t is not None else 0.0
        put(row, "time", "all", "row", value=row_s)
        time = self._engines.read(t)
        put(row, "engine", "all", "live", mean=time.mean_live)
        put(row, "engine", "all", "idle", mean=time.idle_share)
        if row_s <= 0:
            return
        put(row, "throughput", "all", "trained_tokens", per_s=trained_tokens / row_s)
        for scope in ("all", *self.mix):
            trained = self._since.total("rollout", scope, "trajectories")
            put(row, "throughput", scope, "trajectories", per_s=trained / row_s)
            sampled = self._since.total("throughput", scope, "sampled_tokens")
            put(row, "throughput", scope, "sampled_tokens", per_s=sampled / row_s)


def request_of(event: Event) -> tuple[str, int, int, int]:
    """What tells one request from all others."""
    return event["traj"], event["attempt"], event["turn"], event["data"]["part"]


def steps_done(event: Event) -> int:
    """Events count steps from 0; rows, curves and people count the steps that are finished."""
    return int(event["step"]) + 1


def failure_type(described: str) -> str:
    """`boundary/kind` from the line that `core.errors.describe` made of a failure."""
    return described.split(":", 1)[0].strip().replace(" ", "/")


def rows_of(events: Iterable[Event]) -> list[Row]:
    """All rows of a run."""
    fold = MetricsFold()
    rows = [row for event in events for row in fold(event)]
    return rows + fold.close()


class MetricsWriter:
    """A sink that keeps `metrics.jsonl`."""

    def __init__(self, path: Path, history: Iterable[Event] = (), *, fold: MetricsFold | None = None) -> None:
        """`history`: the surviving events of a resumed run, whose rows replace the file once all of it was read. `fold`: one
        that somebody else looks at too."""
        self._fold = MetricsFold() if fold is None else fold
        write_rows(path, (row for event in history for row in self._fold(event)))
        self._lines = LineWriter(path, append=True)

    def __call__(self, event: Event) -> None:
        for row in self._fold(event):
            self._lines.put(row)

    def close(self) -> None:
        for row in self._fold.close():
            self._lines.put(row)
        self._lines.close()


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        sys.exit("usage: python -m rollart.observe.metrics --table > docs/metrics.md")
    sys.stdout.write(table())
