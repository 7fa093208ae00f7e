"""Lives and outages as draws: the law that they follow, and that they depend on what they are of alone."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.faults import RewardFaults
from rollart.sim.fault_draws import Outages, Span, life_s


def test_lives_are_exponential_with_the_mean_that_is_given() -> None:
    lives = [life_s(600.0, 0, "engine", f"roll/0/{place}", nth) for place in range(64) for nth in range(64)]
    sampling_error = 600.0 / math.sqrt(len(lives))
    assert statistics.mean(lives) == pytest.approx(600.0, abs=3 * sampling_error)
    assert statistics.stdev(lives) == pytest.approx(600.0, rel=0.1)
    longer = sum(life > 600.0 for life in lives) / len(lives)
    assert longer == pytest.approx(math.exp(-1), abs=3 * 0.5 / math.sqrt(len(lives)))


def test_a_life_is_of_its_seed_and_place_and_scales_with_the_mean() -> None:
    one = life_s(100.0, 1, "node", "roll/0", 0)
    assert one == life_s(100.0, 1, "node", "roll/0", 0)
    assert life_s(300.0, 1, "node", "roll/0", 0) == pytest.approx(3 * one)
    others = {
        life_s(100.0, 2, "node", "roll/0", 0),
        life_s(100.0, 1, "node", "roll/1", 0),
        life_s(100.0, 1, "node", "roll/0", 1),
    }
    assert len(others | {one}) == 4
    assert life_s(0.0, 1, "node", "roll/0", 0) == math.inf


@given(
    st.floats(0.0, 500.0), st.floats(0.1, 300.0), st.integers(0, 9),
    st.lists(st.tuples(st.floats(0.0, 2000.0), st.floats(0.1, 500.0)), max_size=3),
    st.lists(st.floats(0.0, 3000.0), min_size=1, max_size=30),
)  # fmt: skip
def test_what_comes_next_is_what_covers_this_instant_or_the_first_to_begin(
    mtbf_s: float, outage_s: float, seed: int, scripted: list[tuple[float, float]], asked: list[float]
) -> None:
    spans = [Span(begin, begin + length) for begin, length in scripted]
    outages, other = (Outages(RewardFaults(mtbf_s=mtbf_s, outage_s=outage_s), seed, spans) for _ in range(2))
    nth = 0
    while other.drawn(nth).begin_s < 4000.0:
        spans.append(other.drawn(nth))
        nth += 1
    for now_s in sorted(asked):
        found = outages.next(now_s)
        assert found.end_s > now_s
        assert (found.begin_s <= now_s) == any(span.holds(now_s) for span in spans)
        later = [span.begin_s for span in spans if span.begin_s > now_s]
        if found.begin_s > now_s and later:
            assert found.begin_s == min(later)


def test_drawn_outages_follow_one_another_and_last_as_long_as_they_are_said_to() -> None:
    outages = Outages(RewardFaults(mtbf_s=900.0, outage_s=60.0), 0)
    made = [outages.drawn(nth) for nth in range(500)]
    assert all(span.end_s == span.begin_s + 60.0 for span in made)
    gaps = [after.begin_s - before.end_s for before, after in pairwise(made)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(900.0, abs=3 * 900.0 / math.sqrt(len(gaps)))


def test_without_a_law_there_is_no_outage_but_those_that_are_scripted() -> None:
    outages = Outages(RewardFaults(), 0, [Span(10.0, 20.0)])
    assert outages.next(5.0) == (10.0, 20.0)
    assert outages.next(20.0).begin_s == math.inf
