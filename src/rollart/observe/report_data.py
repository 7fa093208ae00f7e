"""What the report shows, gathered from a run's folder: two passes over the events, one over the trajectories.

Invariant: everything is computed from the record of the run; what is thinned out for size says so. The result is plain
values, so that a page, a test or another tool can take it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.observe.charts import charts_of
from rollart.observe.diagnose import Advice, diagnose
from rollart.observe.jsonl import Torn
from rollart.observe.log import Event, EventLog, restated
from rollart.observe.metric_rows import Row
from rollart.observe.metrics import MetricsFold
from rollart.observe.outlook import Outlook, OutlookFold
from rollart.observe.readings import Picks, readings_of
from rollart.observe.report_window import Marks, WindowFold
from rollart.observe.summary import SummaryFold

ADVISED = ("advisory", "wait_expired")
MAX_SAID = 12
"""Lines of what the run itself reported; the log has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of a report."""

    header: Mapping[str, Any]
    started: Mapping[str, Any]
    summary: Mapping[str, Any]
    outlook: Outlook | None
    """None: no step was finished."""
    rows: Sequence[Row]
    advice: Sequence[Advice]
    said: Sequence[str]
    """What the run itself reported while it ran."""
    interruptions: Sequence[str]
    """What was lost or resumed, and when it went on."""
    charts: Sequence[Mapping[str, Any]]
    phases: Sequence[tuple[str, float, float]]
    """(name, start, end) in seconds since the run began."""
    window: Mapping[str, Any] | None
    readings: Sequence[Mapping[str, Any]]
    n_events: int

    @property
    def tasks(self) -> list[str]:
        return list(self.summary["success"])


class _FirstPass:
    """Everything that needs no window."""

    def __init__(self) -> None:
        self.metrics, self.summary, self.picks = MetricsFold(), SummaryFold(), Picks()
        self.outlook = OutlookFold()
        self.rows: list[Row] = []
        self.marks = Marks()
        self.started: Mapping[str, Any] = {}
        self.said: list[str] = []
        self.phases: list[tuple[str, float, float]] = []
        self.n_events = 0
        self._trained_until: float | None = None
        self._evals: dict[str, float] = {}
        self._training_since: float | None = None

    def __call__(self, event: Event) -> None:
        self.n_events += 1
        self.rows += self.metrics(event)
        self.summary(event)
        self.outlook(event)
        self.picks(event)
        self.marks(event)
        kind, t, data = event["kind"], event["t"], event["data"]
        if kind == "step_finished":
            self._trained_until = t
        elif kind == "run_started":
            self.started = data
        elif kind == "resumed":
            self.started = restated(self.started, data)
        elif kind == "warm_started":
            self.phases.append(("warm start", t - data["seconds"], t))
        elif kind == "eval_started":
            self._evals[event["eval"]] = t
        elif kind == "eval_finished":
            self.phases.append((f"evaluation {event['eval']}", self._evals.pop(event["eval"], t), t))
        elif kind == "group_opened" and self._training_since is None:
            self._training_since = t
        elif kind in ADVISED:
            self.said.append(_said(kind, event, data))

    def close(self) -> None:
        self.rows += self.metrics.close()
        if self._training_since is not None and self._trained_until is not None:
            self.phases.append(("training", self._training_since, self._trained_until))
        self.phases.sort(key=lambda phase: phase[1])


def _said(kind: str, event: Event, data: Mapping[str, Any]) -> str:
    t = f"{event['t']:.1f} s: "
    if kind == "advisory":
        return t + str(data["text"])
    return f"{t}waited {data['waited_s']:.1f} s for {data['what']}, longer than its deadline"


def gather(run_dir: Path) -> Report:
    """Read a run's folder. Needs `events.jsonl`; `trajectories.jsonl` is used if it is there. Raises StoreError."""
    torn: list[Torn] = []
    log = EventLog(run_dir / "events.jsonl", torn.append)
    first = _FirstPass()
    for event in log.events():
        first(event)
    first.close()
    summary = first.summary.result(log.header)
    tasks = list(summary["success"])
    return Report(
        header=log.header,
        started=first.started,
        summary=summary,
        outlook=first.outlook.result(),
        rows=first.rows,
        advice=diagnose(first.rows, summary),
        said=[str(item) for item in torn] + first.said[:MAX_SAID],
        interruptions=[str(one) for one in first.summary.interruptions.found],
        charts=charts_of(first.rows, tasks, first.started, learns=summary["figures"] != "simulated"),
        phases=first.phases,
        window=_window(log, first.marks, tasks),
        readings=readings_of(run_dir / "trajectories.jsonl", first.picks),
        n_events=first.n_events,
    )


def _window(log: EventLog, marks: Marks, tasks: Sequence[str]) -> dict[str, Any] | None:
    chosen = marks.window()
    if chosen is None:
        return None
    fold = WindowFold(*chosen, tasks)
    for event in log.events(since_s=chosen[0].end_s):
        fold(event)
    return fold.result()
