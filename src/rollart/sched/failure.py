"""What to do with a failed attempt: retry, drop the member, replace the group, or end the run. A value, never an exception.

An infrastructure failure is never reward 0: the attempt is out of statistics and loss, counted by type, and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


OUTAGE_AFTER = 16
"""Failures of one task in a row from which on it is an outage and not the attempts' own fault: chance alone makes a run of
that many once in 10^9 where a quarter of the attempts fails."""
OUTAGE_PAUSE_S = 5.0
"""Longest pause before a retry in an outage: a service that comes back is used again within this."""
LEAST_PAUSE_S = 0.1
"""Shortest pause before the first retry in an outage, doubled with each: where `backoff_s` is 0, what fails at once would
else be tried again without end in one instant."""


def decide(failure: Failure, *, attempt: int, policy: Policy, left_s: float, outage: bool = False) -> Decision:
    """Decide on attempt number `attempt` (from 0) that failed with `left_s` seconds of its trajectory's life left.

    A retry that could not start within the life, or a failure that would only happen again, goes to `policy.then`. In an
    outage tries are not counted (where the policy retries at all) and pauses are longer, up to `OUTAGE_PAUSE_S`.
    """
    wait_s = _backoff_s(attempt, policy)
    if outage:
        least_s = LEAST_PAUSE_S * 2 ** min(attempt, 10)
        wait_s = min(OUTAGE_PAUSE_S, max(least_s, _backoff_s(policy.max_retries + attempt, policy)))
    tries_left = attempt < policy.max_retries or (outage and policy.max_retries > 0)
    if failure.retryable and tries_left and wait_s < left_s:
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
    """Counts failures of one task in a row. A producer that always fails, however politely, must end the run and not fill
    the log; one that is down for a while must not."""

    give_up_after: int
    give_up_s: float = 0.0
    in_a_row: int = 0
    since_s: float = 0.0

    def done(self) -> None:
        self.in_a_row = 0

    def failed(self, now_s: float, *, retryable: bool = True) -> bool:
        """True: give up now. A failure that would only happen again needs no time to prove it."""
        if not self.in_a_row:
            self.since_s = now_s
        self.in_a_row += 1
        lasted = now_s - self.since_s >= self.give_up_s or not retryable
        return self.in_a_row >= self.give_up_after and lasted

    @property
    def outage(self) -> bool:
        """Nothing of this task succeeds just now."""
        return self.in_a_row >= OUTAGE_AFTER


FIRST_PAUSE_S = 1.0
"""Before the second restart in a row; the first comes at once, each later one after twice the time."""
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Restarts:
    """How often lost workers are started again. Progress (a step trained) forgives what was before."""

    most: int
    in_a_row: dict[str, int] = field(default_factory=dict)

    def trained(self) -> None:
        self.in_a_row.clear()

    def lost(self, seat: str) -> float | None:
        """Seconds to wait before another worker takes this one's place; None: not any more."""
        n = self.in_a_row[seat] = self.in_a_row.get(seat, 0) + 1
        if n > self.most:
            return None
        return 0.0 if n == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (n - 2))
