"""Affinity in whole runs: nothing where pools are alike, and where they are not what the tasks are worth there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest

from rollart.config.schema import RunConfig
from rollart.control.preferences import affinity_of, expected_tokens, kinds_of
from rollart.control.run import run
from rollart.core.errors import ConfigError
from rollart.recipes.registry import resolve
from rollart.sched.affinity import OFF, Auto, Table
from rollart.sim.loop import run as run_virtually
from rollart.sim.virtual import build

Event = Mapping[str, Any]
SMALL = (
    "cluster.pools.h800.devices_per_node=2", "cluster.pools.h20.devices_per_node=2", "schedule.batch=8",
    "schedule.group_size=2", "schedule.steps=2", "tasks.frozen_lake.max_turns=8",
)  # fmt: skip
"""`sim_small` in less than a second."""
TABLE = ("affinity.kind=table", "affinity.tasks.frozen_lake.pools=[h800]", "affinity.tasks.gem_math.pools=[h20]")


def events_of(config: RunConfig) -> list[Event]:
    events: list[Event] = []
    run_virtually(run(config, build(config).world((events.append,))))
    return events


def a_small(*words: str) -> RunConfig:
    return resolve("sim_small", [*SMALL, *words]).config


# --- pools that are alike ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [("affinity",), TABLE], ids=["auto", "table"])
@pytest.mark.parametrize(
    "alike",
    [
        ("cluster.pools.h800.device=H20",),
        ("cluster.pools.h20.device=H800",),
        ("cluster.pools.h20.device=H800", "cluster.pools.h20.cost=1"),
    ],
    ids=["H20", "H800", "priced"],
)
def test_oracle_8_on_a_homogeneous_cluster_affinity_changes_nothing(
    asked: tuple[str, ...], alike: tuple[str, ...]
) -> None:
    plain = events_of(a_small(*alike, "no_affinity"))
    assert events_of(a_small(*alike, *asked)) == plain
    assert any(event["kind"] == "step_finished" for event in plain)


def test_a_table_tells_kinds_apart_and_not_pools() -> None:
    """The trainer's pool samples as well under a colocated schedule: it is of the kind that the table names."""
    config = resolve("rollart_128gpu", ["schedule.colocated=true", "schedule.max_staleness=0", "early"]).config
    kinds = kinds_of(config)
    assert kinds.places == {"train": "train", "h800": "train", "h20": "h20"}
    table = affinity_of(config)
    assert isinstance(table, Table)
    assert table.order("swe_bench") == ("train",)
    assert table.order("gem_math") == ("h20",)
    assert [table.place(pool) for pool in ("train", "h800", "h20")] == ["train", "train", "h20"]
    assert affinity_of(resolve("rollart_128gpu", ["cluster.pools.h20.device=H800"]).config) is OFF


def test_what_is_learned_begins_with_cost_models_and_limits() -> None:
    config = resolve("rollart_128gpu", ["affinity"]).config
    assert isinstance(affinity_of(config), Auto)
    assert expected_tokens(config)["swe_bench"] == pytest.approx(32768 / 50)
    assert expected_tokens(config)["gem_game"] == 16384
    native = {"kind": "native"}
    dump = config.model_dump()
    unmodelled = RunConfig.model_validate({**dump, "engine": native})
    with pytest.raises(ConfigError, match=r"engine.kind=native do not have; use model.kind=shape"):
        affinity_of(unmodelled)


# --- pools that are not ----------------------------------------------------------------------------------------------------

LOADED = ("one_off", "schedule.batch=64", "schedule.group_size=8", "schedule.steps=2")
"""`sim_small` with more to sample at once."""


def generating_s(seed: int, *words: str) -> float:
    """Mean seconds that a trajectory is in engines."""
    events = events_of(resolve("sim_small", [*LOADED, *words, f"seed={seed}"]).config)
    ends = [event["data"] for event in events if event["kind"] == "traj_finished"]
    return fmean(end["seconds"]["generate"] for end in ends if end["status"] == "done")


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_learned_beats_no_affinity_and_is_as_good_as_the_table_made_by_hand(seed: int) -> None:
    off, table, auto = (generating_s(seed, *words) for words in (("no_affinity",), TABLE, ("affinity",)))
    assert auto < 0.96 * off
    assert auto < 1.05 * table


def test_each_task_finds_its_pool_and_spills_where_that_is_full() -> None:
    """What the profile says, seen from the log: reading in many turns on the H800, long answers on the H20 first."""
    events = events_of(resolve("sim_small", [*LOADED, "affinity"]).config)
    pool_of = {event["engine"]: event["data"]["pool"] for event in events if event["kind"] == "engine_joined"}
    went: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["kind"] == "turn_routed":
            went[event["traj"].split("/")[1]].append(pool_of[event["engine"]])
    shares = {task: pools.count("h20") / len(pools) for task, pools in went.items()}
    assert shares["frozen_lake"] < 0.2
    assert shares["gem_math"] > 0.55
    assert all(0 < share < 1 for share in shares.values())
