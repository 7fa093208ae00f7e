"""Affinity as a run uses it: from the configuration's pools to what routing asks.

Invariant: pools with the same device and the same degrees are one kind, and cost the same unless their configuration says
otherwise; a device without a known cost counts as much as an H20, so that time alone decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from rollart.config.cluster import AutoAffinity, PoolConfig, TableAffinity
from rollart.config.placement import device_of, layout, placements
from rollart.config.schema import RunConfig
from rollart.perf.prices import relative_cost
from rollart.sched.affinity import OFF, Affinity, Auto, Kind, Table


def affinity_of(config: RunConfig) -> Affinity:
    """What `affinity` asks for."""
    asked = config.affinity
    if isinstance(asked, TableAffinity):
        table = {task: preference.pools for task, preference in asked.tasks.items()}
        return Table(table, alike=_alike(_kinds(config), {pool for pools in table.values() for pool in pools}))
    if isinstance(asked, AutoAffinity):
        return Auto(_kinds(config), explore=asked.explore, half_life=asked.half_life)
    return OFF


def _alike(kinds: Mapping[str, Kind], named: Set[str]) -> dict[str, str]:
    """A pool that a table does not name (the trainer's, where its devices sample as well) serves as the first of its kind that
    the table does name."""
    found: dict[str, str] = {}
    for pool, kind in kinds.items():
        like = [other for other, its in kinds.items() if other in named and its == kind]
        if pool not in named and like:
            found[pool] = like[0]
    return found


def _kinds(config: RunConfig) -> dict[str, Kind]:
    """Pool -> its kind, of the pools that sample."""
    pools, found = layout(config), dict[str, Kind]()
    for place in placements(config):
        if place.role != "train" and place.pool in pools and place.pool not in found:
            pool = pools[place.pool]
            each = _device_cost(config, pool)
            found[place.pool] = Kind(
                name=f"{pool.device} {place.degrees} at {each:g}", cost=each * place.devices,
            )  # fmt: skip
    return found


def _device_cost(config: RunConfig, pool: PoolConfig) -> float:
    """Of one device for a second, relative to an H20's."""
    own = config.cluster.devices.get(pool.device)
    known = own.cost if own is not None else relative_cost(device_of(config.cluster, pool.device))
    return pool.cost or known or 1.0
