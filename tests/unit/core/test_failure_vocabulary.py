"""Failures are values of a closed vocabulary; errors carry what a reader needs."""

from __future__ import annotations

from typing import get_args

import pytest

from rollart.core import errors
from rollart.core.errors import (
    FAILURE_KINDS,
    DeadlockError,
    InvariantBroken,
    RollartError,
    RunFailed,
    describe,
    failure,
)
from rollart.core.types import Boundary


def test_every_boundary_has_its_kinds_and_every_kind_makes_a_failure() -> None:
    assert set(FAILURE_KINDS) == set(get_args(Boundary))
    for where, kinds in FAILURE_KINDS.items():
        assert "timeout" in kinds, "whatever is waited for can pass its deadline"
        for kind in kinds:
            made = failure(where, kind, "why", retryable=False)
            assert (made.where, made.kind, made.detail, made.retryable) == (where, kind, "why", False)


def test_a_kind_of_another_boundary_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvariantBroken, match=r"'not_finite' is not known for 'env'; use one of \['lost'"):
        failure("env", "not_finite")


def test_a_failure_may_be_retried_unless_said_otherwise() -> None:
    assert failure("env", "lost").retryable


def test_one_line_describes_a_failure() -> None:
    assert describe(failure("env", "timeout")) == "env timeout"
    assert describe(failure("env", "timeout", "step of t/0")) == "env timeout: step of t/0"


def test_the_failure_that_ended_a_run_is_in_the_last_line_of_its_message() -> None:
    cause = failure("engine", "lost", "engine-0: process died")
    error = RunFailed("no engine is left", cause)
    assert str(error).splitlines() == ["no engine is left", "engine lost: engine-0: process died"]
    assert error.failure is cause
    assert str(RunFailed("stopped")) == "stopped"


def test_a_deadlock_names_everybody_who_waits() -> None:
    error = DeadlockError(["trainer at take:3", "groups at produce:9"])
    assert error.waiting == ("trainer at take:3", "groups at produce:9")
    assert "2 tasks wait: trainer at take:3; groups at produce:9" in str(error)


def test_every_error_of_the_package_has_one_root() -> None:
    own = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)]
    assert len(own) > 8
    assert all(issubclass(error, RollartError) for error in own)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.StoreError, OSError)
    assert issubclass(errors.InvariantBroken, AssertionError)
