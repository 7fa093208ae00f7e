"""Simulated engines from pools: one step law with the validated model, cache that is there, refusals that help."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.config.placement import placements
from rollart.config.served import BLOCK_TOKENS
from rollart.core.errors import ConfigError
from rollart.core.resources import Degrees
from rollart.perf.serving import Workload, serve
from rollart.sim.hardware import Hardware, needed_bytes
from rollart.sim.virtual import build
from virtual_configs import POOLS, a_virtual


def test_the_step_law_is_the_one_that_is_validated() -> None:
    config = a_virtual()
    engine = Hardware(config).engine("roll", config.cluster.pools["roll"], Degrees())
    server = engine.cost.server
    served = serve(server, Workload(prompt=512, answer=256, concurrency=64))
    alone = engine.cost.step_s(served.batch, server.context(served.workload))
    assert alone == served.steady.plain_s
    mixed = engine.cost.step_s(32.0, 900.0, prefill=2048.0, prefill_context=512.0)
    assert mixed == server.step_s(32.0, 900.0, 2048.0, 1024.0)
    device_alone = server.cost.step_s(32.0, 900.0, prefill=2048.0, prefill_context=512.0)
    assert mixed > device_alone  # the host's work is in it


def test_cache_is_whole_blocks_of_what_weights_leave() -> None:
    config = a_virtual()
    engine = Hardware(config).engine("roll", config.cluster.pools["roll"], Degrees())
    cost = engine.cost.server.cost
    capacity = cost.kv_capacity_tokens()
    assert engine.kv_tokens % BLOCK_TOKENS == 0
    assert 0.97 * capacity < engine.kv_tokens <= capacity
    assert needed_bytes(cost, engine.kv_tokens) <= cost.memory_fraction * cost.device.memory_bytes


def test_a_smaller_model_leaves_more_cache_and_more_ranks_too() -> None:
    small = a_virtual(model={"name": "qwen3-4b"})
    large = a_virtual()

    def kv(config: Any, tp: int) -> int:
        return Hardware(config).engine("roll", config.cluster.pools["roll"], Degrees(tp=tp)).kv_tokens

    assert kv(small, 1) > kv(large, 1)
    assert kv(large, 2) > 2 * kv(large, 1)


def test_experts_may_be_spread_over_ranks() -> None:
    pools = {**POOLS, "train": {**POOLS["train"], "nodes": 4}, "roll": {"device": "H20", "tp": 1, "ep": 8}}
    config = a_virtual(pools=pools, model={"name": "qwen3-30b-a3b"}, trainer={"plan": {"ep": 8}})
    places = [place for place in placements(config) if place.role == "mixed"]
    assert [place.devices for place in places] == [8]
    engine = build(config).engines["roll"]
    assert engine.ranks == 8
    assert engine.rules.max_live == 8 * engine.facts.max_sequences


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(a_virtual(**changes))
    return str(caught.value)


def roll(**pool: Any) -> dict[str, Any]:
    return {**POOLS, "roll": {"device": "H20", **pool}}


def test_an_unknown_device_is_named_with_its_nearest() -> None:
    text = refused(pools={**POOLS, "roll": {"device": "H2000"}})
    assert text.startswith("cluster.pools.roll.device=H2000: unknown device 'H2000'; nearest known: ")
    assert "H200" in text


def test_an_unknown_model_is_named_with_its_nearest() -> None:
    assert "Qwen3" in refused(model={"name": "qwen3-9b"})


def test_a_model_that_does_not_fit_says_what_it_needs_and_what_fits() -> None:
    text = refused(pools=roll(tp=1), model={"name": "llama3-70b"})
    assert text.startswith("cluster.pools.roll: Llama-3-70B with a trajectory of model.max_context=32768 tokens needs ")
    assert "GiB on each of 1 H20 SXM 96GB, which give 86.0 GiB of 95.6" in text
    assert "use cluster.pools.roll.tp=2" in text
    tight = refused(pools=roll(tp=1), model={"name": "qwen3-32b", "max_context": 131072})
    assert "use cluster.pools.roll.tp=2" in tight


def test_more_ranks_than_a_node_has_are_refused() -> None:
    assert "cluster.pools.roll.tp=16 is more than cluster.pools.roll.devices_per_node=8" in refused(
        pools=roll(tp=16, nodes=2)
    )


def test_heads_and_experts_are_spread_evenly() -> None:
    assert "cluster.pools.roll.tp=3 does not divide the 32 heads of Qwen3-8B; use cluster.pools.roll.tp=2" in refused(
        pools=roll(tp=3)
    )
    text = refused(pools=roll(tp=4, ep=6), model={"name": "qwen3-30b-a3b"})
    assert "cluster.pools.roll.ep=6 does not spread 128 experts" in text
    assert text.endswith("use cluster.pools.roll.ep=4") or text.endswith("use cluster.pools.roll.ep=8")


def test_deadlines_below_what_the_models_say_are_refused() -> None:
    assert "use deadlines.weights_s=" in refused(deadlines={"weights_s": 20})
    assert "use deadlines.train_s=" in refused(deadlines={"train_s": 0.1})


def test_a_version_that_waits_for_the_push_before_it_has_to_be_in_time_too() -> None:
    """Push 32.9 s, pull 6.9 s: steps of a batch of 8 are shorter than a push, those of 2048 are not."""
    slow = {"batch": 2048, "group_size": 8, "max_staleness": 0}
    assert "over cluster.link, 72.7 s" in refused(deadlines={"weights_s": 60}, schedule={"batch": 8, "group_size": 8})
    assert "over cluster.link, 39.8 s" in refused(
        deadlines={"weights_s": 20}, schedule=slow, envs={"sessions_per_host": 4096}
    )


def test_without_pools_there_is_nothing_to_simulate() -> None:
    assert refused(pools={}).startswith("cluster.pools is empty")


def test_real_parts_are_refused() -> None:
    real = {"a": {"env": {"kind": "max_digit"}}}
    assert "use env.kind=workload" in refused(tasks=real)


def test_numbers_that_are_not_finite_are_refused() -> None:
    own = {"tflops": float("inf"), "memory_gib": 80, "memory_gb_per_s": 3000, "link_gb_per_s": 200}
    with pytest.raises(ValueError, match="finite"):
        a_virtual(cluster={"devices": {"mine": own}}, pools={**POOLS, "roll": {"device": "mine"}})


def test_a_device_of_ones_own_and_its_cost() -> None:
    own = {"tflops": 500, "memory_gib": 80, "memory_gb_per_s": 3000, "link_gb_per_s": 200, "cost": 2.0}
    made = build(a_virtual(cluster={"devices": {"mine": own}}, pools={**POOLS, "roll": {"device": "mine"}}))
    assert made.costs == {"train": 8 * 2.85, "roll": 16.0}
    assert made.cost_per_s == 8 * 2.85 + 16.0


def test_the_papers_cost_ratio() -> None:
    """Oracle 11 of RollArt: 96 H800 and 32 H20 against 128 H800."""
    mixed = build(
        a_virtual(
            pools={"train": {"device": "H800", "nodes": 12, "roles": ["train"]}, "roll": {"device": "H20", "nodes": 4}}
        )
    )
    whole = build(
        a_virtual(
            pools={"train": {"device": "H800", "nodes": 12, "roles": ["train"]}, "roll": {"device": "H800", "nodes": 4}}
        )
    )
    assert mixed.cost_per_s / whole.cost_per_s == pytest.approx(0.838, abs=0.001)


def test_schedules_that_never_overlap_are_named() -> None:
    assert any("never overlaps" in note for note in build(a_virtual(schedule={"max_staleness": 0})).notes)
    both = {"all": {"device": "H800", "roles": ["train", "mixed"]}}
    assert any(
        "never overlap" in note
        for note in build(a_virtual(pools=both, schedule={"max_staleness": 0, "colocated": True})).notes
    )
    assert build(a_virtual()).notes == ()


def test_the_basis_names_each_model_that_a_figure_rests_on() -> None:
    text = "\n".join(build(a_virtual()).basis)
    for said in (
        "Qwen3-8B",
        "H20 SXM 96GB",
        "vLLM V1",
        "constant",
        "Megatron-Core",
        "H800",
        "push",
        "task a: inferred",
    ):
        assert said in text
