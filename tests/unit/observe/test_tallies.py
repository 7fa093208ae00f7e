"""Statistics that are added up late are those that are added up at once, to the last bit."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.observe.metric_names import lookup
from rollart.observe.metric_rows import MOST_KEPT, Row, Tallies
from rollart.observe.tally import Stat

VALUES = st.none() | st.integers(-(2**40), 2**40) | st.floats() | st.sampled_from([0, 0.0, -0.0, 1, 1.0, True])
NAMES = st.sampled_from([("reward", "trained"), ("time", "turn"), ("rollout", "turns"), ("engine", "sticky")])
NOTES = st.lists(st.tuples(NAMES, st.sampled_from(["a", "b", "all"]), VALUES), max_size=60)


def at_once(notes: list[tuple[tuple[str, str], str, float | None]]) -> dict[tuple[str, str, str], Stat]:
    """One number after the other, each into the statistics of its task and of all."""
    stats: dict[tuple[str, str, str], Stat] = {}
    for (area, name), task, value in notes:
        for scope in dict.fromkeys((task, "all")):
            stats.setdefault((area, scope, name), Stat()).add(value)
    return stats


@settings(max_examples=150, deadline=None)
@given(NOTES, st.sets(st.integers(0, 60), max_size=4))
def test_late_sums_are_the_sums(notes: list[tuple[tuple[str, str], str, float | None]], asked_at: set[int]) -> None:
    tallies, row = Tallies(), Row()
    for index, ((area, name), task, value) in enumerate(notes):
        tallies.note(area, task, name, value)
        if index in asked_at:
            so_far = at_once(notes[: index + 1])
            assert repr(tallies.total(area, task, name)) == repr(so_far[area, task, name].total)
    together = Tallies()
    for (area, name), task in dict.fromkeys(note[:2] for note in notes):
        together.note_all(area, task, name, [value for key, of, value in notes if (key, of) == ((area, name), task)])
    for (area, name), task, _ in notes:
        if task != "all" and not any(key == (area, name) and of != task for key, of, _ in notes):
            assert repr(together.total(area, "all", name)) == repr(tallies.total(area, "all", name))
    tallies.into(row)
    expected: Row = {}
    for (area, scope, name), stat in at_once(notes).items():
        metric = lookup(area, name)
        assert metric is not None
        every = {
            "mean": stat.mean,
            "std": stat.std,
            "min": stat.min,
            "max": stat.max,
            "sum": stat.total,
            "count": stat.n,
        }
        found = {f"{area}/{scope}/{name}/{kind}": every[kind] for kind in metric.stats}
        expected |= {key: one for key, one in found.items() if one is not None}
    assert json.dumps(row, sort_keys=True) == json.dumps(expected, sort_keys=True)


@given(st.lists(VALUES), st.lists(VALUES))
def test_many_at_a_time_are_one_after_the_other(first: list[float | None], rest: list[float | None]) -> None:
    one, many = Stat(), Stat()
    for value in (*first, *rest):
        one.add(value)
    many.add_all(first)
    many.add_all(rest)
    assert repr(many) == repr(one)


def test_what_is_kept_is_bounded_and_nothing_of_it_is_lost() -> None:
    tallies, n = Tallies(), 3 * MOST_KEPT + 7
    for index in range(n):
        tallies.note("time", "ab"[index % 2], "turn", 0.1)
        assert sum(map(len, tallies._kept.values())) <= 2 * MOST_KEPT
    row = Row()
    tallies.into(row)
    assert tallies.total("time", "all", "turn") == pytest.approx(0.1 * n)
    assert row["time/all/turn/mean"] == pytest.approx(0.1)
    assert math.isclose(tallies.total("time", "a", "turn") + tallies.total("time", "b", "turn"), 0.1 * n)
