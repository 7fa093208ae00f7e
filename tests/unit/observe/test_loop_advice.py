"""A control loop that woke late is in the metrics and in the advice."""

from __future__ import annotations

from typing import Any

from synthetic_run import synthetic

from rollart.observe.diagnose import diagnose
from rollart.observe.metrics import rows_of
from rollart.observe.summary import summarise


def advised(worst_s: float) -> list[str]:
    run = synthetic(steps=4)
    lag: dict[str, Any] = {"kind": "loop_lag", "data": {"worst_s": worst_s, "p99_s": 0.01, "seconds": 10.0}}
    events = [event for event in run.events if event["kind"] != "loop_lag"]
    at = next(i for i, event in enumerate(events) if event["kind"] == "step_finished")
    events.insert(at, {"seq": events[at]["seq"], "t": events[at]["t"], **lag})
    rows = rows_of(events)
    row = next(row for row in rows if "time/all/train_step/sum" in row)
    assert row["time/all/loop_lag/max"] == worst_s
    assert row["time/all/loop_lag_p99/max"] == 0.01
    return [advice.text for advice in diagnose(rows, summarise(events, run.header)) if advice.code == "loop_blocked"]


def test_a_loop_that_stood_still_is_named_in_plain_words() -> None:
    (text,) = advised(0.8)
    assert "stood still for up to 0.8 s (before the end of step 1; 1 of 4 steps" in text


def test_a_loop_that_kept_up_is_not_mentioned() -> None:
    assert advised(0.02) == []
