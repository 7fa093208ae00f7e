"""What a user sees while a run goes on: a live panel on a terminal, plain lines elsewhere, a table at the end.

Invariant: the sink only folds; a thread draws. A terminal that cannot be written to ends the display, never the run.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rollart.core.errors import StoreError
from rollart.observe.interruptions import told
from rollart.observe.live import LiveState, Picture, plain_line, sparkline, waiting
from rollart.observe.log import Event
from rollart.observe.metrics import MetricsFold
from rollart.observe.tally import wilson

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

REFRESH_S = 0.5
"""Drawing takes some 10 ms of a core that may be shared with the engine; twice a second is enough to watch."""
EVERY_STEPS, EVERY_S = 10, 15.0
"""Plain mode: a line at least this often."""
PLAIN_WIDTH = 120
COLUMNS = (
    ("random", "random"),
    ("constant", "constant"),
    ("warm", "warm start"),
    ("after", "after RL"),
    ("held_back", "held back"),
    ("greedy", "greedy"),
)

log = logging.getLogger(__name__)


class Display:
    """A sink and a context manager. The lock is held to fold and to copy, never to draw: the run does not wait for it."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        plain: bool = False,
        every_steps: int = EVERY_STEPS,
        every_s: float = EVERY_S,
    ) -> None:
        """A panel if `stream` (default: standard output) is a terminal and not `plain`, else lines."""
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty() and not plain
        self._every_steps, self._every_s = every_steps, every_s
        self._state = LiveState(whole=self._live)
        self._lock = threading.Lock()
        self._event_at = time.monotonic()
        self._closing = threading.Event()
        self._said_step, self._said_at = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def follow(self, metrics: MetricsFold) -> None:
        """Show what this fold has, to which each event goes before it comes here. Call it before the first event."""
        self._state = LiveState(metrics, whole=self._live)

    def __call__(self, event: Event) -> None:
        if not self._state.shows(event["kind"]):
            self._state.t, self._event_at = event["t"], time.monotonic()
            return
        with self._lock:
            self._state(event)
            self._event_at = time.monotonic()

    def replay(self, event: Event) -> None:
        """Take an event of the run before it was resumed: it makes the picture whole and is no news."""
        with self._lock:
            self._state(event)
            self._state.news.clear()
            self._said_step = self._state.step

    def close(self) -> None:
        """Draw once more and stop. Idempotent."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            if self._live:
                self._draw_panel()
            else:
                while not self._closing.wait(REFRESH_S):
                    self._write_lines(last=False)
                self._write_lines(last=True)
        except (OSError, ValueError) as error:  # a closed pipe or file: nobody watches any more
            log.warning("the display stops: %s", error)

    def _draw_panel(self) -> None:
        from rich.live import Live

        console = console_of(self._stream)
        with Live(console=console, auto_refresh=False, transient=False) as panel:
            while True:
                last = self._closing.wait(REFRESH_S)
                with self._lock:
                    news = [self._state.news.popleft() for _ in range(len(self._state.news))]
                    picture = self._state.picture()
                    quiet_s = 0.0 if last else time.monotonic() - self._event_at
                for line in news:
                    panel.console.print(line, style="dim", highlight=False, markup=False)
                panel.update(render(picture, picture.t + quiet_s), refresh=True)
                if last:
                    return

    def _write_lines(self, *, last: bool) -> None:
        now = time.monotonic()
        with self._lock:
            state = self._state
            lines = [state.news.popleft() for _ in range(len(state.news))]
            due = state.step - self._said_step >= self._every_steps or now - self._said_at >= self._every_s or last
            picture = state.picture() if due and state.step > self._said_step else None
        if picture is not None:
            self._said_step, self._said_at = picture.step, now
            lines.append(plain_line(picture))
        for line in lines:
            self._stream.write(line + "\n")
        if lines:
            self._stream.flush()


def console_of(stream: TextIO) -> Console:
    """Wide enough for the tables where there is no terminal to ask."""
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH)


def render(state: Picture, now_s: float) -> RenderableType:
    """The panel: a line per task, then who does what."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    tasks = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("task", "reward", "success", "success, last steps", "staleness", "tokens", "turns"):
        tasks.add_column(name, justify="left" if name in ("task", "success, last steps") else "right")
    for task in state.tasks:
        kept = list(state.history.get(task, ()))
        cells = (f"{kept[-1][0]:.3f}", f"{kept[-1][1]:.0%}") if kept else ("", "")
        trend = sparkline([success for _, success in kept], 0.0, 1.0)
        shape = [
            _figure(state.row, f"{area}/{task}/{name}/mean", digits)
            for area, name, digits in (
                ("staleness", "oldest", 2),
                ("rollout", "response_tokens", 1),
                ("rollout", "turns", 1),
            )
        ]
        tasks.add_row(Text(task, style="bold"), *cells, Text(trend, style="green"), *shape)
    who = Table.grid(padding=(0, 2, 0, 0))
    for part, words in waiting(state, now_s):
        who.add_row(Text(part, style="cyan"), words)
    row = state.row
    if row:
        rates = (
            f"{row.get('throughput/all/trajectories/per_s', 0):,.0f} trajectories/s, "
            f"{row.get('throughput/all/sampled_tokens/per_s', 0):,.0f} tokens/s sampled"
        )
        who.add_row(Text("last step", style="cyan"), rates)
    if state.checkpoint is not None:
        who.add_row(Text("checkpoint", style="cyan"), f"of step {state.checkpoint}; the run can be resumed from there")
    if state.failures:
        who.add_row(Text("failures", style="yellow"), f"{state.failures} attempts, handled by the failure policy")
    steps = state.started.get("steps")
    title = f"{state.phase} · step {state.step}{f' of {steps}' if steps else ''} · {now_s:.0f} s"
    return Panel(Group(tasks, Text(""), who), title=title, title_align="left", border_style="blue", padding=(0, 1))


