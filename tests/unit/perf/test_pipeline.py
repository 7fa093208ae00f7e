"""Closed forms of pipeline schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.pipeline import Schedule, balanced_layers, bubble_fraction, schedule_s

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved", "zero_bubble", "dualpipe")
seconds = st.floats(1e-3, 10.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_m_plus_p_minus_1_slots(schedule: Schedule) -> None:
    whole = schedule_s(schedule, stage_forward_s=[0.25] * 4, stage_backward_s=[0.5] * 4, micro_batches=8)
    assert whole == (8 + 4 - 1) * 0.75


@pytest.mark.parametrize(("stages", "batches", "chunks"), [(4, 8, 1), (8, 64, 4), (16, 16, 2)])
def test_bubble_is_p_minus_1_over_m_and_chunks_divide_it(stages: int, batches: int, chunks: int) -> None:
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    share = bubble_fraction(schedule, stages=stages, micro_batches=batches, chunks=chunks)
    assert share == pytest.approx((stages - 1) / batches / chunks, rel=1e-12)


def test_zero_bubble_leaves_forward_plus_input_gradient_minus_weight_gradient() -> None:
    whole = schedule_s("zero_bubble", stage_forward_s=[1.0] * 4, stage_backward_s=[2.0] * 4, micro_batches=8)
    assert whole == 8 * 3.0 + 3 * (1.0 + 1.0 - 1.0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8), st.integers(1, 32))
def test_no_schedule_beats_the_busiest_stage(
    schedule: Schedule, stages: list[tuple[float, float]], batches: int
) -> None:
    whole = schedule_s(
        schedule, stage_forward_s=[f for f, _ in stages], stage_backward_s=[b for _, b in stages],
        micro_batches=batches, chunks=2,
    )  # fmt: skip
    assert whole >= batches * max(f + b for f, b in stages) * (1 - 1e-12)


def test_a_slow_stage_sets_the_pace_and_the_others_fill_and_drain() -> None:
    whole = schedule_s("1f1b", stage_forward_s=[1.0, 2.0, 1.0], stage_backward_s=[0.0] * 3, micro_batches=5)
    assert whole == 5 * 2.0 + 2.0


def test_more_stages_than_times_or_no_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of each per stage"):
        schedule_s("1f1b", stage_forward_s=[1.0], stage_backward_s=[], micro_batches=1)
    with pytest.raises(ConfigError, match="at least 1"):
        schedule_s("1f1b", stage_forward_s=[1.0], stage_backward_s=[1.0], micro_batches=0)


def test_layers_are_split_equally_where_they_divide() -> None:
    assert balanced_layers(96, 8, first_extra=0.0, last_extra=3.0) == (12,) * 8


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 130), st.integers(1, 8), st.floats(0.0, 3.0))
def test_an_uneven_split_keeps_all_layers_and_relieves_the_head(layers: int, stages: int, head: float) -> None:
    counts = balanced_layers(layers, stages, first_extra=0.0, last_extra=head)
    assert sum(counts) == layers
    if layers % stages:
        loads = [count + (head if index == stages - 1 else 0.0) for index, count in enumerate(counts)]
        assert max(loads) <= (layers + head) / stages + 1 + 1e-9 or max(loads) == head
