"""Small promises that only their edges show: how many versions stay, a deadline that leaves no time, what greedy means."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest

from rollart.control.fleet import RESEND_PAUSE_S
from rollart.control.groups import OPENINGS_PER_TURN
from rollart.control.run import evaluate
from rollart.control.weights import VERSIONS_KEPT, VersionBook
from rollart.core.errors import RunFailed, StoreError, failure
from rollart.core.types import Failure, Manifest, TurnRequest, Version
from rollart.sim.engine import EngineModel
from rollart.sim.loop import run as run_virtually
from rollart.sim.world import SimCluster, world
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
    config = a_config(tasks, failure={"restarts": 1})
    sim = simulate(config, tasks, changed=lambda world: replace(world, store=InSteps()))
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


def test_an_evaluation_is_sampled_as_training_or_greedy() -> None:
    seen: set[tuple[str, float]] = set()

    def length(request: TurnRequest) -> int:
        seen.add((request.purpose, request.sampling.temperature))
        return request.max_tokens

    tasks = [a_task(held_out=2)]
    config = a_config(tasks, eval={"episodes": 2, "greedy": True}, schedule={"steps": 1}, sampling={"temperature": 0.7})
    sim = simulate(config, tasks, SimCluster(engine=EngineModel(length=length)))
    assert sim.error is None
    assert seen == {("train", 0.7), ("eval", 0.7), ("eval", 0.0)}


def test_weights_that_are_only_scored_train_no_step() -> None:
    tasks = [a_task(instances=3, held_out=2)]
    inside = world(tuple(tasks), SimCluster())
    result = run_virtually(evaluate(a_config(tasks), inside, version=7, mode="greedy"))
    assert (result.steps, result.version) == (0, 7)
    assert {(score.split, score.episodes) for score in result.evaluations["asked"]} == {("train", 3), ("held_out", 2)}


def test_groups_that_open_at_once_let_the_rest_of_the_run_have_its_turns() -> None:
    tasks = [a_task()]
    sim = simulate(a_config(tasks, schedule={"steps": 1, "batch": 128, "group_size": 2}), tasks)
    kinds = [row["kind"] for row in sim.rows if row["kind"] in ("group_opened", "traj_started")]
    in_a_row = [len(list(run)) for kind, run in groupby(kinds) if kind == "group_opened"]
    assert sum(in_a_row) == 64
    assert max(in_a_row) <= OPENINGS_PER_TURN
