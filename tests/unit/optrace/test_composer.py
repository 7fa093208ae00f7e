"""Nodes in time: streams, meetings, deadlocks, and that lateness never grows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError, DeadlockError, InvariantBroken
from rollart.optrace.composer import TICKS_PER_S, Composer, Graph, seconds, ticks


def test_a_stream_runs_in_order_and_streams_beside_each_other() -> None:
    composer = Composer()
    first = composer.run(0, "compute", "a", 5)
    composer.run(0, "comm", "b", 7, after=[first])
    last = composer.run(0, "compute", "c", 4)
    times = composer.graph.place()
    assert [times[node.event] for node in composer.nodes] == [0, 5, 5]
    assert composer.finish(times) == 12
    assert times[composer.nodes[last].event] + 4 == 9


def test_a_meeting_starts_when_the_last_member_arrives() -> None:
    composer = Composer()
    for rank, work in enumerate((3, 9, 6)):
        composer.run(rank, "compute", "work", work)
        composer.run(rank, "comm", "reduce", 2, after=[2 * rank], meeting="all", members=3)
    times = composer.graph.place()
    assert {times[node.event] for node in composer.nodes[1::2]} == {9}
    assert composer.finish(times) == 11


def test_a_member_that_never_comes_is_reported_with_all_that_wait() -> None:
    composer = Composer()
    composer.run(0, "comm", "send", 1, meeting="forward 3", members=2)
    composer.run(0, "compute", "next", 1, after=[0])
    with pytest.raises(DeadlockError) as stuck:
        composer.graph.place()
    assert "send met first by rank 0 (waits for 1 more to come)" in stuck.value.waiting
    assert "next of rank 0 (waits for send met first by rank 0)" in stuck.value.waiting


def test_a_circle_is_reported_and_not_hung() -> None:
    graph = Graph()
    first = graph.event(("forward 0 of stage 1",))
    second = graph.event(("forward 0 of stage 0",), [(first, 3)])
    graph.wait(first, [(second, 3)])
    graph.event(("free",))
    with pytest.raises(DeadlockError, match=r"forward 0 of stage 1 \(waits for forward 0 of stage 0\)"):
        graph.place()


def test_one_member_too_many_no_time_and_no_work_are_refused() -> None:
    composer = Composer()
    with pytest.raises(InvariantBroken, match="nothing was composed"):
        composer.finish([])
    for rank in (0, 1):
        composer.run(rank, "comm", "reduce", 1, meeting="all", members=2)
    with pytest.raises(InvariantBroken, match="one member too many"):
        composer.run(2, "comm", "reduce", 1, meeting="all", members=2)
    with pytest.raises(ConfigError, match="0 ticks"):
        composer.run(0, "compute", "nothing", 0)
    for duration in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="finite time above 0"):
            ticks(duration)


def test_ticks_are_picoseconds_and_work_takes_at_least_one() -> None:
    assert ticks(1.5) == 3 * TICKS_PER_S // 2
    assert seconds(ticks(1e-6)) == 1e-6
    assert ticks(1e-20) == 1


Steps = list[tuple[int, bool, int, bool]]
steps = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 50), st.booleans()), min_size=1, max_size=40
)
"""(rank, whether all meet, ticks, whether it waits for the rank's node before last)."""


def _composed(work: Steps, delays: dict[int, int], longer: dict[int, int]) -> list[int]:
    """Starts of all nodes; ranks begin late by `delays`, nodes last longer by `longer`."""
    composer = Composer()
    starts = [composer.graph.event(("start", rank)) for rank in range(4)]
    issued: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for number, (only, meet, length, older) in enumerate(work):
        for rank in range(4) if meet else [only]:
            before = issued[rank]
            node = composer.run(
                rank, "comm" if meet else f"stream {older}", "work", length + longer.get(number, 0),
                after=before[-2:-1] if older else before[-1:], edges=[(starts[rank], 0)],
                meeting=("all", number) if meet else None, members=4 if meet else 1,
            )  # fmt: skip
            before.append(node)
    times = composer.graph.place({starts[rank]: late for rank, late in delays.items()})
    return [times[node.event] for node in composer.nodes]


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 3), st.integers(1, 100))
def test_a_late_rank_makes_nothing_earlier_and_nothing_later_than_it_is_late(work: Steps, rank: int, late: int) -> None:
    usual, delayed = _composed(work, {}, {}), _composed(work, {rank: late}, {})
    assert all(0 <= after - before <= late for before, after in zip(usual, delayed, strict=True))


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 39), st.integers(1, 100))
def test_longer_work_makes_nothing_earlier(work: Steps, number: int, more: int) -> None:
    usual, longer = _composed(work, {}, {}), _composed(work, {}, {number: more})
    assert all(before <= after <= before + more for before, after in zip(usual, longer, strict=True))
