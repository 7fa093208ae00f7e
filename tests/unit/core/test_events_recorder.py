"""An event is of a known kind, has its required fields, ids beside them, and a number and time of the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.core.events import IDS, KINDS, SCHEMA, Recorder, header, rounded_s

Event = Mapping[str, Any]


def recorded(*, clock: list[float], seq: int = 0, origin: float | None = None) -> tuple[Recorder, list[Event]]:
    events: list[Event] = []
    return Recorder((events.append,), lambda: clock[0], seq=seq, origin=origin), events


def test_an_unknown_kind_raises_and_is_not_recorded() -> None:
    record, events = recorded(clock=[0.0])
    with pytest.raises(InvariantBroken, match="'turn_dnoe' is not in the closed set"):
        record("turn_dnoe", traj="t")
    assert events == []
    assert record.seq == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_required_field_of_every_kind_is_missed(kind: str) -> None:
    record, events = recorded(clock=[0.0])
    whole = dict.fromkeys(KINDS[kind], 1)
    for name in KINDS[kind]:
        with pytest.raises(InvariantBroken, match=f"event '{kind}' lacks its required field '{name}'"):
            record(kind, **{other: value for other, value in whole.items() if other != name})
    assert events == []
    record(kind, **whole)
    (event,) = events
    assert {**event, **event["data"]}.items() >= whole.items()


def test_ids_stand_at_the_top_level_and_everything_else_in_data() -> None:
    record, events = recorded(clock=[0.0])
    record("host_lost", host="host-1", failure="gone", task="t", extra=[1])
    assert events == [
        {
            "seq": 1,
            "t": 0.0,
            "kind": "host_lost",
            "host": "host-1",
            "task": "t",
            "data": {"failure": "gone", "extra": [1]},
        }
    ]


def test_no_id_is_also_a_name_of_the_frame() -> None:
    """An id called `seq` or `data` would overwrite the event's own."""
    assert not {"seq", "t", "kind", "data"} & {*IDS, *(name for names in KINDS.values() for name in names)}


def test_numbers_rise_by_one_also_past_refused_events_and_time_counts_from_the_origin() -> None:
    clock = [100.0]
    record, events = recorded(clock=clock)
    record("host_joined", host="a")
    clock[0] = 100.25
    with pytest.raises(InvariantBroken):
        record("host_joined")
    record("host_joined", host="b")
    clock[0] = 103.123456789
    record("host_joined", host="c")
    assert [(event["seq"], event["t"]) for event in events] == [(1, 0.0), (2, 0.25), (3, 3.123457)]


@given(st.floats(0.0, 1e7))
def test_seconds_are_rounded_to_the_nearest_microsecond_as_round_does(seconds: float) -> None:
    whole = rounded_s(seconds)
    assert abs(whole - seconds) <= 0.5e-6 + 1e-8
    assert whole == round(whole, 6)


@pytest.mark.parametrize("seconds", [-1.2345678, 2e9 + 0.1234567, float("inf"), 0.0, 12.3456785])
def test_seconds_of_any_size_and_sign_are_rounded(seconds: float) -> None:
    assert rounded_s(seconds) == pytest.approx(round(seconds, 6), abs=2e-6)  # ties go up


def test_a_resumed_run_goes_on_with_its_number_and_its_time() -> None:
    record, events = recorded(clock=[5.0], seq=41, origin=-10.0)
    record("resumed", from_seq=41, lost=3)
    assert (events[0]["seq"], events[0]["t"]) == (42, 15.0)


def test_every_sink_gets_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    record = Recorder((first.append, second.append), lambda: 0.0)
    record("host_joined", host="a")
    record("host_joined", host="b")
    assert first == second
    assert [event["host"] for event in first] == ["a", "b"]


def test_the_header_says_how_to_read_the_log() -> None:
    assert header(run="r", incarnation=2, clock="virtual", world="fake", git="abc") == {
        "schema": SCHEMA,
        "run": "r",
        "incarnation": 2,
        "clock": "virtual",
        "world": "fake",
        "git": "abc",
    }
