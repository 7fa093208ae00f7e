"""A checkpoint that cannot be kept is told of by its true reason, whoever found it out."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable

import pytest

from rollart.core.errors import RunFailed, StoreError
from rollart.core.snapshot import Snapshot
from rollart.core.types import Failure
from simruns import a_config, a_task, simulate


class Broken:
    """A place whose owner raises."""

    def __init__(self, cause: Exception | None) -> None:
        self._cause = cause

    async def save(self, snapshot: Snapshot, keep_trainer: Callable[[str], Awaitable[None]]) -> str | Failure:
        raise StoreError("checkpoints/step-000000: cannot be written") from self._cause


def _of_the_system(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (_of_the_system(errno.ENOSPC), "full"),
        (_of_the_system(errno.EDQUOT), "full"),
        (_of_the_system(errno.EACCES), "refused"),
        (_of_the_system(errno.EROFS), "refused"),
        (_of_the_system(errno.ENOENT), "missing"),
        (_of_the_system(errno.EIO), "torn"),
        (ValueError("no JSON"), "torn"),
        (None, "torn"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_a_checkpoint_that_is_not_kept_says_why(cause: Exception | None, kind: str) -> None:
    tasks = [a_task()]
    sim = simulate(a_config(tasks, checkpoint={"every": 1}), tasks, checkpoints=Broken(cause))
    [told] = sim.of("advisory", code="checkpoint_failed")
    why = f"store {kind}: checkpoints/step-000000: cannot be written"
    assert told["text"] == f"no checkpoint after step 0: {why}"
    assert isinstance(sim.error, RunFailed)
    assert sim.error.failure is not None
    assert sim.error.failure.retryable == (kind == "full")
    assert str(sim.error).endswith(why)
