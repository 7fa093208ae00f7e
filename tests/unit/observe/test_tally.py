"""Accumulators against the plain way of computing the same."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollart.observe.tally import Busy, EngineMeter, Stat, task_of, wilson

TIMES = st.integers(0, 60)


@given(st.lists(st.tuples(TIMES, st.integers(0, 15)), max_size=20), TIMES, TIMES)
def test_busy_time_is_the_length_of_the_union(ended: list[tuple[int, int]], one: int, other: int) -> None:
    busy = Busy()
    covered = set()
    for end, length in sorted(ended):
        busy.add(end - length, end)
        covered |= set(range(end - length, end))
    start, end = min(one, other), max(one, other)
    assert busy.within(start, end) == len(covered & set(range(start, end)))


@given(st.lists(st.tuples(TIMES, st.booleans(), st.integers(0, 3)), max_size=30))
def test_engine_time_is_the_integral_of_live_requests(changes: list[tuple[int, bool, int]]) -> None:
    meter, last = EngineMeter(), 0
    live: set[int] = set()
    meter.joined("e", 0)
    idle = requests = 0
    for t, starts, request in sorted(changes):
        requests += (t - last) * len(live)
        idle += (t - last) * (not live)
        last = t
        if starts:
            meter.routed("e", request, t)
            live.add(request)
        else:
            meter.done("e", request, t)
            live.discard(request)
    read = meter.read(last)
    assert (read.seen_s, read.idle_s, read.request_s) == (last, idle, requests)
    assert meter.live == {"e": len(live)}


def test_a_lost_engine_counts_until_it_is_lost() -> None:
    meter = EngineMeter()
    meter.joined("a", 0)
    meter.joined("b", 0)
    meter.routed("a", 1, 2)
    meter.lost("a", 6)
    meter.done("a", 1, 7)
    read = meter.read(10)
    assert (read.seen_s, read.idle_s, read.request_s) == (16, 12, 4)
    assert read.idle_share == 12 / 16
    assert read.mean_live == 4 / 16
    meter.reset(10)
    assert meter.read(11).seen_s == 1


def test_moments() -> None:
    stat = Stat()
    assert (stat.mean, stat.std, stat.min, stat.max) == (None, None, None, None)
    for value in (1.0, 2.0, 6.0, None, math.nan, math.inf):
        stat.add(value)
    assert (stat.n, stat.mean, stat.min, stat.max) == (3, 3.0, 1.0, 6.0)
    assert stat.std is not None
    assert math.isclose(stat.std, math.sqrt((4 + 1 + 9) / 3))


def test_wilson_interval_against_published_values() -> None:
    # Newcombe 1998, table I: 81/263 and 0/20 and 1/29
    for count, n, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        found = wilson(count / n, n)
        assert abs(found[0] - low) < 5e-5
        assert abs(found[1] - high) < 5e-5
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_the_task_is_in_the_id() -> None:
    assert task_of("train/frozen_lake/0/12/3") == "frozen_lake"
    assert task_of("eval/max_digit/1/2") == "max_digit"
