"""From events to `summary.json`: what a run came to, in one small object.

Invariant: every field is defined in `summary_fields.FIELDS`, is computed from events alone, and is null where the
events do not say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rollart.observe.interruptions import InterruptionsFold
from rollart.observe.jsonl import write_whole
from rollart.observe.log import Event, read_events, restated
from rollart.observe.members import Members
from rollart.observe.metrics import failure_type
from rollart.observe.tally import Stat, Versions
from rollart.observe.waits import WaitsFold

UNFINISHED: Mapping[str, Any] = {"status": "unfinished", "why": "the log ends without run_finished"}


class SummaryFold:
    """Feed events in order; `result` at any time."""

    def __init__(self) -> None:
        self.waits = WaitsFold()
        self.interruptions = InterruptionsFold()
        self._versions = Versions()
        self._started: Mapping[str, Any] = {}
        self._finished: Mapping[str, Any] = UNFINISHED
        self._t = 0.0
        self._tokens: dict[str, Any] | None = None
        self._members = Members()
        self._batches: dict[int, list[tuple[str, int]]] = {}
        self._basis: list[str] = []
        self._steps = 0
        self._trained: dict[str, int] = {}
        self._trained_tokens = 0
        self._staleness = Stat()
        self._dropped: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._eval_episodes = 0
        self._exposed_s = 0.0
        self._baselines: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._evals: dict[tuple[str, str, str, str], Mapping[str, Any]] = {}
        self._on: dict[str, Callable[[Event, Mapping[str, Any]], None]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def __call__(self, event: Event) -> None:
        self.waits(event)
        self.interruptions(event)
        self._t = event["t"]
        handle = self._on.get(event["kind"])
        if handle is not None:
            handle(event, event["data"])

    def _on_run_started(self, event: Event, data: Mapping[str, Any]) -> None:
        self._started = data

    def _on_run_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        self._finished = data

    def _on_resumed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._started, self._finished = restated(self._started, data), UNFINISHED

    def _on_simulated(self, event: Event, data: Mapping[str, Any]) -> None:
        self._basis = list(data["basis"])

    def _on_published(self, event: Event, data: Mapping[str, Any]) -> None:
        self._versions.published(event)

    def _on_ledger(self, event: Event, data: Mapping[str, Any]) -> None:
        self._tokens = {
            "sampled": data["sampled"],
            "trained": data["trained"],
            "dropped": {reason: tokens for reason, tokens in data["dropped"].items() if tokens},
            "buffered": data["buffered"],
            "in_flight": data["in_flight"],
            "eval": event["eval"],
        }

    def _on_baseline(self, event: Event, data: Mapping[str, Any]) -> None:
        self._baselines[event["task"], data["policy"]] = data

    def _on_eval_scored(self, event: Event, data: Mapping[str, Any]) -> None:
        self._evals[event["eval"], event["task"], data["sampling"], data["split"]] = data

    def _on_applied(self, event: Event, data: Mapping[str, Any]) -> None:
        self._exposed_s += data["exposed_s"]

    def _on_failure_decided(self, event: Event, data: Mapping[str, Any]) -> None:
        what = failure_type(data["failure"])
        self._failed[what] = self._failed.get(what, 0) + 1

    def _on_traj_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        if data["purpose"] == "eval":
            self._eval_episodes += data["status"] == "done"
        elif data["status"] == "aborted":
            self._drop(data["cause"])
        elif data["status"] == "done":
            if data["reward"] is None:
                self._drop("unscored")
            elif not self._members.finished(event):
                self._drop("redundant")

    def _on_group_opened(self, event: Event, data: Mapping[str, Any]) -> None:
        self._members.opened(event["group"])

    def _on_group_completed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._drop("redundant", self._members.completed(event["group"], data["members"]))

    def _on_group_dropped(self, event: Event, data: Mapping[str, Any]) -> None:
        self._drop(data["reason"], len(self._members.take(event["group"])))

    def _drop(self, reason: str, n: int = 1) -> None:
        if n:
            self._dropped[reason] = self._dropped.get(reason, 0) + n

    def _on_batch_released(self, event: Event, data: Mapping[str, Any]) -> None:
        self._batches.setdefault(event["step"], []).extend((group, event["version"]) for group in data["groups"])

    def _on_step_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        self._steps += 1
        self._trained_tokens += data["trained_tokens"]
        for group, version in self._batches.pop(event["step"], ()):
            for member in self._members.take(group):
                self._trained[member.task] = self._trained.get(member.task, 0) + 1
                if member.oldest_version is not None:
                    self._staleness.add(self._versions.staleness(version, member.oldest_version))

    def result(self, header: Mapping[str, Any] | None = None) -> dict[str, Any]:
        header = header or {}
        trained, window_s = sum(self._trained.values()), self.waits.window_s
        wanted = self._started.get("mix", {})
        tasks = sorted({*wanted, *(task for task, _ in self._baselines), *(key[1] for key in self._evals)})
        cells = {task: self._success(task) for task in tasks}
        found: dict[str, Any] = {
            "run": header.get("run"),
            "world": header.get("world"),
            "recipe": self._started.get("recipe"),
            "figures": figures_of(header),
            "basis": self._basis,
            "status": self._finished["status"],
            "why": self._finished["why"],
            "steps": self._steps,
            "wall_s": self._t,
            "interruptions": self.interruptions.result(),
            "window_s": window_s,
            "trajectories": trained,
            "trajectories_by": {
                "trained": trained,
                "dropped": dict(sorted(self._dropped.items())),
                "failed": dict(sorted(self._failed.items())),
                "eval": self._eval_episodes,
            },
            "tokens": self._tokens,
            "staleness": {
                "mean": self._staleness.mean,
                "max": self._staleness.max,
                "bound": self._started.get("max_staleness"),
                "holds": self._started.get("enforce") != "admission",
            },
            "success": {task: {name: cell and cell["success"] for name, cell in cells[task].items()} for task in tasks},
            "success_episodes": {
                task: {name: cell and cell["episodes"] for name, cell in cells[task].items()} for task in tasks
            },
            "constant_answer": {task: (cells[task]["constant"] or {}).get("answer") for task in tasks},
            "engine_idle_frac": self.waits.engine_idle,
            "trainer_idle_frac": self.waits.trainer_idle,
            "sync_exposed_s": self._exposed_s,
            "throughput": {
                "trajectories_per_s": trained / window_s if window_s else None,
                "trained_tokens_per_s": self._trained_tokens / window_s if window_s else None,
            },
            "mix": {
                task: {
                    "wanted": wanted[task] / sum(wanted.values()) if task in wanted else None,
                    "trained": self._trained.get(task, 0) / trained if trained else None,
                }
                for task in tasks
            },
            "waits": self.waits.result(),
        }
        return {name: rounded(value) for name, value in found.items()}

    def _success(self, task: str) -> dict[str, Mapping[str, Any] | None]:
        def eval_of(name: str, sampling: str, *splits: str) -> Mapping[str, Any] | None:
            found = (self._evals.get((name, task, sampling, split)) for split in splits)
            return next((cell for cell in found if cell), None)

        return {
            "random": self._baselines.get((task, "random")),
            "constant": self._baselines.get((task, "constant")),
            "warm": eval_of("before", "sampled", "train", "held_out"),
            "after": eval_of("after", "sampled", "train", "held_out"),
            "held_back": eval_of("after", "sampled", "held_out"),
            "greedy": eval_of("after", "greedy", "train", "held_out"),
        }


def rounded(value: Any) -> Any:
    """Floats to a microsecond or a millionth: what is beyond that is arithmetic, not measurement."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return value


def figures_of(header: Mapping[str, Any]) -> str:
    """Which of the three kinds a run's figures are: a virtual clock means that nothing was measured."""
    return "simulated" if header.get("clock") == "virtual" else "measured"


def summarise(events: Iterable[Event], header: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The summary of a run from its surviving events."""
    fold = SummaryFold()
    for event in events:
        fold(event)
    return fold.result(header)


def write_summary(run_dir: Path) -> Path:
    """Compute `summary.json` from `events.jsonl` in a run's folder. Raises StoreError."""
    header, events = read_events(run_dir / "events.jsonl")
    return write_whole(run_dir / "summary.json", as_json(summarise(events, header)))


def as_json(summary: Mapping[str, Any]) -> str:
    return json.dumps(summary, indent=2) + "\n"
