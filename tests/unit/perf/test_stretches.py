"""Lives through stretches of several paces, and quantiles of tokens and events."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.perf.stretches import Round, Stretch, life_s, poisson_quantile, quantile_of, weighted_median

NOW = Round(1.0, 1.0, 1.0, 0.0)
AMOUNT = st.floats(min_value=0.01, max_value=100.0)
RUNS = st.lists(st.tuples(AMOUNT, AMOUNT), min_size=1, max_size=5).map(
    lambda pairs: [Stretch(rounds, seconds, 1.0, NOW) for rounds, seconds in pairs]
)


def test_a_life_takes_the_pace_of_each_stretch_that_it_passes() -> None:
    run = [Stretch(0.0, 5.0, 0.0, NOW), Stretch(10.0, 20.0, 4.0, NOW), Stretch(10.0, 10.0, 2.0, NOW)]
    assert life_s(run, 5.0, 10.0) == 20.0
    assert life_s(run, 5.0, 15.0) == 25.0  # five of the slow, five of the fast
    assert life_s(run, 15.0, 10.0) == 15.0
    assert life_s(run, 2.0, 1.0) == 5.0  # waits until the prompts are read
    assert life_s(run, 1000.0, 7.0) == 7.0  # the last pace goes on


@settings(deadline=None, max_examples=60)
@given(RUNS, AMOUNT, AMOUNT, AMOUNT)
def test_a_life_is_the_sum_of_its_parts_and_who_begins_later_ends_later(
    run: list[Stretch], start: float, first: float, then: float
) -> None:
    middle = start + life_s(run, start, first)
    assert middle + life_s(run, middle, then) == pytest.approx(start + life_s(run, start, first + then), rel=1e-6)
    assert start + then + life_s(run, start + then, first) >= middle * (1 - 1e-9)


def test_quantiles_are_of_weight_and_of_events() -> None:
    assert weighted_median([(3.0, 1.0), (1.0, 1.0), (2.0, 1.5)]) == 2.0
    assert weighted_median([(9.0, 0.1), (1.0, 5.0)]) == 1.0
    assert (quantile_of([1.0, 2.0, 3.0, 4.0], 0.5), quantile_of([1.0, 2.0], 1.0)) == (3.0, 2.0)
    assert (poisson_quantile(0.5, 0.6), poisson_quantile(0.5, 0.61), poisson_quantile(13.0, 0.5)) == (0, 1, 13)


@pytest.mark.parametrize("mean", [0.3, 2.0, 30.0])
def test_events_keep_their_mean_over_all_quantiles(mean: float) -> None:
    shares = [(place + 0.5) / 4000 for place in range(4000)]
    assert math.fsum(poisson_quantile(mean, share) for share in shares) / 4000 == pytest.approx(mean, rel=5e-3)
