"""The present state of a run, folded from its events: what a live display shows.

Invariant: no clock and no output here; memory is that of what is open and of the last few steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.observe.log import Event, restated
from rollart.observe.metric_rows import STEP, Row
from rollart.observe.metrics import MetricsFold, steps_done

HISTORY = 40
"""Steps in a sparkline: what fits beside the figures on 100 columns."""
BARS = "▁▂▃▄▅▆▇█"
PHASES: Mapping[str, str | None] = {
    **{"traj_started": "opening", "turn_routed": "generating", "turn_done": "stepping"},
    **dict.fromkeys(("traj_finished", "env_opened", "env_stepped", "scored")),
}
"""What an attempt is at after an event of a kind; None: at nothing that is shown."""
WORDS_OF_FAILURE = 5
"""Failures told one by one; then they are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The state at one moment: nothing in it changes any more, so it can be drawn while the run goes on."""

    started: Mapping[str, Any]
    phase: str
    t: float
    step: int
    """Steps finished."""
    version: int
    """What the trainer has published."""
    row: Row
    """The last step's metrics."""
    history: Mapping[str, Sequence[tuple[float, float]]]
    """Per task: (reward, success) of the last steps."""
    trainer: str
    trainer_since_s: float
    served: Mapping[str, int]
    """Version per engine."""
    live: Mapping[str, int]
    """Live requests per engine."""
    at: Mapping[str, int]
    """How many attempts are opening, generating, stepping."""
    ready: int
    """Scored members of groups that wait to be complete or to be trained."""
    failures: int
    checkpoint: int | None
    """Steps that the last checkpoint holds."""

    @property
    def tasks(self) -> list[str]:
        return list(self.started.get("mix", ()))


