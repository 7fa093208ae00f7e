"""Lives of workers against what they should come to: shares of time, nodes and what stands on them, scripts."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from rollart.config.faults import FaultsConfig
from rollart.config.placement import Placement
from rollart.control.elastic import Elastic
from rollart.control.waits import Waits
from rollart.core.events import Recorder
from rollart.core.resources import Change
from rollart.core.types import Failure
from rollart.sched.failure import Restarts
from rollart.sim.faults import Faults
from rollart.sim.loop import run
from rollart.sim.slots import PoolSize, Slots
from rollart.sim.world import SimCluster

PLACE = Placement(role="mixed", pool="roll")
NODE = 4
"""Engines on a node."""


class Cluster:
    """Engines of one device each, every lost one started again by control's own hand."""

    def __init__(self, faults: Mapping[str, Any], *, engines: int, devices: int = 0, seed: int = 0) -> None:
        size = PoolSize(devices=devices or engines, devices_per_node=NODE)
        slots = Slots({"roll": size})
        self.engines = engines
        self.lives: Counter[str] = Counter()
        self.live_s = 0.0
        """Integral of the engines that live."""
        self.live = 0
        self._since_s = 0.0
        self.events: list[Mapping[str, Any]] = []
        self.forgot: list[str] = []
        self.faults = Faults(
            FaultsConfig.model_validate(faults), seed=seed, nodes={"roll": -(-size.devices // NODE)}, home=(),
            first={"mixed": engines}, slots=slots, forget=self.forgot.append,
        )  # fmt: skip
        self.sim = SimCluster(slots=slots, takes=lambda role, pool, degrees: {"roll": (1,)}, fate=self.faults)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [{"t": event["t"], **event["data"]} for event in self.events if event["kind"] == kind]

    def _counts(self, n: int) -> None:
        now = asyncio.get_running_loop().time()
        self.live_s += (now - self._since_s) * self.live
        self._since_s, self.live = now, self.live + n

    def mean_live(self, over_s: float) -> float:
        """Until `over_s` seconds have passed, all engines replaced as they die."""

        async def again(elastic: Elastic, change: Change) -> None:
            assert isinstance(change.failure, Failure)
            elastic.restarts.trained()  # a step between any two losses
            if await elastic.again("mixed", change.lease, change.failure) is not None:
                self._counts(1)

        async def watch(elastic: Elastic, group: asyncio.TaskGroup) -> None:
            async for change in self.sim.changes():
                self._counts(-1)
                group.create_task(again(elastic, change))

        async def main() -> None:
            record = Recorder((self.events.append,), asyncio.get_running_loop().time)
            elastic = Elastic(record, Waits(record), self.sim, start_s=1e6, restarts=Restarts(8))
            async with self.faults.beside(record), asyncio.TaskGroup() as group:
                await elastic.start_all([PLACE] * self.engines)
                self._counts(self.engines)
                tasks = [group.create_task(watch(elastic, group))]
                await asyncio.sleep(over_s)
                self._counts(0)
                for task in (*tasks, *(asyncio.all_tasks() - {asyncio.current_task()})):
                    task.cancel()

        run(main())
        return self.live_s / over_s


@pytest.mark.parametrize(("mtbf_s", "start_s"), [(3600.0, 400.0), (600.0, 600.0)])
def test_so_many_engines_live_as_their_lives_and_repairs_say(mtbf_s: float, start_s: float) -> None:
    """N engines that live M on average and are replaced after R: N * M / (M + R) live, within sampling error."""
    engines, cycles = 16, 120
    cluster = Cluster({"engine": {"mtbf_s": mtbf_s, "start_s": start_s}}, engines=engines)
    up = mtbf_s / (mtbf_s + start_s)
    found = cluster.mean_live(cycles * (mtbf_s + start_s))
    # of the share of time in which one is up, over n cycles of an exponential life and a fixed repair: u (1 - u) / sqrt(n)
    error = engines * up * (1 - up) / math.sqrt(engines * cycles)
    assert found == pytest.approx(engines * up, abs=3 * error)
    lost = len(cluster.of("fault"))
    assert lost == pytest.approx(engines * cycles, abs=4 * math.sqrt(engines * cycles))


def test_nodes_take_their_engines_with_them_and_give_them_back_after_the_repair() -> None:
    """An engine is up where its node is: with node life M and repair R + start S, the share of M / (M + R + S)."""
    law = {"node": {"mtbf_s": 7200.0, "replace_s": 900.0}, "engine": {"start_s": 100.0}}
    engines, cycles = 32, 100
    cluster = Cluster(law, engines=engines)
    # the next life of a node begins with its return, and the engines' start is in it
    up = (7200.0 - 100.0) / (7200.0 + 900.0)
    error = engines * up * (1 - up) / math.sqrt(engines / NODE * cycles)
    assert cluster.mean_live(cycles * 8100.0) == pytest.approx(engines * up, abs=3 * error)
    nodes = cluster.of("fault")
    assert {row["what"] for row in nodes} == {"node"}
    assert all(len(row["workers"]) <= NODE for row in nodes)
    assert set(cluster.forgot) == {f"roll/{number}" for number in range(engines // NODE)}


def test_the_same_seed_has_the_same_faults_and_another_has_others() -> None:
    law = {"engine": {"mtbf_s": 500.0}, "node": {"mtbf_s": 5000.0}}

    def seen(seed: int) -> list[dict[str, Any]]:
        cluster = Cluster(law, engines=8, seed=seed)
        cluster.mean_live(4000.0)
        return cluster.of("fault")

    assert seen(1) == seen(1) != seen(2)
    assert len(seen(1)) > 20


def test_what_is_not_replaced_stays_away_and_its_place_too() -> None:
    cluster = Cluster({"engine": {"mtbf_s": 100.0, "replaced": False}}, engines=8)
    cluster.mean_live(80.0)
    assert 0 < cluster.live == 8 - len(cluster.of("fault")) < 8
    node = Cluster(
        {"node": {"replaced": False}, "script": {"a": {"kind": "node", "at_s": 50, "pool": "roll"}}}, engines=8
    )
    assert node.mean_live(100.0) == pytest.approx(8 * 0.5 + 4 * 0.5)
    assert node.live == 4


def test_an_engine_of_a_lost_node_stands_on_another_where_there_is_room() -> None:
    lost = {"kind": "node", "at_s": 50, "pool": "roll"}
    cluster = Cluster(
        {"node": {"replaced": False}, "script": {"a": lost}, "engine": {"start_s": 10.0}}, engines=4, devices=8
    )
    assert cluster.mean_live(100.0) == pytest.approx(4 * 0.5 + 4 * 0.4)
    assert cluster.live == 4
    assert {engine.lost is None for engine in cluster.sim.engines[:4]} == {False}


def test_scripted_faults_happen_at_their_time_to_those_that_are_named_and_say_so() -> None:
    script = {
        "first": {"kind": "engine", "at_s": 10.0, "count": 2, "pool": "roll"},
        "then": {"kind": "node", "at_s": 20.0, "pool": "roll", "number": 1},
        "again": {"kind": "node", "at_s": 30.0, "pool": "roll", "number": 1},
        "never": {"kind": "trainer", "at_s": 40.0},
        "late": {"kind": "engine", "at_s": 4000.0},
    }
    cluster = Cluster({"script": script}, engines=8)
    cluster.mean_live(200.0)
    rows = cluster.of("fault")
    assert [(row["t"], row["what"], row["script"]) for row in rows] == [
        (10.0, "engine", "first"), (10.0, "engine", "first"), (20.0, "node", "then")
    ]  # fmt: skip
    assert [row["subject"] for row in rows] == ["engine-0", "engine-1", "roll/1"]
    assert rows[2]["workers"] == ["engine-4", "engine-5", "engine-6", "engine-7"]
    missed = [row["text"] for row in cluster.of("advisory") if row["code"] == "fault_missed"]
    assert len(missed) == 3
    assert any("script.again" in text and "nothing to hit" in text for text in missed)
    assert any("script.never" in text and "nothing to hit" in text for text in missed)
    assert any("script.late" in text and "the run was over at 200 s" in text for text in missed)


def test_pulls_fail_in_the_share_that_is_given_and_all_of_them_in_a_scripted_time() -> None:
    script = {"all": {"kind": "weights", "at_s": 100.0, "lasts_s": 50.0}}
    cluster = Cluster({"weights": {"failed_share": 0.2}, "script": script}, engines=4)
    found: dict[float, list[bool]] = {}

    async def main() -> None:
        record = Recorder((cluster.events.append,), asyncio.get_running_loop().time)
        async with cluster.faults.beside(record):
            for at_s in (50.0, 120.0, 150.0):
                await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                found[at_s] = [cluster.faults.spoils("roll/0", nth) for nth in range(2000)]

    run(main())
    error = math.sqrt(0.2 * 0.8 / 2000)
    assert sum(found[50.0]) / 2000 == pytest.approx(0.2, abs=3 * error)
    assert all(found[120.0])
    assert found[150.0] == found[50.0]
    assert len(cluster.of("fault")) == sum(map(sum, found.values()))
