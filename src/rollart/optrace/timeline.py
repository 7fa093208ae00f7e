"""The timeline of a predicted step as a Chrome trace, for ui.perfetto.dev: a process for each rank class, rows for streams.

Owns the file. Invariant: what is written comes from the composer's slices alone; slices of a row (computation, each stream of
communication) do not overlap. Why classes and not ranks: ranks of a class do the same at the same time, and a file of 65,536
processes opens nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollart.core.errors import StoreError
from rollart.optrace.prediction import Prediction
from rollart.optrace.step_timeline import Slice

MICROSECONDS = 1e6
FIRST_ROWS = ("compute", "comm", "copy")
"""Rows that stand first, in this order."""


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


def write_timeline(path: Path, prediction: Prediction, slices: Iterable[Slice]) -> None:
    """Write the trace, event by event. Raises StoreError."""
    ranks = {one.name: one.ranks for one in prediction.classes}
    about = {
        "figures": "estimated",
        "model": prediction.model,
        "device": prediction.device,
        "step_s": prediction.step_s,
    }
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            for at, event in enumerate(trace_events(ranks, slices)):
                file.write(("" if at == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
