"""Devices of a simulated cluster: never in two leases, on one node where there is room, and refused with the pool's name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.placement import placements
from rollart.core.errors import ConfigError
from rollart.core.types import Failure
from rollart.sim.slots import PoolSize, Slots, node_of
from rollart.sim.virtual import build, check_room
from virtual_configs import POOLS, a_virtual

SIZES = {"a": PoolSize(devices=16, devices_per_node=8), "b": PoolSize(devices=4, devices_per_node=4)}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from((1, 2, 3, 4, 8, 16)), st.booleans()), max_size=40))
def test_a_device_is_in_one_lease_at_a_time_and_a_worker_on_as_few_nodes_as_can_be(
    asked: list[tuple[str, int, bool]],
) -> None:
    slots = Slots(SIZES)
    held: dict[str, tuple[str, ...]] = {}
    for n, (pool, wanted, gives_back) in enumerate(asked):
        per_node, nodes = SIZES[pool].devices_per_node, SIZES[pool].devices // SIZES[pool].devices_per_node
        used = [
            sum(node_of(device) == f"{pool}/{node}" for part in held.values() for device in part)
            for node in range(nodes)
        ]
        room = max(per_node - few for few in used) >= wanted or used.count(0) * per_node >= wanted
        taken = slots.take(f"lease-{n}", {pool: (wanted,)})
        assert isinstance(taken, Failure) != room
        if not isinstance(taken, Failure):
            assert len(taken) == wanted
            assert len({node_of(device) for device in taken}) == -(-wanted // per_node)
            held[f"lease-{n}"] = taken
        if gives_back and held:
            lease = next(iter(held))
            slots.give_back(lease)
            slots.give_back(lease)
            del held[lease]
        devices = [device for part in held.values() for device in part]
        assert len(devices) == len(set(devices))


def test_engines_of_half_a_node_stand_two_to_a_node() -> None:
    slots = Slots(SIZES)
    nodes = [node_of(slots.take(f"lease-{n}", {"a": (4,)})[0]) for n in range(4)]  # type: ignore[index]
    assert nodes == ["a/0", "a/0", "a/1", "a/1"]


def test_what_has_no_room_says_so_and_takes_nothing() -> None:
    slots = Slots(SIZES)
    refused = slots.take("lease-1", {"a": (4,), "b": (8,)})
    assert isinstance(refused, Failure)
    assert refused.kind == "no_room"
    assert refused.detail == "pool b has 4 of 4 devices free, 8 are needed"
    assert len(slots.take("lease-2", {"a": (8, 4), "b": (4,)})) == 16  # type: ignore[arg-type]
    apart = slots.take("lease-3", {"a": (2, 3)})
    assert isinstance(apart, Failure)
    assert apart.detail == "pool a has 4 of 16 devices free, 5 are needed"
    unknown = slots.take("lease-4", {"c": (1,)})
    assert isinstance(unknown, Failure)
    assert "pools: a, b" in unknown.detail


def test_what_would_straddle_nodes_has_no_room() -> None:
    slots = Slots(SIZES)
    for n in range(2):
        slots.take(f"lease-{n}", {"a": (6,)})
    refused = slots.take("lease-2", {"a": (3,)})
    assert isinstance(refused, Failure)
    assert refused.detail == "pool a has 4 of 16 devices free, 3 are needed, 3 of them on one node or on whole ones"


@pytest.mark.parametrize(
    ("pool", "engines", "idle"),
    [
        ({"devices_per_node": 8, "nodes": 2, "tp": 4, "pp": 1}, 4, 0),
        ({"devices_per_node": 6, "nodes": 2, "tp": 4, "pp": 1}, 2, 4),  # not three of four: one would straddle
        ({"devices_per_node": 4, "nodes": 3, "tp": 4, "pp": 2}, 1, 4),
        ({"devices_per_node": 4, "nodes": 2, "tp": 1, "pp": 3}, 2, 2),
    ],
)
def test_as_many_engines_as_nodes_hold_and_what_is_left_is_said(pool: dict[str, int], engines: int, idle: int) -> None:
    made = build(a_virtual(pools={**POOLS, "roll": {"device": "H20", **pool}}))
    assert sum(place.role == "mixed" for place in placements(made.config)) == engines
    assert [
        note for note in made.notes if f"{idle} of {made.devices['roll']} devices are in no engine" in note
    ] != [] or not idle
    assert any("is larger than a node" in note for note in made.notes) == (
        pool["tp"] * pool["pp"] > pool["devices_per_node"]
    )


def test_a_cluster_without_devices_for_all_workers_at_once_is_refused() -> None:
    made = build(a_virtual())
    takes = made.cluster.takes
    assert made.cluster.slots is not None
    sizes = {**made.cluster.slots.sizes, "roll": PoolSize(devices=6, devices_per_node=6)}
    check_room(placements(made.config), made.cluster.slots.sizes, takes)
    with pytest.raises(ConfigError, match="no devices for 8 workers of role mixed: pool roll has 0 of 6 devices free"):
        check_room(placements(made.config), sizes, takes)
