"""The timeline of a predicted step as a Chrome trace, for ui.perfetto.dev: a process for each rank class, rows for streams.

Owns the file. Invariant: what is written comes from the composer's slices, and behind them what of the step no task composes,
so that it ends when the step does; slices of a row (computation, each stream of communication) do not overlap. Why classes
and not ranks: ranks of a class do the same at the same time, and a file of 65,536 processes opens nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rollart.core.errors import StoreError
from rollart.optrace.prediction import Prediction
from rollart.optrace.step_timeline import Slice

MICROSECONDS = 1e6
FIRST_ROWS = ("compute", "comm", "copy")
"""Rows that stand first, in this order."""
BESIDE_TASKS = "beside the tasks"
"""Row of what no task composes."""


def trace_events(ranks: Mapping[str, int], slices: Iterable[Slice]) -> Iterator[dict[str, Any]]:
    """Chrome trace events; `ranks`: rank class -> ranks that it stands for."""
    processes = {name: at + 1 for at, name in enumerate(ranks)}
    rows: dict[tuple[str, str], int] = {}
    for name, pid in processes.items():
        label = f"{name} ({ranks[name]:,} ranks)"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for one in slices:
        pid, key = processes[one.rank_class], (one.rank_class, one.stream)
        if key not in rows:
            own = sum(name == one.rank_class for name, _ in rows)
            rows[key] = FIRST_ROWS.index(one.stream) + 1 if one.stream in FIRST_ROWS else len(FIRST_ROWS) + 1 + own
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rows[key], "args": {"name": one.stream}}
        yield {
            "ph": "X", "name": one.name, "cat": one.stream, "ts": round(one.start_s * MICROSECONDS, 3),
            "dur": round((one.end_s - one.start_s) * MICROSECONDS, 3), "pid": pid, "tid": rows[key],
            "args": {"provenance": one.provenance, "micro_batch": one.micro_batch, "chunk": one.chunk},
        }  # fmt: skip


def uncomposed(prediction: Prediction, composed_s: float) -> Iterator[Slice]:
    """What a step has beside its tasks, of every class: the host's work outside layers, then the slowest of many nodes."""
    ends_s = prediction.step_s - prediction.jitter_s
    for one in prediction.classes:
        for name, start_s, end_s in (
            ("host outside layers", composed_s, ends_s), ("slowest of many nodes", ends_s, prediction.step_s),
        ):  # fmt: skip
            if end_s > start_s:
                yield Slice(
                    rank_class=one.name, stream=BESIDE_TASKS, name=name, start_s=start_s, end_s=end_s,
                    provenance="analytic", micro_batch=-1, chunk=-1,
                )  # fmt: skip


def write_timeline(path: Path, prediction: Prediction, slices: Iterable[Slice], *, composed_s: float) -> None:
    """Write the trace, event by event; `composed_s`: when the last task ends. Raises StoreError."""
    ranks = {one.name: one.ranks for one in prediction.classes}
    about = {
        "figures": "estimated",
        "model": prediction.model,
        "device": prediction.device,
        "step_s": prediction.step_s,
        "composed_s": composed_s,
    }
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            for at, event in enumerate(trace_events(ranks, chain(slices, uncomposed(prediction, composed_s)))):
                file.write(("" if at == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
