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
    Decision,
    DropMember,
    EndRun,
    Patience,
    Policy,
    ReplaceGroup,
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
    assert [patience.failed(), patience.failed()] == [False, False]
    patience.done()
    assert [patience.failed(), patience.failed(), patience.failed()] == [False, False, True]
    assert Patience(1).failed()


@pytest.mark.parametrize("where", get_args(Boundary))
def test_every_failure_has_its_term_in_the_ledger(where: Boundary) -> None:
    expected = {"scorer": "unscored", "engine": "engine_lost"}.get(where, "env_failed")
    for kind in FAILURE_KINDS[where]:
        assert drop_reason(failure(where, kind)) == expected
    assert expected in DROP_REASONS
