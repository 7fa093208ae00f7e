"""Whole virtual runs on clusters that fail: every promise of the log holds, and the figures say what was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollart.config.schema import RunConfig
from rollart.core.errors import RunFailed
from rollart.observe.outlook import outlook
from rollart.observe.summary import summarise
from rollart.sim.virtual import build
from simruns import SimRun, check, check_ledger, simulate
from virtual_configs import POOLS, a_virtual

TWO_POOLS: dict[str, Any] = {
    "train": {"device": "H800", "roles": ["train"]}, "near": {"device": "H800", "devices_per_node": 2, "nodes": 2},
    "far": {"device": "H20", "devices_per_node": 4},
}  # fmt: skip
IN_TURN: dict[str, Any] = {"all": {"device": "H800", "nodes": 2, "roles": ["train", "mixed"]}}
SPLIT: dict[str, Any] = {
    "train": POOLS["train"], "read": {"device": "H800", "devices_per_node": 2, "roles": ["prefill"]},
    "decode": {"device": "H20", "devices_per_node": 4, "roles": ["decode"]},
}  # fmt: skip


def faulty(faults: dict[str, Any], **sections: Any) -> RunConfig:
    """Two steps of 32 trajectories, a checkpoint after each."""
    return a_virtual(**{"cluster": {"faults": faults}, "checkpoint": {"every": 1}, "envs": {"hosts": 2}, **sections})


def ran(config: RunConfig) -> SimRun:
    made = build(config)
    made.cluster.trainer = replace(made.cluster.trainer, remembers=True)
    inside = made.world()
    return simulate(
        config, made.tasks, made.cluster, checkpoints=inside.checkpoints,
        changed=lambda world: replace(world, beside=inside.beside),
    )  # fmt: skip


def kept_its_promises(sim: SimRun) -> None:
    check(sim)
    check_ledger(sim)
    assert sim.cluster.held == []
    learned = Counter(sample.traj for batch in sim.cluster.trainers[-1].batches for sample in batch)
    assert set(learned.values()) == {1}, "each trajectory is trained once, whatever was lost"
    assert len(learned) == sum(row["trajectories"] for row in sim.of("batch_released"))


MEANS = st.sampled_from((0.0, 60.0, 200.0, 1000.0))
LAWS = st.fixed_dictionaries(
    {
        "engine": st.fixed_dictionaries({"mtbf_s": MEANS, "start_s": st.sampled_from((0.0, 5.0, 60.0))}),
        "node": st.fixed_dictionaries(
            {"mtbf_s": st.sampled_from((0.0, 600.0)), "replace_s": st.sampled_from((0.0, 50.0))}
        ),
        "env_host": st.fixed_dictionaries({"mtbf_s": MEANS}),
        "trainer": st.fixed_dictionaries({"mtbf_s": st.sampled_from((0.0, 120.0, 600.0)), "start_s": st.just(20.0)}),
        "weights": st.fixed_dictionaries({"failed_share": st.sampled_from((0.0, 0.3))}),
        "rewards": st.fixed_dictionaries({"mtbf_s": st.sampled_from((0.0, 100.0)), "outage_s": st.just(15.0)}),
    }
)
EVERYTHING = {
    "engine": {"mtbf_s": 200.0}, "node": {"mtbf_s": 600.0}, "env_host": {"mtbf_s": 200.0}, "trainer": {"mtbf_s": 150.0},
    "weights": {"failed_share": 0.3}, "rewards": {"mtbf_s": 100.0, "outage_s": 15.0},
}  # fmt: skip


@given(laws=LAWS, seed=st.integers(0, 99), staleness=st.integers(0, 2))
@example(laws=EVERYTHING, seed=0, staleness=1)
@settings(max_examples=10)
def test_whatever_fails_no_token_is_lost_and_nothing_is_trained_twice(laws: Any, seed: int, staleness: int) -> None:
    """A run ends well with both books of the ledger closed, or it ends with its cause: there is no third way."""
    config = faulty(laws, pools=TWO_POOLS, load="math", schedule={"max_staleness": staleness, "steps": 2})
    sim = ran(config.model_copy(update={"seed": seed}))
    if sim.error is None:
        kept_its_promises(sim)
    else:
        assert isinstance(sim.error, RunFailed)
        assert sim.rows[-1]["kind"] == "run_finished"
        assert sim.cluster.held == []
        check_ledger(sim)


@pytest.mark.parametrize(
    ("pools", "faults", "schedule"),
    [
        (IN_TURN, {"node": {"mtbf_s": 400.0}, "engine": {"mtbf_s": 400.0}}, {"max_staleness": 0, "steps": 3}),
        (SPLIT, {"node": {"mtbf_s": 300.0}, "engine": {"mtbf_s": 300.0}}, {"steps": 3}),
        (
            TWO_POOLS,
            {"trainer": {"mtbf_s": 100.0}, "weights": {"failed_share": 0.3}},
            {"steps": 5, "sync_order": "paper"},
        ),
    ],
)
def test_every_kind_of_cluster_survives_its_faults(pools: Any, faults: Any, schedule: Any) -> None:
    sim = ran(faulty(faults, pools=pools, schedule=schedule))
    kept_its_promises(sim)
    assert len(sim.of("fault")) >= 2


def test_a_lost_node_of_the_trainers_costs_the_repair_the_start_the_load_and_the_steps_since() -> None:
    """Another trainer is up after 90 + 60 s, loads 115 GB at 2 GB/s a node, and repeats what no checkpoint holds."""
    lost = {"script": {"mine": {"kind": "node", "pool": "train", "at_s": 150.0}}}
    sim = ran(faulty(lost, load="math", schedule={"steps": 5}, checkpoint={"every": 10}))
    kept_its_promises(sim)
    (restarted,) = sim.of("trainer_restarted")
    before = [row for row in sim.of("step_finished") if row["t"] < 150.0]
    assert restarted["steps"] == len(before) >= 1
    repeated_s = sum(row["seconds"] for row in before)
    load_s = sim.of("checkpointed")[0]["seconds"]
    assert load_s == pytest.approx(8.19e9 * 14 / 2e9, rel=0.01)
    assert restarted["seconds"] == pytest.approx(90.0 + 60.0 + load_s + repeated_s, abs=2.0)
    found = outlook(sim.events)
    assert found is not None
    assert found.faults is not None
    assert found.faults.happened == {"node": 1, "trainer": 1}
    assert found.faults.repeated_steps == len(before)
    assert found.faults.trainer_down_s == restarted["seconds"]


def test_a_push_that_its_trainer_does_not_live_to_end_is_made_again_by_the_next() -> None:
    plain = ran(faulty({}, load="math", checkpoint={"every": 1}))
    published = plain.of("published")[1]
    script = {"mine": {"kind": "trainer", "at_s": published["t"] + 90.0}}
    sim = ran(faulty({"script": script}, load="math"))  # checkpoints take time, so the push is found by its event
    kept_its_promises(sim)
    again = [row for row in sim.of("published") if "again" in row]
    assert len(again) == 1
    served = {row["version"] for row in sim.of("applied")}
    assert again[0]["version"] in served


def test_engines_are_as_often_away_as_their_lives_and_starts_say() -> None:
    """The oracle of the clock, in a whole run: M = 60 s and 6 s to start; weights are at hand, as they are slow else."""
    link = {
        "pull_gbyte_per_s": 1e6,
        "load_gbyte_per_s": 1e6,
        "push_gbyte_per_s": 1e6,
        "latency_s": 0.0,
        "gbit_per_s": 1e9,
    }
    law = {"engine": {"mtbf_s": 60.0, "start_s": 6.0}}
    sim = ran(faulty(law, load="math", schedule={"steps": 40}, cluster={"faults": law, "link": link}))
    kept_its_promises(sim)
    found = outlook(sim.events)
    assert found is not None
    assert found.faults is not None
    lost = found.faults.happened["engine"]
    away = 6.0 / 66.0
    assert lost >= 60
    assert found.faults.engines_down == pytest.approx(away, abs=3 * away * (1 - away) / lost**0.5)
    assert found.pools["roll"].engines == pytest.approx(8 * (1 - away), abs=0.4)


def test_the_same_seed_gives_the_same_log_and_laws_of_nothing_change_nothing() -> None:
    config = faulty(EVERYTHING, load="math")
    assert ran(config).events == ran(config).events
    plain = a_virtual(load="math")
    nothing = {"engine": {"start_s": 99.0}, "node": {"replaced": False}, "rewards": {"outage_s": 1.0}}
    assert [row for row in ran(plain).events] == ran(a_virtual(load="math", cluster={"faults": nothing})).events


def test_losses_move_trajectories_and_the_figures_say_how_many_and_what_it_cost() -> None:
    script = {"two": {"kind": "engine", "at_s": 60.0, "count": 2}, "host": {"kind": "env_host", "at_s": 70.0}}
    sim = ran(faulty({"script": script}))
    kept_its_promises(sim)
    found = outlook(sim.events)
    assert found is not None
    assert found.faults is not None
    faults = found.faults
    assert faults.happened == {"engine": 2, "env_host": 1}
    gone = {row["engine"] for row in sim.of("engine_lost")}
    homes: dict[tuple[str, int], list[str]] = {}
    for row in sim.of("turn_routed"):
        homes.setdefault((row["traj"], row["attempt"]), []).append(row["engine"])
    moved = [path for path in homes.values() if any(a in gone and b != a for a, b in pairwise(path))]
    assert faults.moved == len(moved) > 0
    ended = [row for row in sim.of("traj_finished", status="failed") if row["failure"].startswith("env lost")]
    assert faults.again == len(ended) > 0
    assert faults.wasted_tokens == sum(row["sampled"] for row in ended) + sum(
        r["lost_tokens"] for r in sim.of("engine_lost")
    )
    dropped = sim.of("ledger")[-1]["dropped"]
    assert dropped["engine_lost"] + dropped.get("env_failed", 0) == faults.wasted_tokens


def test_a_trainer_that_is_lost_before_the_first_checkpoint_costs_the_time_until_the_next_publishes() -> None:
    """Nothing is repeated, and no checkpoint is loaded: 60 s to start, and the weights once more."""
    sim = ran(faulty({"script": {"mine": {"kind": "trainer", "at_s": 20.0}}}, load="math"))
    kept_its_promises(sim)
    assert not [row for row in sim.of("checkpointed") if row["t"] < 20.0]
    assert not sim.of("trainer_restarted")
    back_s = min(row["t"] for row in sim.of("published") if row["t"] > 20.0)
    assert back_s > 20.0 + 60.0
    found = outlook(sim.events)
    assert found is not None
    assert found.faults is not None
    assert found.faults.trainer_down_s == pytest.approx(back_s - 20.0)
    assert found.faults.repeated_steps == 0
    told = summarise(sim.events)["interruptions"]["trainer"]
    assert (told["count"], told["recovered"]) == (1, 1)


def test_a_run_that_starves_because_weights_do_not_come_says_so() -> None:
    script = {"mine": {"kind": "weights", "at_s": 60.0, "lasts_s": 1e6}}
    sim = ran(faulty({"script": script}, schedule={"max_staleness": 0}, deadlines={"batch_s": 300.0}, load="math"))
    assert isinstance(sim.error, RunFailed)
    assert "no batch" in str(sim.error)
    assert "transfers of weights failed since version 1, the last: " in str(sim.error)


@pytest.mark.parametrize(
    ("law", "fails"),
    [({"node": {"mtbf_s": 1.0, "replace_s": 0.0}}, True), ({"rewards": {"mtbf_s": 1.0, "outage_s": 1e-9}}, False)],
)
def test_the_most_frequent_faults_that_are_taken_leave_a_run_its_end(law: dict[str, Any], fails: bool) -> None:
    sim = ran(faulty(law, load="math"))
    assert isinstance(sim.error, RunFailed) == fails
    assert len(sim.of("fault")) < 20_000


# --- field cases at the scale of a cluster -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["engine", "env_host"])
def test_a_cluster_whose_producers_all_die_for_good_ends_with_their_error(what: str) -> None:
    """Field case 2: the run ends long before its watchdog, and the last line says why."""
    count = {"engine": 8, "env_host": 2}[what]
    script = {"all": {"kind": what, "at_s": 50.0, "count": count}}
    sim = ran(faulty({what: {"replaced": False}, "script": script}, schedule={"steps": 50}))
    assert isinstance(sim.error, RunFailed)
    role = {"engine": "mixed", "env_host": "env"}[what]
    assert str(sim.error).splitlines() == [
        f"a worker of role {role} was lost and nobody takes its place, and none is left",
        f"cluster no_room: cluster.faults.{what}.replaced=false",
    ]
    assert sim.ended_s < 50.0 + 200.0
    assert sim.cluster.held == []


def test_a_reward_service_that_is_away_for_a_minute_leaves_nothing_scored_0() -> None:
    """Field case 28: what is not scored meanwhile is tried again. Field case 31: none of it is trained as a reward of 0."""
    away = {"script": {"mine": {"kind": "rewards", "at_s": 40.0, "lasts_s": 60.0}}}
    sim = ran(faulty(away, load="math", schedule={"steps": 4}))
    kept_its_promises(sim)
    scored = [row for row in sim.of("scored") if 40.0 < row["t"] < 100.0]
    assert all(row["reward"] is None for row in scored)
    failed = sim.of("traj_finished", status="failed")
    assert failed
    assert {row["failure"].split(":")[0] for row in failed} == {"scorer lost"}
    assert all(row["reward"] is None for row in failed)
    found = outlook(sim.events)
    assert found is not None
    assert found.faults is not None
    assert (found.faults.happened, found.faults.rewards_down_s) == ({"rewards": 1}, 60.0)


def test_hosts_that_end_one_attempt_in_twenty_waste_less_than_a_tenth_of_the_work() -> None:
    """Field case 27: groups of 8; what was lost is tried again, and no group is given up for it."""
    sim = ran(faulty({"env_host": {"mtbf_s": 1500.0}}, envs={"hosts": 8}, schedule={"steps": 6}))
    kept_its_promises(sim)
    ended = sim.of("traj_finished")
    failed = [row for row in ended if row["status"] == "failed"]
    assert 0.01 < len(failed) / len(ended) < 0.1
    assert {row["failure"].split(":")[0] for row in failed} == {"env lost"}
    assert not [row for row in sim.of("group_dropped") if row["reason"] == "env_failed"]
    ledger = sim.of("ledger")[-1]
    assert 0 < ledger["dropped"]["env_failed"] < 0.1 * ledger["sampled"]
