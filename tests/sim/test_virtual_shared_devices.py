"""Virtual worlds in which engines and trainer share devices: what such engines wait for, and what they do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollart.config.schema import RunConfig
from rollart.core.resources import Degrees
from rollart.sim.engine import EngineModel
from rollart.sim.trainer import TrainerModel
from rollart.sim.virtual import build
from rollart.sim.world import SimCluster
from simruns import Row, a_config, a_task, check, random_env, simulate
from virtual_configs import POOLS, a_virtual

REMOTE: dict[str, Any] = {"train": POOLS["train"], "far": {"device": "H20"}}


def test_engines_on_the_trainers_devices_wait_for_no_push_to_others() -> None:
    config = a_virtual(pools=REMOTE, schedule={"max_staleness": 0, "colocated": True})
    made = build(config)
    assert made.paths["train"].push_s == 0.0 < made.paths["far"].push_s
    made.cluster.trainer = replace(made.cluster.trainer, remembers=True)
    sim = simulate(config, made.tasks, made.cluster)
    check(sim)
    pools = {engine.info.id: engine.info.pool for engine in sim.cluster.engines}
    seconds: dict[str, set[float]] = {"train": set(), "far": set()}
    for row in sim.of("prefetched"):
        seconds[pools[row["engine"]]].add(row["seconds"])
    assert seconds["train"] == {0.0}
    path = made.paths["far"]
    assert max(seconds["far"]) == pytest.approx(path.push_s + path.pull_s)


def test_where_nothing_holds_the_trainer_up_engines_stay_two_versions_behind() -> None:
    """A push that takes three steps: what is overtaken is skipped."""
    config = a_config(
        [a_task()], engines=2, schedule={"steps": 24, "max_staleness": 1, "enforce": "admission", "batch": 8, "group_size": 4},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.01), env=random_env(mean_s=0.05), trainer=TrainerModel(finish_s=1.0, push_s=3.0)
    )
    sim = simulate(config, [a_task()], cluster)
    assert sim.error is None
    published = {row["version"]: row["t"] for row in sim.of("published")}
    late = [row["t"] - published[row["version"]] for row in sim.of("applied")]
    assert max(late) <= 2 * 3.0 + 0.1


def in_turn() -> RunConfig:
    """Two engines on four devices, which the trainer has in turn with them."""
    return a_config(
        [a_task()], schedule={"steps": 4, "max_staleness": 0, "colocated": True},
        cluster={"pools": {"gpus": {"device": "H20", "devices_per_node": 4, "roles": ["train"], "tp": 2}}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sleep_s", "lost_after_s", "asleep"),
    [
        pytest.param(2.0, 1.0, True, id="while the trainer computes"),
        pytest.param(30.0, 15.0, False, id="so late that its sleep outlasts the step"),
    ],
)
def test_an_engine_that_comes_while_the_trainer_has_the_devices_lets_them_be(
    sleep_s: float, lost_after_s: float, asleep: bool
) -> None:
    seen: list[tuple[str, bool]] = []

    async def lose(cluster: SimCluster, rows: list[Row]) -> None:
        while not cluster.trainers or cluster.trainers[-1].phase != "finish":  # noqa: ASYNC110 - the cluster tells nobody
            await asyncio.sleep(0.25)
        await asyncio.sleep(lost_after_s)
        cluster.lose_engine(0)
        while len(cluster.engines) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.25)
        await asyncio.sleep(5.0)
        seen.append((cluster.trainers[-1].phase, cluster.engines[2].asleep))
        await asyncio.sleep(60.0)
        seen.append((cluster.trainers[-1].phase, cluster.engines[2].asleep))

    cluster = SimCluster(
        engine=EngineModel(token_s=0.5, sleep_s=sleep_s, wake_s=3.0), env=random_env(mean_s=8.0),
        trainer=TrainerModel(finish_s=20.0),
    )  # fmt: skip
    sim = simulate(in_turn(), [a_task()], cluster, script=lose)
    check(sim)
    assert seen[0][1], "it gives its devices up at once"
    assert seen[0][0] == ("finish" if asleep else "idle")
    assert seen[1] == ("idle", False)
    new = sim.of("engine_joined")[2]["engine"]
    assert sim.of("turn_done", engine=new), "and takes them back"


# --- engines of several stages -------------------------------------------------------------------------------------------


def staged(pp: int, **changes: Any) -> RunConfig:
    return a_virtual(pools={**POOLS, "roll": {"device": "H20", "tp": 2, "pp": pp}}, **changes)


def test_an_engine_in_stages_is_one_engine_on_the_devices_of_all_of_them() -> None:
    whole, made = build(staged(1)), build(staged(2))
    engine, one = made.engines["roll"], whole.engines["roll"]
    assert (engine.degrees, engine.ranks) == (Degrees(tp=2, pp=2), 4)
    assert engine.kv_tokens > 2 * one.kv_tokens, "each stage keeps its own layers"
    alone_s = engine.cost.step_s(1, 1000.0)
    assert alone_s == pytest.approx(one.cost.step_s(1, 1000.0), rel=0.05), (
        "a token alone goes through all of them in turn"
    )
    assert one.cost.step_s(512, 4096.0) > engine.cost.step_s(512, 4096.0), "many keep all of them busy"
    made.cluster.trainer = replace(made.cluster.trainer, remembers=True)
    sim = simulate(made.config, made.tasks, made.cluster)
    check(sim)
    assert len(sim.cluster.engines) == 2
    assert {engine.info.degrees for engine in sim.cluster.engines} == {Degrees(tp=2, pp=2)}
    assert sim.cluster.held == []
