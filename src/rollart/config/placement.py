"""Which workers a configuration asks for, and on which pool: the trainer and every engine, with its degrees.

Invariant: what is placed fits: a pool's engines are never more than its devices allow, and an engine's weights fit its
ranks. Without pools a run has the engines that `engine.count` says, in one pool. Where rollout and training take turns on the
same devices (`schedule.colocated`), every pool with the trainer's kind of device does both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollart.config.cluster import (
    ClusterConfig,
    DeviceConfig,
    PoolConfig,
    PoolRole,
    pools_in_use,
    sampling,
    taking_turns,
)
from rollart.config.schema import RunConfig
from rollart.config.served import server_of, smallest_tp
from rollart.config.virtual import ModelledEngine, ShapeModel
from rollart.core.errors import ConfigError
from rollart.core.resources import DEFAULT_DEGREES, Degrees
from rollart.core.types import Role
from rollart.perf.configs import shape_from
from rollart.perf.devices import GIB, Device, device
from rollart.perf.shapes import ModelShape

DEFAULT_POOL = "default"
"""The one pool of a machine that has no others."""
SPLIT_ROLES: tuple[PoolRole, PoolRole] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One worker."""

    role: Role
    pool: str = DEFAULT_POOL
    degrees: Degrees = DEFAULT_DEGREES
    devices: int = 1


def layout(config: RunConfig) -> Mapping[str, PoolConfig]:
    """The pools as the schedule uses them."""
    return pools_in_use(config.cluster, colocated=config.schedule.colocated)


def colocated_pools(config: RunConfig) -> frozenset[str]:
    """Pools on whose devices engines and trainer take turns."""
    return taking_turns(layout(config))


def in_turn(config: RunConfig) -> bool:
    """Whether nothing samples while the trainer computes: all engines are on its devices."""
    return bool(colocated_pools(config)) and colocated_pools(config) >= set(sampling(layout(config)))


