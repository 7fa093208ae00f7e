"""Scenarios: each holds the least that one must, can be written down, and shrinks to what breaks the promise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rollart.core.resources import Lease
from rollart.core.types import Failure, Finish, RequestId
from rollart.ports import Port, World
from rollart.sim.engine import SimEngine
from rollart.sim.torture import drive
from rollart.sim.torture.faults import KINDS, Fault, Faults
from rollart.sim.torture.points import await_points
from rollart.sim.torture.scenario import (
    LEAST_FAULTS,
    LEAST_TRAJECTORIES,
    OTHER_FAULTS,
    STEPS,
    SURE_BEFORE,
    SURE_FAULTS,
    Scenario,
    from_json,
    scenario,
)
from rollart.sim.torture.shrink import promise_of, shrink
from rollart.sim.world import SimCluster

SEEDS = range(400)


def test_every_scenario_holds_the_least_that_one_must() -> None:
    for seed in SEEDS:
        one = scenario(seed)
        schedule = one.config["schedule"]
        assert len(one.tasks) >= 2
        assert schedule["steps"] == STEPS
        assert schedule["steps"] * schedule["batch"] >= LEAST_TRAJECTORIES
        assert all(2 <= task.least_turns <= task.most_turns <= 4 for task in one.tasks)
        sure = [fault for fault in one.faults if fault.kind in SURE_FAULTS and fault.nth < SURE_BEFORE]
        assert len(sure) >= LEAST_FAULTS


def test_every_scenario_can_be_configured_and_written_down() -> None:
    for seed in SEEDS:
        one = scenario(seed)
        drive.config_of(one)  # raises what a user would be told
        assert from_json(json.loads(json.dumps(one.as_json()))) == one
    assert scenario(3) == scenario(3) != scenario(4)


def test_every_kind_of_fault_and_both_edges_of_a_setting_are_drawn() -> None:
    drawn = [scenario(seed) for seed in SEEDS]
    assert {fault.kind for one in drawn for fault in one.faults} == set(KINDS) == set(OTHER_FAULTS)
    assert {one.config["schedule"]["max_staleness"] for one in drawn} == {0, 1, 2, 3}
    assert {one.config["schedule"]["sync_order"] for one in drawn} == {"early", "paper"}
    assert {one.config["engine"]["count"] for one in drawn} == {1, 2, 3}
    assert {one.config["checkpoint"]["every"] for one in drawn} == {1, 2, 3}
    assert {one.config["failure"]["on_failure"]["kind"] for one in drawn} == {"retry", "replace", "drop"}


def test_a_fault_hits_its_call_once_and_those_of_one_call_come_one_after_another() -> None:
    faults = Faults(
        [Fault(kind="env_hangs", call="step", nth=2), Fault(kind="env_raises", call="step", nth=2)]
    )  # fmt: skip
    assert [faults.due("env", "open") for _ in range(3)] == [None] * 3
    hits = [fault.kind if (fault := faults.due("env", "step")) else "" for _ in range(6)]
    assert sorted(hits) == ["", "", "", "", "env_hangs", "env_raises"]
    assert hits[:2] == hits[4:] == ["", ""]


def test_what_a_dead_driver_calls_meets_no_fault() -> None:
    faults = Faults([Fault(kind="env_hangs", call="step", nth=0)])
    faults.frozen = True
    assert faults.due("env", "step") is None
    faults.frozen = False
    assert faults.due("env", "step") is not None


def test_await_points_are_read_off_the_source() -> None:
    points = set(await_points().values())
    assert len(points) > 80
    assert {point.rsplit(":", 1)[0] for point in points} >= {
        "signal.Signal.wait", "waits.Waits.on", "groups.Groups.produce", "run._Run._watch",
    }  # fmt: skip


# --- a planted bug -------------------------------------------------------------------------------------------------------


class Twice(SimEngine):
    """An engine that counts the tokens of an aborted request twice."""

    def _finish(self, rid: RequestId, finish: Finish) -> None:
        running = self._running[rid]
        super()._finish(rid, finish)
        if finish == "aborted":
            purpose = running.request.purpose
            self._sampled[purpose] += running.settled


class Planted:
    """A cluster whose engines have the bug."""

    def __init__(self, inside: SimCluster) -> None:
        self._inside = inside

    async def start(self, lease: Lease) -> Port | Failure:
        port = await self._inside.start(lease)
        if isinstance(port, SimEngine):
            port = self._inside.engines[-1] = Twice(port.info, self._inside.engine)
        return port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


def planted(world: World) -> World:
    assert isinstance(world.cluster, SimCluster)
    return replace(world, cluster=Planted(world.cluster))


def broken(one: Scenario) -> tuple[str, ...]:
    return drive.run(one, around=planted).broken


def test_a_planted_bug_is_found_and_shrinks_to_a_small_scenario_that_has_it() -> None:
    large = next(one for one in map(scenario, range(4, 50)) if broken(one))
    assert drive.run(large).broken == ()
    lines = broken(large)
    small = shrink(large, broken, most_runs=120)
    assert promise_of(lines[0]) in {promise_of(line) for line in broken(small)}
    assert len(small.faults) < len(large.faults) / 2
    assert len(small.tasks) == 1
    assert len(drive.run(small).log) < len(drive.run(large).log) / 2
    assert drive.run(small).broken == ()


def test_a_scenario_that_breaks_nothing_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="breaks no promise"):
        shrink(scenario(0), lambda one: ())
