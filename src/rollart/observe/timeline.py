"""From events to a Chrome trace (chrome://tracing, ui.perfetto.dev): who did what, when.

Processes are lanes: the trainer, each pool of engines, each env host, control. Within a pool each engine has rows of its own.
Turns and environment steps that overlap are put in as few rows as hold them without overlap. Invariant: one pass over the
events, with memory for what is open only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollart.core.errors import StoreError
from rollart.observe.log import Event, read_events
from rollart.observe.metrics import request_of, steps_done
from rollart.observe.summary import figures_of
from rollart.observe.tally import EngineMeter, task_of

TRAINER, CONTROL, FIRST_POOL, FIRST_HOST = 1, 2, 1_000, 100_000
"""Process ids in the trace, which viewers sort by."""
ROWS = 10_000
"""Row numbers of one engine within its pool, more than it has turns at once: rows of an engine stay together."""
INSTANTS = (
    "group_dropped",
    "abort_requested",
    "failure_decided",
    "engine_lost",
    "host_lost",
    "trainer_lost",
    "trainer_restarted",
    "resumed",
    "wait_expired",
    "advisory",
)


class Slots:
    """Rows for intervals that come in order of their ends: the fullest row that is free at the start is taken."""

    __slots__ = ("_ends", "_rows")

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._rows: list[int] = []

    def place(self, start: float, end: float) -> int:
        """A row, from 0, in which [start, end] overlaps nothing that was placed before."""
        at = bisect_right(self._ends, start) - 1
        row = len(self._rows)
        if at >= 0:
            del self._ends[at]
            row = self._rows.pop(at)
        self._ends.append(end)
        self._rows.append(row)
        return row


class TraceFold:
    """Feed events in order; each call returns the trace events that it completed."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._lanes: dict[int, int] = {}
        self._slots: dict[tuple[int, int], Slots] = {}
        self._pools: dict[str, str] = {}
        self._early: dict[str, list[Event]] = {}
        self._rows: dict[str, int] = {}
        """Engine -> the first of its rows."""
        self._seen: set[tuple[int, int]] = set()
        self._meter = EngineMeter()
        self._host: dict[tuple[str, int], str] = {}
        self._evals: dict[str, float] = {}

    def __call__(self, event: Event) -> list[dict[str, Any]]:
        return list(self._of(event))

    def _of(self, event: Event) -> Iterator[dict[str, Any]]:
        kind, t, data = event["kind"], event["t"], event["data"]
        if kind == "engine_joined":
            self._pools[event["engine"]] = data["pool"]
            for early in self._early.pop(event["engine"], ()):
                yield from self._weights(early)
        elif kind == "turn_routed":
            self._meter.routed(event["engine"], request_of(event), t)
            yield from self._live(event["engine"], t)
        elif kind == "turn_done":
            self._meter.done(event["engine"], request_of(event), t)
            yield from self._live(event["engine"], t)
            args = {**_ids(event), "spans": data["spans"], "sampled": data["sampled"], "finish": data["finish"]}
            engine, name = event["engine"], f"{task_of(event['traj'])} turn"
            pid, first = self._engine(engine)
            yield from self._slot(pid, name, t, data["seconds"], args, first=first, of=f"{engine} ")
        elif kind in ("env_opened", "env_stepped"):
            if kind == "env_opened":
                self._host[event["traj"], event["attempt"]] = event["host"]
            host = self._host.get((event["traj"], event["attempt"]), "?")
            pid = self._pid(f"environments {host}", FIRST_HOST)
            name = f"{task_of(event['traj'])} {'open' if kind == 'env_opened' else 'step'}"
            yield from self._slot(pid, name, t, data["seconds"], _ids(event))
        elif kind == "traj_finished":
            self._host.pop((event["traj"], event["attempt"]), None)
        elif kind in ("applied", "prefetched"):
            if event["engine"] in self._pools:
                yield from self._weights(event)
            else:  # its first version, with which it joins
                self._early.setdefault(event["engine"], []).append(event)
        else:
            yield from self._control(kind, t, event, data)

    def _weights(self, event: Event) -> Iterator[dict[str, Any]]:
        engine, data = event["engine"], event["data"]
        args = {"version": event["version"], **{name: data[name] for name in ("exposed_s", "live") if name in data}}
        pid, first = self._engine(engine)
        yield from self._span(pid, first, f"{engine} weights", event["kind"], event["t"], data["seconds"], args)

    def _no_engines(self, t: float) -> Iterator[dict[str, Any]]:
        """The run was resumed: nothing is live on the engines before it."""
        gone = list(self._meter.live)
        self._meter.all_lost(t)
        for engine in gone:
            yield from self._live(engine, t)

    def _control(self, kind: str, t: float, event: Event, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if kind == "resumed":
            self._host.clear()
            yield from self._no_engines(t)
        if kind == "step_finished":
            args = {"step": event["step"], "version": event["version"], "trained_tokens": data["trained_tokens"]}
            pid = self._pid("trainer", TRAINER)
            yield from self._span(pid, 1, "steps", f"step {steps_done(event)}", t, data["seconds"], args)
        elif kind == "published":
            args = {"version": event["version"], "bytes": data["bytes"], "buckets": data["buckets"]}
            pid = self._pid("trainer", TRAINER)
            yield from self._span(pid, 2, "publish", f"publish v{event['version']}", t, data["seconds"], args)
        elif kind == "batch_released":
            args = {"step": event["step"], "staleness_max": data["staleness_max"], "trajectories": data["trajectories"]}
            pid = self._pid("trainer", TRAINER)
            yield from self._span(pid, 3, "wait for batch", "wait for batch", t, data["waited_s"], args)
        elif kind == "checkpointed":
            args = {"step": event["step"], "version": event["version"]}
            pid = self._pid("control", CONTROL)
            yield from self._span(
                pid, 3, "checkpoints", f"checkpoint of step {event['step']}", t, data["seconds"], args
            )
        elif kind == "eval_started":
            self._evals[event["eval"]] = t
        elif kind == "eval_finished":
            start = self._evals.pop(event["eval"], t)
            args = {"version": event["version"], "complete": data["complete"]}
            pid = self._pid("control", CONTROL)
            yield from self._span(pid, 1, "evaluation", f"evaluation {event['eval']}", t, t - start, args)
        elif kind in INSTANTS:
            pid = self._pid("control", CONTROL)
            yield from self._named(pid, 2, "decisions")
            args = {**_ids(event), **data}
            yield {
                "ph": "i",
                "s": "p",
                "name": kind,
                "cat": "control",
                "ts": _us(t),
                "pid": pid,
                "tid": 2,
                "args": args,
            }

    def _pid(self, name: str, first: int) -> int:
        if name not in self._pids:
            self._pids[name] = first + self._lanes.get(first, 0)
            self._lanes[first] = self._lanes.get(first, 0) + 1
        return self._pids[name]

    def _engine(self, engine: str) -> tuple[int, int]:
        """Its pool's process, and the first of its rows there."""
        pid = self._pid(f"pool {self._pools.get(engine, 'default')}", FIRST_POOL)
        return pid, self._rows.setdefault(engine, len(self._rows) * ROWS)

    def _live(self, engine: str, t: float) -> Iterator[dict[str, Any]]:
        pid, first = self._engine(engine)
        live = self._meter.live_on(engine)
        name = f"{engine} live requests"
        yield {"ph": "C", "name": name, "ts": _us(t), "pid": pid, "tid": first, "args": {"live": live}}

    def _slot(
        self, pid: int, name: str, t: float, seconds: float, args: Mapping[str, Any], *, first: int = 0, of: str = ""
    ) -> Iterator[dict[str, Any]]:
        row = self._slots.setdefault((pid, first), Slots()).place(t - seconds, t)
        yield from self._span(pid, first + row + 1, f"{of}slot {row}", name, t, seconds, args)

    def _span(
        self, pid: int, tid: int, row: str, name: str, t: float, seconds: float, args: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        yield from self._named(pid, tid, row)
        start, end = _us(t - seconds), _us(t)
        yield {
            "ph": "X",
            "name": name,
            "cat": name.split(" ", maxsplit=1)[0],
            "ts": start,
            "dur": end - start,
            "pid": pid,
            "tid": tid,
            "args": args,
        }

    def _named(self, pid: int, tid: int, row: str) -> Iterator[dict[str, Any]]:
        if (pid, -1) not in self._seen:
            self._seen.add((pid, -1))
            name = next(name for name, known in self._pids.items() if known == pid)
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        if (pid, tid) not in self._seen:
            self._seen.add((pid, tid))
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}


def _us(t: float) -> int:
    return round(t * 1e6)


def _ids(event: Event) -> dict[str, Any]:
    args = {name: event[name] for name in ("traj", "attempt", "turn", "version") if name in event}
    traj = event.get("traj")
    if traj is not None:
        args["task"], args["group"] = task_of(traj), event.get("group", traj.rpartition("/")[0])
    elif "group" in event:
        args["task"], args["group"] = event["task"], event["group"]
    return args


def trace_events(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Chrome trace events; times in whole microseconds since the run began."""
    fold = TraceFold()
    for event in events:
        yield from fold(event)


def write_trace(run_dir: Path) -> Path:
    """Write `timeline.json` beside `events.jsonl`. Raises StoreError."""
    header, events = read_events(run_dir / "events.jsonl")
    path = run_dir / "timeline.json"
    try:
        with path.open("w", encoding="utf-8") as file:
            about = json.dumps({**header, "figures": figures_of(header)})
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n')
            for index, item in enumerate(trace_events(events)):
                file.write(("" if index == 0 else ",\n") + json.dumps(item, separators=(",", ":")))
            file.write("\n]}\n")
    except StoreError:
        raise
    except OSError as error:
        at = path.stat().st_size if path.is_file() else 0
        raise StoreError(f"{path}: cannot be written at byte {at}: {error.strerror}") from error
    return path
