"""Devices of a simulated cluster: never in two leases, and refused with the pool's name and numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Failure
from rollart.sim.slots import PoolSize, Slots, node_of

SIZES = {"a": PoolSize(devices=16, devices_per_node=8), "b": PoolSize(devices=4, devices_per_node=4)}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from((1, 2, 4, 8)), st.booleans()), max_size=40))
def test_a_device_is_in_one_lease_at_a_time(asked: list[tuple[str, int, bool]]) -> None:
    slots = Slots(SIZES)
    held: dict[str, tuple[str, ...]] = {}
    for n, (pool, wanted, gives_back) in enumerate(asked):
        free = SIZES[pool].devices - sum(device.startswith(pool) for devices in held.values() for device in devices)
        taken = slots.take(f"lease-{n}", {pool: wanted})
        assert isinstance(taken, Failure) == (wanted > free)
        if not isinstance(taken, Failure):
            held[f"lease-{n}"] = taken
        if gives_back and held:
            lease = next(iter(held))
            slots.give_back(lease)
            slots.give_back(lease)
            del held[lease]
        devices = [device for devices in held.values() for device in devices]
        assert len(devices) == len(set(devices))


def test_engines_of_half_a_node_stand_two_to_a_node() -> None:
    slots = Slots(SIZES)
    nodes = [node_of(slots.take(f"lease-{n}", {"a": 4})[0]) for n in range(4)]  # type: ignore[index]
    assert nodes == ["a/0", "a/0", "a/1", "a/1"]


def test_what_has_no_room_says_so() -> None:
    slots = Slots(SIZES)
    refused = slots.take("lease-1", {"a": 4, "b": 8})
    assert isinstance(refused, Failure)
    assert refused.kind == "no_room"
    assert refused.detail == "pool b has 4 of 4 devices free, 8 are needed"
    assert len(slots.take("lease-2", {"a": 16, "b": 4})) == 20  # type: ignore[arg-type]
    unknown = slots.take("lease-3", {"c": 1})
    assert isinstance(unknown, Failure)
    assert "pools: a, b" in unknown.detail
