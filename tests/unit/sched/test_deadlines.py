"""One deadline over a trajectory's whole life; every call fits into it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sched.timeouts import TEARDOWN_MAX_S, TEARDOWN_SHARE, answer_grace, call_deadline, work_deadline

seconds = st.floats(0.001, 1e5)


@given(st.floats(0, 1e6), seconds)
def test_work_ends_early_enough_for_late_answers_and_teardown(started_s: float, life_s: float) -> None:
    end_s = started_s + life_s
    work_s, grace_s = work_deadline(started_s, life_s), answer_grace(life_s)
    assert started_s < work_s < end_s
    assert 0 < grace_s <= TEARDOWN_MAX_S / 2
    assert work_s + grace_s <= end_s, "a call that nobody answers still leaves time for teardown"
    assert end_s - work_s == pytest.approx(2 * grace_s, abs=1e-6)


def test_what_is_kept_back_is_a_share_of_the_life_up_to_a_limit() -> None:
    assert work_deadline(10.0, 100.0) == 10.0 + 100.0 * (1 - TEARDOWN_SHARE)
    assert work_deadline(0.0, 1e4) == 1e4 - TEARDOWN_MAX_S


@given(seconds, seconds, seconds)
def test_a_call_has_its_own_limit_cut_to_the_overall_deadline(now_s: float, limit_s: float, overall_s: float) -> None:
    deadline_s = call_deadline(now_s, limit_s, overall_s)
    assert deadline_s <= overall_s
    assert deadline_s <= now_s + limit_s
    assert deadline_s in (overall_s, now_s + limit_s)
    assert call_deadline(now_s, limit_s, float("inf")) == now_s + limit_s
