"""What comes before the first weights and after the last: a run that it hangs says so, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from rollart.core.errors import RunFailed
from rollart.core.types import Manifest
from rollart.ports import World
from simruns import a_config, a_task, simulate


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("changed", "says", "setting"),
    [
        (
            lambda world: replace(world, prepare=_never),
            "baselines and warm start: no end",
            "raise deadlines.prepare_s",
        ),
        (
            lambda world: replace(world, conclude=_never),
            "the model to be kept: no end",
            "raise deadlines.weights_s",
        ),
    ],
)
def test_work_that_never_ends_ends_the_run_with_its_cause_and_the_setting(
    changed: Callable[[World], World], says: str, setting: str
) -> None:
    tasks = [a_task()]
    sim = simulate(a_config(tasks), tasks, changed=changed)
    assert isinstance(sim.error, RunFailed)
    assert sim.error.failure is not None
    assert sim.error.failure.kind == "timeout"
    assert str(sim.error).startswith(says)
    assert setting in str(sim.error)
    [last] = sim.of("run_finished")
    assert last["status"] == "failed"
    assert sim.tasks_left == []
    assert sim.cluster.held == []


def test_the_model_is_kept_once_with_the_last_version() -> None:
    kept: list[int] = []

    async def conclude(manifest: Manifest) -> None:
        await asyncio.sleep(1.0)
        kept.append(manifest.version)

    def ends_so(conclude: Callable[[Manifest], Awaitable[None]]) -> Callable[[World], World]:
        return lambda world: replace(world, conclude=conclude)

    tasks = [a_task()]
    sim = simulate(a_config(tasks), tasks, changed=ends_so(conclude))
    assert sim.error is None
    assert kept == [4]
