"""What follows a failed attempt, as a table; patience; where the tokens of a failed attempt are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import FAILURE_KINDS, failure
from rollart.core.types import DROP_REASONS, Boundary
from rollart.sched.failure import (
    OUTAGE_AFTER,
    Decision,
    DropMember,
    EndRun,
    Patience,
    Policy,
    ReplaceGroup,
    Restarts,
    Retry,
    Then,
    decide,
    drop_reason,
)

POLICY = Policy(max_retries=3, backoff_s=0.5, backoff_factor=2.0, backoff_max_s=1.5, then="drop")
LOST = failure("env", "lost")
HOPELESS = failure("env", "raised", retryable=False)


@pytest.mark.parametrize(
    ("attempt", "left_s", "decision"),
    [
        (0, 100.0, Retry(0.5)),
        (1, 100.0, Retry(1.0)),
        (2, 100.0, Retry(1.5)),  # capped
        (3, 100.0, DropMember()),  # three retries are used up
        (9, 100.0, DropMember()),
        (0, 0.6, Retry(0.5)),
        (0, 0.5, DropMember()),  # the retry would begin when the life is over
        (0, 0.0, DropMember()),
        (0, -3.0, DropMember()),
    ],
)
def test_a_failure_that_may_pass_is_retried_within_its_number_and_its_life(
    attempt: int, left_s: float, decision: Decision
) -> None:
    assert decide(LOST, attempt=attempt, policy=POLICY, left_s=left_s) == decision


@pytest.mark.parametrize(
    ("then", "decision"), [("drop", DropMember()), ("replace", ReplaceGroup()), ("fail", EndRun())]
)
def test_the_last_resort_is_the_configured_one(then: Then, decision: Decision) -> None:
    policy = replace(POLICY, then=then)
    assert decide(HOPELESS, attempt=0, policy=policy, left_s=100.0) == decision, "it would only happen again"
    assert decide(LOST, attempt=3, policy=policy, left_s=100.0) == decision
    assert decide(LOST, attempt=0, policy=policy, left_s=0.1) == decision
    assert decide(LOST, attempt=0, policy=replace(policy, max_retries=0), left_s=100.0) == decision
    assert isinstance(decide(LOST, attempt=0, policy=policy, left_s=100.0), Retry)


@given(
    attempt=st.integers(0, 5000),
    base_s=st.floats(0, 100),
    factor=st.floats(1, 1e300),
    max_s=st.floats(0, 1e4),
)
def test_the_wait_before_a_retry_is_never_above_its_cap(
    attempt: int, base_s: float, factor: float, max_s: float
) -> None:
    policy = Policy(max_retries=10_000, backoff_s=base_s, backoff_factor=factor, backoff_max_s=max_s, then="drop")
    decision = decide(LOST, attempt=attempt, policy=policy, left_s=1e9)
    assert isinstance(decision, Retry)
    assert min(base_s, max_s) <= decision.after_s <= max_s


def test_retries_without_a_wait_never_wait() -> None:
    policy = Policy(max_retries=10_000, backoff_s=0.0, backoff_factor=10.0, backoff_max_s=60.0, then="drop")
    assert decide(LOST, attempt=0, policy=policy, left_s=1.0) == Retry(0.0)
    assert decide(LOST, attempt=2000, policy=policy, left_s=1.0) == Retry(0.0)


def test_the_run_is_given_up_after_so_many_failures_in_a_row_and_no_sooner() -> None:
    patience = Patience(3)
    assert [patience.failed(0.0), patience.failed(0.0)] == [False, False]
    patience.done()
    assert [patience.failed(0.0), patience.failed(0.0), patience.failed(0.0)] == [False, False, True]
    assert Patience(1).failed(0.0)


def test_failures_end_the_run_only_when_they_have_gone_on_for_long_enough() -> None:
    patience = Patience(3, 60.0)
    assert [patience.failed(now) for now in (5.0, 6.0, 7.0, 64.9, 65.0)] == [False, False, False, False, True]
    patience.done()
    assert [patience.failed(now) for now in (100.0, 170.0, 171.0)] == [False, False, True]


def test_a_failure_that_would_only_happen_again_needs_no_time_to_prove_it() -> None:
    patience = Patience(3, 60.0)
    assert [patience.failed(0.0, retryable=False) for _ in range(3)] == [False, False, True]


def test_an_outage_is_many_failures_of_a_task_in_a_row_and_over_with_the_first_success() -> None:
    patience = Patience(1000, 60.0)
    for _ in range(OUTAGE_AFTER - 1):
        patience.failed(0.0)
    assert not patience.outage
    patience.failed(0.0)
    assert patience.outage
    patience.done()
    assert not patience.outage


def test_in_an_outage_tries_are_not_counted_and_pauses_are_longer() -> None:
    policy = Policy(max_retries=2, backoff_s=0.5, backoff_factor=2.0, backoff_max_s=60.0, then="drop")
    assert isinstance(decide(LOST, attempt=2, policy=policy, left_s=100.0), DropMember)
    waits = [decide(LOST, attempt=n, policy=policy, left_s=100.0, outage=True) for n in range(6)]
    assert waits == [Retry(2.0), Retry(4.0), Retry(5.0), Retry(5.0), Retry(5.0), Retry(5.0)]
    assert isinstance(decide(LOST, attempt=2, policy=policy, left_s=4.0, outage=True), DropMember)
    never = replace(policy, max_retries=0)
    assert isinstance(decide(LOST, attempt=0, policy=never, left_s=100.0, outage=True), DropMember)


def test_restarts_come_at_once_then_after_growing_pauses_and_end() -> None:
    restarts = Restarts(7)
    assert [restarts.lost("train") for _ in range(8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, None]
    assert restarts.lost("env") == 0.0, "each role has its own"
    restarts.trained()
    assert restarts.lost("train") == 0.0
    assert Restarts(0).lost("train") is None


@pytest.mark.parametrize("where", get_args(Boundary))
def test_every_failure_has_its_term_in_the_ledger(where: Boundary) -> None:
    expected = {"scorer": "unscored", "engine": "engine_lost"}.get(where, "env_failed")
    for kind in FAILURE_KINDS[where]:
        assert drop_reason(failure(where, kind)) == expected
    assert expected in DROP_REASONS
