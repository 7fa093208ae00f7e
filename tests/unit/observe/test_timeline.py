"""A trace that viewers can draw: rows without overlap, every turn once, ids in the arguments."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import synthetic

from rollart.observe.timeline import Slots, trace_events, write_trace


def trace() -> list[dict[str, Any]]:
    return list(trace_events(synthetic(engines=2).events))


def names(trace: list[dict[str, Any]]) -> dict[int, str]:
    return {item["pid"]: item["args"]["name"] for item in trace if item["name"] == "process_name"}


def row_names(trace: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {(item["pid"], item["tid"]): item["args"]["name"] for item in trace if item["name"] == "thread_name"}


def test_no_two_spans_of_a_row_overlap() -> None:
    rows = defaultdict(list)
    for item in trace():
        if item["ph"] == "X":
            rows[item["pid"], item["tid"]].append((item["ts"], item["ts"] + item["dur"]))
    for spans in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))
    assert len(rows) > 10


def test_every_turn_is_drawn_once_with_its_ids() -> None:
    run, made = synthetic(engines=2), trace()
    lanes, rows = names(made), row_names(made)
    turns = {
        (item["args"]["traj"], item["args"]["attempt"], item["args"]["turn"], item["ts"] + item["dur"]): item
        for item in made
        if item["ph"] == "X" and item["name"].endswith(" turn")
    }
    done = [event for event in run.events if event["kind"] == "turn_done"]
    assert len(done) == len(turns)
    for event in done[::97]:
        item = turns[event["traj"], event["attempt"], event["turn"], round(event["t"] * 1e6)]
        assert lanes[item["pid"]] == "pool local"
        assert rows[item["pid"], item["tid"]].startswith(f"{event['engine']} slot ")
        assert abs(item["dur"] - event["data"]["seconds"] * 1e6) <= 1
        assert item["args"]["spans"] == event["data"]["spans"]
        assert item["args"]["group"] == event["traj"].rpartition("/")[0]
        assert item["args"]["task"] in item["name"]


def test_lanes_are_named() -> None:
    assert set(names(trace()).values()) == {
        "trainer", "control", "pool local", "environments env-0",
    }  # fmt: skip


def test_each_pool_is_a_process_and_each_engine_has_rows_of_its_own() -> None:
    events = [dict(event) for event in synthetic(engines=2).events]
    for event in events:
        if event["kind"] == "engine_joined" and event["engine"] == "engine-1":
            event["data"] = {**event["data"], "pool": "h20"}
    made = list(trace_events(events))
    lanes = names(made)
    of = {(lanes[pid], row.split(" ")[0]) for (pid, _), row in row_names(made).items() if lanes[pid].startswith("pool")}
    assert of == {("pool local", "engine-0"), ("pool h20", "engine-1")}


def test_what_an_engine_does_before_it_joins_is_drawn_in_its_pool() -> None:
    events = [dict(event) for event in synthetic(engines=1).events]
    joined = next(event for event in events if event["kind"] == "engine_joined")
    events.remove(joined)
    events.insert(next(n for n, event in enumerate(events) if event["kind"] == "applied") + 1, joined)
    assert names(list(trace_events(events))) == names(list(trace_events(synthetic(engines=1).events)))


def test_steps_publishes_waits_and_applies_are_there() -> None:
    run, made = synthetic(engines=2), trace()
    counts = {
        "wait for batch": run.steps,
        "applied": 2 * (run.steps + 1),
        "evaluation before": 1,
        f"publish v{run.steps}": 1,
        "step 1": 1,
        f"step {run.steps}": 1,
    }
    assert {name: sum(item["name"] == name for item in made) for name in counts} == counts


def test_the_file_is_whole_json(tmp_path: Path) -> None:
    run = synthetic(engines=2)
    loaded = json.loads(write_trace(run.write(tmp_path)).read_text(encoding="utf-8"))
    assert loaded["traceEvents"] == trace()
    assert loaded["otherData"]["figures"] == "measured"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=40))
def test_slots_never_overlap_and_no_row_is_skipped(items: list[tuple[int, int]]) -> None:
    slots, rows = Slots(), defaultdict(list)
    for end, length in sorted(items):
        rows[slots.place(end - length, end)].append((end - length, end))
    for spans in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert set(rows) == set(range(len(rows)))