class LiveState:
    """Feed events in order. `news` collects lines that are worth saying once."""

    def __init__(self, metrics: MetricsFold | None = None, *, whole: bool = True) -> None:
        """`metrics`: a fold that has each event before it comes here; by default one of its own. `whole`: false for lines
        alone, which do not tell what attempts are at."""
        self.metrics = MetricsFold() if metrics is None else metrics
        self._feeds, self._whole = metrics is None, whole
        self.started: Mapping[str, Any] = {}
        self.phase = "starting"
        self.t = 0.0
        self.step = 0
        self.version = 0
        self.row: Row = {}
        self.history: dict[str, deque[tuple[float, float]]] = {}
        self.news: deque[str] = deque()
        self.trainer, self.trainer_since_s = "not started", 0.0
        self.versions: dict[str, int] = {}
        self.at: Counter[str] = Counter()
        self.failures = 0
        self.checkpoint: int | None = None
        self._on = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}
        self._where: dict[tuple[str, int], str] = {}

    def picture(self) -> Picture:
        return Picture(
            started=self.started,
            phase=self.phase,
            t=self.t,
            step=self.step,
            version=self.version,
            row=self.row,
            history={task: tuple(kept) for task, kept in self.history.items()},
            trainer=self.trainer,
            trainer_since_s=self.trainer_since_s,
            served=dict(self.versions),
            live=self.metrics.live,
            at=dict(self.at),
            ready=len(self.metrics.members),
            failures=self.failures,
            checkpoint=self.checkpoint,
        )

    def __call__(self, event: Event) -> None:
        kind, self.t = event["kind"], event["t"]
        if self._feeds:
            self.metrics(event)
        if self._whole and kind in PHASES:
            self._trajectory(event, PHASES[kind])
        handle = self._on.get(kind)
        if handle is not None:
            handle(event, event["data"])

    def shows(self, kind: str) -> bool:
        """Whether anything but the time changes with an event of this kind."""
        return self._feeds or kind in self._on or (self._whole and kind in PHASES)

    def _metrics(self, row: Row) -> None:
        self.row, self.step = row, int(row[STEP])
        for task in self.started["mix"]:
            reward = row.get(f"reward/{task}/trained/mean")
            if reward is not None:
                kept = self.history.setdefault(task, deque(maxlen=HISTORY))
                kept.append((reward, row[f"success/{task}/trained/mean"]))

    def _trajectory(self, event: Event, after: str | None) -> None:
        key = (event["traj"], event["attempt"])
        before = self._where.pop(key, None)
        if before is not None:
            self.at[before] -= 1
        if after is not None:
            self._where[key] = after
            self.at[after] += 1

    # --- what the parts do

    def _on_step_started(self, event: Event, data: Mapping[str, Any]) -> None:
        self._trainer(f"training step {steps_done(event)}")

    def _on_step_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        self._metrics(self.metrics.last)
        self._trainer("waiting for a batch")

    def _on_published(self, event: Event, data: Mapping[str, Any]) -> None:
        self.version = event["version"]
        if self.phase == "resuming":
            self.phase = "training"
            self._trainer("waiting for a batch")

    def _on_applied(self, event: Event, data: Mapping[str, Any]) -> None:
        self.versions[event["engine"]] = event["version"]
        if not data["matches"]:
            self.news.append(f"{event['engine']} does not serve the published weights of version {event['version']}")

    def _on_engine_joined(self, event: Event, data: Mapping[str, Any]) -> None:
        self.versions[event["engine"]] = event["version"]
        if self.phase == "starting":
            self.phase = "preparing: baselines, warm start"

    def _on_engine_lost(self, event: Event, data: Mapping[str, Any]) -> None:
        # the books of engines of before a resume are closed with this event, too
        if self.versions.pop(event["engine"], None) is not None:
            self.news.append(f"{event['engine']} was lost: {data['failure']}")

    def _on_host_lost(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(f"{event['host']} was lost: {data['failure']}")

    def _on_trainer_lost(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(f"the trainer was lost: {data['failure']}; another one is started")
        self._trainer("starting again")

    def _on_trainer_restarted(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(f"the trainer is back after {data['seconds']:.1f} s and {data['steps']} repeated steps")
        self._trainer("going on where it was lost")

    def _trainer(self, what: str) -> None:
        self.trainer, self.trainer_since_s = what, self.t

    # --- the course of the run

    def _on_run_started(self, event: Event, data: Mapping[str, Any]) -> None:
        self.started = data
        total = sum(data["mix"].values()) or 1.0
        mix = ", ".join(f"{task} {share / total:.0%}" for task, share in data["mix"].items())
        self.news.append(
            f"{data['recipe']}: {data['steps']} steps of {data['batch']} trajectories in groups of {data['group_size']}, "
            f"max staleness {data['max_staleness']}; mix: {mix}"
        )

    def _on_checkpointed(self, event: Event, data: Mapping[str, Any]) -> None:
        self.checkpoint = event["step"]

    def _on_resumed(self, event: Event, data: Mapping[str, Any]) -> None:
        """Nothing of the run before it lives; what its attempts were at is told by their ends, which follow."""
        step = event.get("step") or 0
        self.checkpoint = step or self.checkpoint
        taken = f"; {data['lost']} events after that are taken back and done again" if data["lost"] else ""
        self.news.append((f"resumed after step {step}" if step else "resumed from the beginning") + taken)
        self.versions.clear()
        self.started = restated(self.started, data)
        if self.started:
            self.phase = "resuming"
            self._trainer("loading its checkpoint")

    def _on_baseline(self, event: Event, data: Mapping[str, Any]) -> None:
        answer = f" {str(data['answer'])!r}" if data["answer"] else ""
        who = "random actions" if data["policy"] == "random" else f"best {data['policy']} answer{answer}"
        self.news.append(f"{event['task']}: {who} succeed {data['success']:.3f} ({data['episodes']} episodes)")

    def _on_warm_started(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(
            f"warm start: {data['steps']} supervised steps in {data['seconds']:.1f} s, loss {data['loss']:.3f}"
        )

    def _on_eval_started(self, event: Event, data: Mapping[str, Any]) -> None:
        self.phase = f"evaluation {event['eval']}"

    def _on_eval_scored(self, event: Event, data: Mapping[str, Any]) -> None:
        where = "held-back instances" if data["split"] == "held_out" else "training instances"
        self.news.append(
            f"evaluation {event['eval']}, {event['task']}: success {data['success']:.3f} {data['sampling']} on "
            f"{data['episodes']} episodes of {where}{'' if data['complete'] else ' (incomplete)'}"
        )

    def _on_eval_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        self.phase = "training" if self.trainer != "not started" else "evaluated"

    def _on_group_opened(self, event: Event, data: Mapping[str, Any]) -> None:
        if self.trainer == "not started":
            self._trainer("waiting for a batch")
            self.phase = "training"

    def _on_failure_decided(self, event: Event, data: Mapping[str, Any]) -> None:
        self.failures += 1
        if self.failures <= WORDS_OF_FAILURE:
            self.news.append(f"{event['traj']} failed ({data['failure']}): {data['decision']}")
        elif self.failures == WORDS_OF_FAILURE + 1:
            self.news.append("more failures; from here on they are only counted")

    def _on_advisory(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(str(data["text"]))

    def _on_wait_expired(self, event: Event, data: Mapping[str, Any]) -> None:
        self.news.append(f"waited {data['waited_s']:.1f} s for {data['what']}, longer than its deadline")

    def _on_run_finished(self, event: Event, data: Mapping[str, Any]) -> None:
        self.phase = str(data["status"])
        self.news.append(f"{data['status']}: {data['why']}")


def sparkline(values: Iterable[float], low: float, high: float) -> str:
    """One character per value, from `low` to `high`."""
    width = max(high - low, 1e-12)
    return "".join(BARS[min(len(BARS) - 1, max(0, int((value - low) / width * len(BARS))))] for value in values)


def waiting(state: Picture, now_s: float) -> list[tuple[str, str]]:
    """Who does what, and what it waits for, in plain words: (part, words)."""
    batch = state.started.get("batch", 0)
    trainer = f"{state.trainer} since {max(0.0, now_s - state.trainer_since_s):.1f} s"
    if state.trainer == "waiting for a batch":
        trainer += f"; {state.ready} finished trajectories, a batch is {batch}"
    lines = [("trainer", trainer)]
    for engine, live in sorted(state.live.items()):
        served = state.served.get(engine, -1)
        behind = f", trainer has v{state.version}" if 0 <= served < state.version else ""
        doing = f"{live} requests live" if live else "no request"
        lines.append((engine, f"{doing}; serves v{served}{behind}" if served >= 0 else "has no weights yet"))
    parts = [f"{state.at.get(phase, 0)} {phase}" for phase in ("opening", "generating", "stepping")]
    lines.append(("trajectories", ", ".join(parts)))
    return lines


def plain_line(state: Picture) -> str:
    """One line about the last step, in ASCII."""
    row, steps = state.row, state.started.get("steps", "?")
    parts = [f"step {state.step}/{steps} ({state.t:.0f} s)"]
    for task, kept in state.history.items():
        parts.append(f"{task}: reward {kept[-1][0]:.3f}, success {kept[-1][1]:.2f}")
    row_s = row.get("time/all/row/value", 0.0)
    waited_s = row.get("time/all/wait_for_batch/sum", 0.0)
    parts.append(
        f"{row.get('throughput/all/trajectories/per_s', 0.0):.0f} trajectories/s, "
        f"{row.get('throughput/all/sampled_tokens/per_s', 0.0):.0f} tokens/s"
    )
    parts.append(f"staleness {row.get('staleness/all/oldest/mean', 0.0):.2f}")
    if row_s > 0:
        idle = row.get("engine/all/idle/mean", 0.0)
        parts.append(f"trainer waited {min(1.0, waited_s / row_s):.0%}, engines idle {idle:.0%}")
    return " | ".join(parts)
