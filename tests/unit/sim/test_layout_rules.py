"""Layouts that use devices twice, leave some without a use, or can never overlap: refused when read, with what to do."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from rollart.config.placement import placements
from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError
from rollart.sim.hardware import Hardware
from rollart.sim.virtual import build
from virtual_configs import POOLS, a_virtual

ROLES = ("train", "mixed", "prefill", "decode", "score")
BASE = {"train": {"device": "H800", "roles": ["train"]}, "roll": {"device": "H20"}}


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        a_virtual(**changes)
    return str(caught.value)


@pytest.mark.parametrize("roles", [roles for n in (2, 3) for roles in combinations(ROLES, n)], ids=",".join)
def test_two_roles_use_devices_twice_unless_they_take_turns(roles: tuple[str, ...]) -> None:
    pools = {"both": {"device": "H800", "roles": list(roles)}}
    needed = {"train": ["train"], "roll": ["mixed"]} if "train" not in roles else {"roll": ["mixed"]}
    pools |= {name: {"device": "H20", "roles": own} for name, own in needed.items()}
    if {"prefill", "decode"} & set(roles) and not {"prefill", "decode"} <= set(roles):
        other = "decode" if "prefill" in roles else "prefill"
        pools["half"] = {"device": "H20", "roles": [other]}
    if set(roles) == {"train", "mixed"}:
        build(a_virtual(pools=pools))
        return
    text = refused(pools=pools)
    assert f"cluster.pools.both.roles=[{', '.join(roles)}] uses its devices twice" in text
    assert "give each of these roles a pool of its own" in text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_pool_for_each_half_of_split_engines(role: str) -> None:
    """A second one would idle and be paid for."""
    other = "decode" if role == "prefill" else "prefill"
    halves = {"a": [role], "b": [role], "c": [other]}
    text = refused(pools={"train": BASE["train"], **{k: {"device": "H20", "roles": own} for k, own in halves.items()}})
    assert f"cluster.pools.a and b both have role {role}; give it to one of them" in text


def split(device: str) -> dict[str, Any]:
    return {
        "train": BASE["train"],
        "read": {"device": device, "devices_per_node": 2, "roles": ["prefill"]},
        "decode": {"device": "H20", "devices_per_node": 4, "roles": ["decode"]},
    }


def test_split_engines_on_the_trainers_kind_do_not_go_with_a_colocated_schedule() -> None:
    in_turn = {"max_staleness": 0, "colocated": True}
    text = refused(pools=split("H800"), schedule=in_turn)
    assert "schedule.colocated=true with cluster.pools.read.roles=[prefill]" in text
    assert "use role mixed, another device, or schedule.colocated=false" in text
    apart = build(a_virtual(pools=split("A100"), schedule=in_turn))
    assert {place.role for place in placements(apart.config)} == {"train", "mixed", "decode"}


BOTH = {"all": {"device": "H800", "roles": ["train", "mixed"]}}


def test_devices_in_turn_cannot_overlap_at_any_staleness() -> None:
    text = refused(pools=BOTH, schedule={"max_staleness": 2})
    assert "schedule.max_staleness=2: cluster.pools.all has roles train and mixed" in text
    assert "use schedule.max_staleness=0, or a pool of its own with role mixed" in text
    notes = build(a_virtual(pools=BOTH, schedule={"max_staleness": 0})).notes
    assert any("take turns on the same devices and never overlap" in note for note in notes)


def test_with_another_pool_beside_devices_in_turn_a_schedule_overlaps_in_part() -> None:
    made = build(a_virtual(pools={**BOTH, "roll": {"device": "H20"}}, schedule={"max_staleness": 1}))
    assert [note for note in made.notes if "never" in note] == []
    assert any(
        "cluster.pools.all has roles train and mixed: its engines stand still while it trains" in n for n in made.notes
    )


@pytest.mark.parametrize("colocated", [True, False])
def test_an_evaluation_beside_training_needs_devices(colocated: bool) -> None:
    schedule = {"max_staleness": 0, "colocated": colocated}
    text = refused(pools=BOTH, schedule=schedule, eval={"every": 1, "episodes": 4})
    assert "an evaluation beside training has no devices; use eval.every=0" in text
    if not colocated:
        a_virtual(pools={**BOTH, "roll": {"device": "H20"}}, schedule=schedule, eval={"every": 1, "episodes": 4})


def on_a_device_of(memory_gib: float, **sections: Any) -> RunConfig:
    own = {"tflops": 300, "memory_gib": memory_gib, "memory_gb_per_s": 1000, "link_gb_per_s": 30}
    pools = {"train": {**POOLS["train"], "nodes": 4}, "roll": {"device": "own"}}
    return a_virtual(pools=pools, cluster={"devices": {"own": own}}, **sections)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "TensorRT-LLM"])
def test_degrees_that_are_chosen_are_those_that_the_engine_has_room_on(engine: str) -> None:
    """Whatever it keeps for itself: where one rank just does or just does not do."""
    chosen = set()
    for tenths in range(230, 300, 2):
        config = on_a_device_of(tenths / 10, engine={"name": engine})
        (place, *_) = [place for place in placements(config) if place.role == "mixed"]
        assert Hardware(config).engine("roll", config.cluster.pools["roll"], place.degrees).kv_tokens >= 32768
        chosen.add(place.degrees.tp)
    assert chosen == {1, 2}


def test_no_degrees_are_chosen_that_do_not_divide_a_models_heads() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster.pools.roll: .* has no room on 8 devices of a node; raise cluster.pools.roll.pp"
    ):
        placements(on_a_device_of(5.0, model={"name": "qwen2.5-7b"}))


def test_an_engine_of_which_nothing_is_known_is_refused_with_the_nearest() -> None:
    assert "name=vLM: no facts are known of this engine; use vLLM" in refused(engine={"name": "vLM"})
