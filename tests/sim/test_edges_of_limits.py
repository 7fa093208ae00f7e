"""Limits at their edge: how many versions stay and how they follow each other, a deadline that leaves no time for a try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollart.control.fleet import RESEND_PAUSE_S
from rollart.control.weights import VERSIONS_KEPT, VersionBook
from rollart.core.errors import RunFailed, StoreError, failure
from rollart.core.types import Failure, Manifest, Version
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster
from simruns import a_config, a_task, simulate


class Counted(VersionBook):
    """Notes how many versions are to be had after each retirement."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: Version = -1
        self.kept: list[int] = []

    async def retire(self, below: Version) -> None:
        await super().retire(below)
        self.newest += 1
        kept = 0
        for version in range(self.newest + 1):
            try:
                await self.chain(None, version)
            except StoreError:
                continue
            kept += 1
        self.kept.append(kept)


def test_no_more_versions_stay_than_a_slow_engine_needs() -> None:
    tasks, store = [a_task()], Counted()
    sim = simulate(a_config(tasks, schedule={"steps": 6}), tasks, changed=lambda world: replace(world, store=store))
    assert sim.error is None
    assert store.kept == [min(VERSIONS_KEPT, published + 1) for published in range(7)]


class InSteps(VersionBook):
    """Leads to a version over the one before it, as a store of deltas does."""

    async def chain(self, have: Version | None, want: Version) -> tuple[Manifest, ...]:
        last = await super().chain(have, want)
        try:
            return (*await super().chain(None, want - 1), *last)
        except StoreError:
            return last


def test_what_is_served_at_the_end_of_a_chain_is_its_last_version() -> None:
    tasks = [a_task()]
    sim = simulate(a_config(tasks), tasks, changed=lambda world: replace(world, store=InSteps()))
    assert sim.error is None
    assert sim.of("engine_lost") == []
    assert [row["matches"] for row in sim.of("applied")] == [True] * 5


def test_the_first_weights_belong_to_no_step() -> None:
    tasks = [a_task()]
    sim = simulate(a_config(tasks), tasks)
    assert [row["step"] for row in sim.of("published")] == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("more_s", [0.0, RESEND_PAUSE_S])
def test_a_turn_whose_deadline_comes_with_the_pause_is_not_sent_again(more_s: float) -> None:
    """It would fail at its deadline, and that failure would hide the engine's own."""

    def broken(engine: str, call: str, nth: int) -> Failure | None:
        return failure("engine", "raised", "out of order") if call == "generate" else None

    tasks = [a_task(max_turns=1)]
    config = a_config(
        tasks, deadlines={"turn_s": RESEND_PAUSE_S + more_s}, failure={"on_failure": {"kind": "fail"}},
        schedule={"steps": 1, "batch": 2, "group_size": 2},
    )  # fmt: skip
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(fault=broken)))
    assert isinstance(sim.error, RunFailed)
    assert sim.error.failure is not None
    assert sim.error.failure.kind == "raised"
    [first, *_] = sim.of("traj_finished", status="failed")
    assert first["t"] == pytest.approx(more_s)
