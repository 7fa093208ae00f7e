"""Affinity as a run uses it: from the configuration's pools to what routing asks.

Invariant: pools with the same device and the same degrees are of one kind and stand in one place, whatever a table says of them
and whatever they cost; where all are of one kind nothing is preferred, and a run is the one without affinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.config.cluster import AutoAffinity, NoAffinity, TableAffinity
from rollart.config.placement import Placement, device_of, layout, placements, shape_of
from rollart.config.schema import RunConfig
from rollart.config.virtual import ModelledEngine, ShapeModel
from rollart.core.errors import ConfigError
from rollart.core.profile import Profile
from rollart.perf.calibrated import engine_cost
from rollart.perf.engines import engine_facts
from rollart.perf.profiles import ServedProfile
from rollart.perf.serving import Server
from rollart.sched.affinity import OFF, Affinity, Auto, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The pools that sample, by kind; a kind has the name of its first pool."""

    places: Mapping[str, str]
    """Pool -> kind."""
    engines: Mapping[str, Placement]
    """Kind -> one of its engines."""


def affinity_of(config: RunConfig) -> Affinity:
    """What `affinity` asks for. Raises ConfigError for pools that no cost model knows where it is to learn."""
    asked = config.affinity
    if isinstance(asked, NoAffinity):
        return OFF
    kinds = kinds_of(config)
    if len(kinds.engines) < 2:
        return OFF
    if isinstance(asked, TableAffinity):
        return Table({task: _order(preference.pools, kinds) for task, preference in asked.tasks.items()}, kinds.places)
    assert isinstance(asked, AutoAffinity)
    return Auto(
        kinds.places, profile_of(config, kinds), sampled=expected_tokens(config), explore=asked.explore,
        half_life=asked.half_life,
    )  # fmt: skip


def _order(pools: tuple[str, ...], kinds: Kinds) -> tuple[str, ...]:
    return tuple(dict.fromkeys(kinds.places.get(pool, pool) for pool in pools))


def kinds_of(config: RunConfig) -> Kinds:
    """Pools that sample, those that are alike together."""
    pools = layout(config)
    first, places, engines = dict[tuple[object, ...], str](), dict[str, str](), dict[str, Placement]()
    for place in placements(config):
        if place.role != "train" and place.pool in pools and place.pool not in places:
            kind = first.setdefault((pools[place.pool].device, place.role, place.degrees), place.pool)
            places[place.pool] = kind
            engines.setdefault(kind, place)
    return Kinds(places=places, engines=engines)


def profile_of(config: RunConfig, kinds: Kinds) -> Profile:
    """Seconds by kind of engine, by the cost models."""
    model, engine, pools = config.model, config.engine, layout(config)
    if not isinstance(model, ShapeModel) or not isinstance(engine, ModelledEngine):
        raise ConfigError(
            f"affinity.kind=auto begins with cost models, which model.kind={model.kind} with engine.kind={engine.kind} do not "
            "have; use model.kind=shape and engine.kind=modelled, or affinity.kind=table"
        )
    facts = engine_facts(engine.name, engine.version)
    servers = {
        kind: Server(
            cost=engine_cost(
                device_of(config.cluster, pools[place.pool].device), shape_of(model), place.degrees, precision=engine.dtype,
                engine=engine.name, version=engine.version, step_tokens=float(engine.step_tokens),
            ),
            facts=facts, max_sequences=float(engine.max_live), max_step_tokens=float(engine.step_tokens),
        )
        for kind, place in kinds.engines.items()
    }  # fmt: skip
    return ServedProfile(servers)


def expected_tokens(config: RunConfig) -> dict[str, float]:
    """Task -> tokens that a turn samples, before any is seen: its limit, or an even share of the context for each of its
    turns."""
    context = config.model.max_context if isinstance(config.model, ShapeModel) else None
    return {
        name: min(task.max_tokens, task.max_tokens if context is None else max(1.0, context / task.max_turns))
        for name, task in config.tasks.items()
    }