def placements(config: RunConfig) -> tuple[Placement, ...]:
    """The trainer and every engine, in the order in which they are started. Raises ConfigError for what cannot be placed."""
    pools = layout(config)
    if not pools:
        return (Placement(role="train"), *[Placement(role="mixed")] * config.engine.count)
    trainers = [(name, pool) for name, pool in pools.items() if "train" in pool.roles]
    home = trainers[0][0]
    found = [Placement(role="train", pool=home, devices=sum(pool.devices for _, pool in trainers))]
    for name, pool in pools.items():
        if "mixed" in pool.roles:
            degrees = engine_degrees(config, name, pool)
            place = Placement(role="mixed", pool=name, degrees=degrees, devices=_ranks(degrees))
            found += [place] * _workers(pool, degrees)
    return (*found, *_split_engines(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The prefill or the decode workers of one split engine."""

    pool: str
    workers: int
    degrees: Degrees


def halves(config: RunConfig) -> tuple[Half, Half, int] | None:
    """Prefill and decode workers of one split engine, and how many such engines there are: as many as both pools divide into.

    None: no pool has these roles. Raises ConfigError for a model that has no room in one of them.
    """
    found: dict[PoolRole, Half] = {}
    for name, pool in layout(config).items():
        for role in SPLIT_ROLES:
            if role in pool.roles:
                degrees = engine_degrees(config, name, pool)
                found[role] = Half(pool=name, workers=_workers(pool, degrees), degrees=degrees)
    if len(found) < len(SPLIT_ROLES):
        return None
    prefill, decode = (found[role] for role in SPLIT_ROLES)
    engines = math.gcd(prefill.workers, decode.workers)
    share = replace(prefill, workers=prefill.workers // engines), replace(decode, workers=decode.workers // engines)
    return (*share, engines)


def _split_engines(config: RunConfig) -> list[Placement]:
    found = halves(config)
    if found is None:
        return []
    prefill, decode, engines = found
    devices = sum(half.workers * _ranks(half.degrees) for half in (prefill, decode))
    return [Placement(role="decode", pool=decode.pool, degrees=decode.degrees, devices=devices)] * engines


def _ranks(degrees: Degrees) -> int:
    return degrees.tp * degrees.pp * (degrees.dp if degrees.ep > 1 else 1)


def _workers(pool: PoolConfig, degrees: Degrees) -> int:
    """How many engines, or halves of engines, stand in a pool: none straddles nodes that has room on one of them."""
    ranks = _ranks(degrees)
    if ranks <= pool.devices_per_node:
        return pool.nodes * (pool.devices_per_node // ranks)
    return pool.nodes // math.ceil(ranks / pool.devices_per_node)


def idle_devices(config: RunConfig) -> Mapping[str, int]:
    """Pools that sample -> devices on which no engine stands, where there are any."""
    idle: dict[str, int] = {}
    for name in sampling(layout(config)):
        pool = layout(config)[name]
        degrees = engine_degrees(config, name, pool)
        idle[name] = pool.devices - _workers(pool, degrees) * _ranks(degrees)
    return {name: n for name, n in idle.items() if n}


def engine_degrees(config: RunConfig, name: str, pool: PoolConfig) -> Degrees:
    """Degrees of one engine of a pool: as given, or the fewest tensor-parallel ranks on which the model has room.

    Raises ConfigError when it has none, or when an engine is larger than the pool.
    """
    where = f"cluster.pools.{name}"
    model = config.model
    engine = config.engine if isinstance(config.engine, ModelledEngine) else ModelledEngine(kind="modelled")
    if pool.tp:
        degrees = _with_tp(pool, pool.tp)
        _fits_pool(where, degrees, pool)
        if isinstance(model, ShapeModel):
            server = server_of(engine, device_of(config.cluster, pool.device), shape_of(model), degrees)
            server.cost.kv_capacity_tokens()
        return degrees
    if not isinstance(model, ShapeModel):
        return DEFAULT_DEGREES
    at, shape, one = device_of(config.cluster, pool.device), shape_of(model), _with_tp(pool, 1)
    tp = smallest_tp(engine, at, shape, one, max_context=model.max_context, most=pool.devices_per_node)
    if tp is None:
        server_of(engine, at, shape, one)  # says why, where the other degrees cannot be
        raise ConfigError(
            f"{where}: the model with a trajectory of model.max_context={model.max_context} tokens has no room on "
            f"{pool.devices_per_node} devices of a node; raise {where}.pp, or use a device with more memory"
        )
    degrees = _with_tp(pool, tp)
    _fits_pool(where, degrees, pool)
    return degrees


def _with_tp(pool: PoolConfig, tp: int) -> Degrees:
    return Degrees(tp=tp, pp=pool.pp, ep=pool.ep, dp=max(1, pool.ep // tp))


def _fits_pool(where: str, degrees: Degrees, pool: PoolConfig) -> None:
    ranks = _ranks(degrees)
    if ranks > pool.devices:
        raise ConfigError(
            f"{where}: an engine of tp {degrees.tp} x pp {degrees.pp} (ep {degrees.ep}) takes {ranks} devices and the pool has "
            f"{pool.devices}; use {where}.nodes={-(-ranks // pool.devices_per_node)} or smaller degrees"
        )
    if degrees.tp > pool.devices_per_node:
        raise ConfigError(
            f"{where}.tp={degrees.tp} is more than {where}.devices_per_node={pool.devices_per_node}; use {where}.tp="
            f"{pool.devices_per_node} and {where}.pp for the rest"
        )


def shape_of(model: ShapeModel) -> ModelShape:
    """Raises ConfigError for a model that is not known, with the nearest names."""
    if bool(model.name) == bool(model.config):
        raise ConfigError("model.kind=shape takes model.name or model.config, one of them")
    return shape_from(model.name or model.config)


def device_of(cluster: ClusterConfig, name: str) -> Device:
    """Raises ConfigError for a device that neither the table nor `cluster.devices` has, with the nearest names."""
    return device(name, {own: _own_device(own, given) for own, given in cluster.devices.items()})


def _own_device(name: str, given: DeviceConfig) -> Device:
    return Device(
        name=name, flops={dtype: tera * 1e12 for dtype, tera in (("bf16", given.tflops), ("fp8", given.fp8_tflops)) if tera},
        memory_bytes=given.memory_gib * GIB, memory_bytes_per_s=given.memory_gb_per_s * 1e9,
        link_bytes_per_s=given.link_gb_per_s * 1e9,
    )  # fmt: skip