def _figure(row: Mapping[str, float], key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if key in row else ""


def success_table(summary: Mapping[str, Any]) -> Table:
    """Success per task, from random actions to the trained policy."""
    from rich import box
    from rich.table import Table

    table = Table(title="share of successful episodes", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("task", style="bold")
    for _, name in COLUMNS:
        table.add_column(name, justify="right")
    for task, cells in summary["success"].items():
        table.add_row(task, *("-" if cells[name] is None else f"{cells[name]:.3f}" for name, _ in COLUMNS))
    return table


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The rest of the summary in a few plain lines."""
    tokens, staleness, by = summary["tokens"], summary["staleness"], summary["trajectories_by"]
    dropped = ", ".join(f"{n} {reason}" for reason, n in by["dropped"].items()) or "none"
    failed = ", ".join(f"{n} {kind}" for kind, n in by["failed"].items()) or "none"
    answers = ", ".join(f"{task} {str(text)!r}" for task, text in summary["constant_answer"].items() if text)
    lines = [
        f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.1f} s ({summary['figures']})",
        f"trajectories: {summary['trajectories']} trained; dropped: {dropped}; failed attempts: {failed}",
    ]
    if summary["interruptions"]:
        lines.append(f"interruptions: {'; '.join(told(summary['interruptions']))}")
    if tokens:
        places = ", ".join(
            f"{tokens[name]} {name.replace('_', ' ')}" for name in ("trained", "buffered", "in_flight", "eval")
        )
        lost = ", ".join(f"{n} dropped as {reason}" for reason, n in tokens["dropped"].items()) or "0 dropped"
        lines.append(f"tokens: {tokens['sampled']} sampled = {places}, {lost}")
    if staleness["mean"] is not None:
        lines.append(f"staleness: mean {staleness['mean']:.2f}, max {staleness['max']} (bound {staleness['bound']})")
    if summary["engine_idle_frac"] is not None and summary["trainer_idle_frac"] is not None:
        lines.append(
            f"idle between first and last step: engines {summary['engine_idle_frac']:.0%}, trainer "
            f"{summary['trainer_idle_frac']:.0%}; exposed weight sync {summary['sync_exposed_s']:.3f} s"
        )
    if answers:
        lines.append(f"best constant answers: {answers}")
    return lines


def print_summary(run_dir: Path, stream: TextIO | None = None) -> None:
    """The table at the end of a run, from its `summary.json`. Raises StoreError when there is none."""
    path = run_dir / "summary.json"
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; a run writes it when it ends") from error
    console = console_of(sys.stdout if stream is None else stream)
    if summary["success"]:
        console.print(success_table(summary))
    for line in summary_lines(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if (run_dir / "report.html").exists():
        console.print(f"report: {run_dir / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


class Scored(Protocol):
    """One task's result on one split, as an evaluation gives it."""

    @property
    def task(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def episodes(self) -> int: ...
    @property
    def success(self) -> float: ...
    @property
    def reward_mean(self) -> float: ...
    @property
    def complete(self) -> bool: ...


def print_scores(
    scores: Iterable[Scored], *, instance_seed: int, known: Mapping[str, int], stream: TextIO | None = None
) -> None:
    """What `rollart eval` found. `known`: per task, how many of the drawn instances may have been trained on."""
    from rich import box
    from rich.table import Table

    title = f"instances drawn from seed {instance_seed}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in ("task", "instances", "sampling", "episodes", "success", "95 % interval", "mean reward"):
        table.add_column(name, justify="left" if name in ("task", "instances", "sampling") else "right")
    for score in sorted(scores, key=lambda one: (one.task, one.split)):
        low, high = wilson(score.success, score.episodes)
        where = "never trained on" if score.split == "held_out" else "of the training set"
        episodes = f"{score.episodes}{'' if score.complete else ' (incomplete)'}"
        interval = f"{low:.3f} .. {high:.3f}"
        table.add_row(
            score.task, where, score.mode, episodes, f"{score.success:.3f}", interval, f"{score.reward_mean:.3f}"
        )
    console = console_of(sys.stdout if stream is None else stream)
    console.print(table)
    for task, n in sorted(known.items()):
        if n:
            line = f"{task}: {n} of the drawn instances belong to those that it was trained on"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
