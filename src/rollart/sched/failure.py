"""What to do with a failed attempt: retry, drop the member, replace the group, or end the run. A value, never an exception.

An infrastructure failure is never reward 0: the attempt is out of statistics and loss, counted by type, and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollart.core.types import DropReason, Failure

Then = Literal["replace", "drop", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The configured rule, as numbers. `max_retries` 0 goes to `then` at once."""

    max_retries: int
    backoff_s: float
    backoff_factor: float
    backoff_max_s: float
    then: Then


@dataclass(frozen=True, slots=True)
class Retry:
    """The same instance and member again after `after_s` seconds, as the next attempt."""

    after_s: float


@dataclass(frozen=True, slots=True)
class DropMember:
    """The group goes on without this member."""


@dataclass(frozen=True, slots=True)
class ReplaceGroup:
    """The group is given up; another instance of its task takes its place."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run ends with this failure."""


Decision = Retry | DropMember | ReplaceGroup | EndRun


def decide(failure: Failure, *, attempt: int, policy: Policy, left_s: float) -> Decision:
    """Decide on attempt number `attempt` (from 0) that failed with `left_s` seconds of its trajectory's life left.

    A retry that could not start within the life, or a failure that would only happen again, goes to `policy.then`.
    """
    wait_s = _backoff_s(attempt, policy)
    if failure.retryable and attempt < policy.max_retries and wait_s < left_s:
        return Retry(wait_s)
    last_resort: dict[Then, Decision] = {"replace": ReplaceGroup(), "drop": DropMember(), "fail": EndRun()}
    return last_resort[policy.then]


def _backoff_s(attempt: int, policy: Policy) -> float:
    """Exponential, capped; a power beyond all floats is beyond the cap too."""
    try:
        return min(policy.backoff_max_s, policy.backoff_s * policy.backoff_factor**attempt)
    except OverflowError:
        return policy.backoff_max_s if policy.backoff_s else 0.0


def drop_reason(failure: Failure) -> DropReason:
    """Under which term of the token ledger the tokens of a failed attempt are counted."""
    if failure.where == "scorer":
        return "unscored"
    return "engine_lost" if failure.where == "engine" else "env_failed"


@dataclass(slots=True)
class Patience:
    """Counts failures in a row. All producers failing, however politely, must end the run and not fill the log."""

    give_up_after: int
    in_a_row: int = 0

    def done(self) -> None:
        self.in_a_row = 0

    def failed(self) -> bool:
        """True: give up now."""
        self.in_a_row += 1
        return self.in_a_row >= self.give_up_after
