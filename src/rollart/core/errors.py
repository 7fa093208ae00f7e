"""Errors, one class per boundary crossed, and the closed vocabulary of expected failures.

    RollartError
    ├── ConfigError        what the user wrote
    ├── EnvError           environments and their hosts
    ├── EngineError        inference engines
    ├── ScorerError        rewards
    ├── TrainerError       training ranks; TrainerLost: gone, a restart helps
    ├── StoreError         weights, checkpoints, logs on disk
    ├── ClusterError       devices and processes
    ├── RunFailed          the run cannot go on; carries the failure that ended it
    ├── InvariantBroken    a promise of the design does not hold: always a bug, never swallowed
    └── DeadlockError      nothing is scheduled and nobody can wake

Expected failures are values (`core.types.Failure`), not exceptions: an exception means misuse or a dead world.
A message says what, the value, and what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rollart.core.types import Boundary, Failure


class RollartError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(RollartError, ValueError):
    """A configuration that cannot be run."""


class EnvError(RollartError):
    """An environment or its host broke its contract."""


class EngineError(RollartError):
    """An inference engine broke its contract."""


class ScorerError(RollartError):
    """A scorer broke its contract."""


class TrainerError(RollartError):
    """A trainer broke its contract."""


class TrainerLost(TrainerError):
    """A training rank is gone, or the ranks are no longer at the same place: a restart from the last checkpoint helps."""


class StoreError(RollartError, OSError):
    """Bytes that must be on disk or in the store are missing, torn or cannot be written."""


class ClusterError(RollartError):
    """Devices or processes are not to be had."""


class InvariantBroken(RollartError, AssertionError):
    """A promise of the design does not hold."""


class DeadlockError(RollartError):
    """Nothing is scheduled and nobody can wake. Names the waiting tasks."""

    def __init__(self, waiting: Sequence[str]) -> None:
        self.waiting = tuple(waiting)
        super().__init__(
            f"nothing is scheduled and nobody can wake; {len(self.waiting)} tasks wait: " + "; ".join(waiting)
        )


class RunFailed(RollartError):
    """The run cannot go on. The failure that ended it is in the last line of the message."""

    def __init__(self, why: str, failure: Failure | None = None) -> None:
        self.failure = failure
        super().__init__(why if failure is None else f"{why}\n{describe(failure)}")


FAILURE_KINDS: dict[Boundary, frozenset[str]] = {
    "env": frozenset({"raised", "timeout", "lost", "refused"}),
    "engine": frozenset({"raised", "timeout", "lost", "refused"}),
    "scorer": frozenset({"raised", "timeout", "lost", "not_finite"}),
    "trainer": frozenset({"raised", "timeout", "lost", "frozen_weights"}),
    "store": frozenset({"torn", "missing", "full", "refused", "timeout"}),
    "cluster": frozenset({"no_room", "timeout", "lost", "start_failed"}),
}
"""raised: its code raised; timeout: a deadline passed; lost: the process is gone; refused: it will not take this work.
Of the store: torn: bytes are not what was written, or stop in the middle; refused: the place may not be written."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""The place is not one that may be written, now or later."""


def store_kind(number: int | None) -> str:
    """The kind of failure that an error of the system comes to; None: it has no number."""
    if number in FULL:
        return "full"
    if number in REFUSED:
        return "refused"
    return "missing" if number == errno.ENOENT else "torn"


def store_failure(error: StoreError) -> Failure:
    """What an error of the store comes to, by the number that the system gave it or its cause."""
    cause = error.__cause__
    kind = store_kind(error.errno or (cause.errno if isinstance(cause, OSError) else None))
    return failure("store", kind, str(error), retryable=kind == "full")


def failure(where: Boundary, kind: str, detail: str = "", *, retryable: bool = True) -> Failure:
    """Make a `Failure` whose kind is in the boundary's vocabulary."""
    if kind not in FAILURE_KINDS[where]:
        raise InvariantBroken(
            f"failure kind {kind!r} is not known for {where!r}; use one of {sorted(FAILURE_KINDS[where])}"
        )
    return Failure(where=where, kind=kind, retryable=retryable, detail=detail)


def times(count: int) -> str:
    """How often, as a message says it."""
    return "once" if count == 1 else f"{count} times"


def describe(value: Failure) -> str:
    """One line: boundary, kind, detail."""
    return f"{value.where} {value.kind}: {value.detail}" if value.detail else f"{value.where} {value.kind}"
