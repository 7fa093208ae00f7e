"""Devices and what they are for, as configuration: pools, links between them, which pool serves which task.

Invariant: a layout that is accepted has somewhere to sample and somewhere to train; whether a model fits is known where its
shape is. Without pools a run takes what its machine has (`engine.count`, `trainer.ranks`). See `schema.py` for the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollart.config.faults import FaultsConfig
from rollart.config.node import Node

PoolRole = Literal["train", "mixed", "prefill", "decode", "score"]
SAMPLING_ROLES: tuple[PoolRole, ...] = ("mixed", "prefill", "decode")


class PoolConfig(Node):
    """Nodes that are alike in hardware and role."""

    device: str
    """An accelerator by its usual name (H800, H20, H100, A100, H200, B200, L40S ..), or a key of cluster.devices."""
    nodes: int = Field(default=1, ge=1)
    devices_per_node: int = Field(default=8, ge=1)
    roles: tuple[PoolRole, ...] = Field(default=("mixed",), min_length=1)
    """train: the trainer; mixed: engines; prefill, decode: the two halves of engines that are split; score: reward models.
    train and mixed together: both on the same devices, in turn (schedule.max_staleness=0 unless other pools sample as well);
    no other two go together."""
    tp: int = Field(default=0, ge=0)
    """Tensor-parallel ranks of one engine; 0: the fewest that the model fits on."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages of one engine."""
    ep: int = Field(default=1, ge=1)
    """Ranks that experts are spread over."""
    cost: float = Field(default=0.0, ge=0)
    """Of one device, relative to an H20 = 1; 0: the table's."""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


class DeviceConfig(Node):
    """An accelerator that the table does not have, by its data sheet."""

    tflops: float = Field(gt=0)
    """Dense TFLOP/s in bf16."""
    fp8_tflops: float = Field(default=0.0, ge=0)
    """The same in fp8; 0: it has no units for it."""
    memory_gib: float = Field(gt=0)
    """As the driver reports it."""
    memory_gb_per_s: float = Field(gt=0)
    link_gb_per_s: float = Field(gt=0)
    """To its peers in the node, one direction."""
    cost: float = Field(default=1.0, gt=0)
    """Relative to an H20 = 1."""


class LinkConfig(Node):
    """What carries weights from trainers to engines. Defaults: fitted to RollArt's table of weight transfer, 8B to 32B."""

    gbit_per_s: float = Field(default=200.0, gt=0)
    """Of the network between pools, one direction."""
    push_gbyte_per_s: float = Field(default=0.5, gt=0)
    """What one publisher pushes into the store by its host's work (RollArt, table of weight transfer: 0.47 to 0.49)."""
    pull_gbyte_per_s: float = Field(default=2.45, gt=0)
    """What one node of engines pulls out of it into its host's memory; engines of a node share one pull (RollArt: 6.2 s for
    an 8B model)."""
    load_gbyte_per_s: float = Field(default=10.85, gt=0)
    """From host memory into an engine's devices, at an apply (RollArt, exposed part of the pull: 1.4 s for an 8B model)."""
    slice_gbyte_per_s: float = Field(default=14.7, gt=0)
    """What a host cuts out of whole buckets for the ranks of a tensor-parallel engine, at the pull and again at the apply
    (from RollArt's 14B and 32B on 2 and 4 ranks, whose rates are lower than those of 8B on one)."""
    bucket_gbyte: float = Field(default=1.0, gt=0)
    """Weights go in pieces of this size (RollArt: 1 GB)."""
    latency_s: float = Field(default=0.01, ge=0)
    """Of one bucket."""


class ClusterConfig(Node):
    """The machines."""

    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    devices: dict[str, DeviceConfig] = Field(default_factory=dict)
    """Accelerators of your own."""
    link: LinkConfig = LinkConfig()
    faults: FaultsConfig = FaultsConfig()


class NoAffinity(Node):
    """Every engine serves every task."""

    kind: Literal["off"] = "off"


class Preference(Node):
    """Which pools a task prefers."""

    pools: tuple[str, ...] = Field(min_length=1)
    """In order of preference; where they have no engine left, any other pool serves."""


class TableAffinity(Node):
    """Pools by task, as in RollArt (hw_mapping)."""

    kind: Literal["table"]
    tasks: dict[str, Preference]
    """Task, or `default`, to its pools."""


class AutoAffinity(Node):
    """Where a turn costs least of the time of all who wait, by the cost models for what turns of its task were seen to read and
    sample, corrected by measured time while the run goes on. Pools are compared at their present load, hence at equal cost."""

    kind: Literal["auto"]
    explore: float = Field(default=0.05, gt=0, lt=1)
    """Share of new trajectories that are sent to any pool, to measure there too."""
    half_life: int = Field(default=200, ge=1)
    """Turns after which a measurement counts half."""


AffinityConfig = Annotated[NoAffinity | TableAffinity | AutoAffinity, Field(discriminator="kind")]


def pools_in_use(cluster: ClusterConfig, *, colocated: bool) -> Mapping[str, PoolConfig]:
    """The pools as the schedule uses them: colocated, those with the trainer's kind of device sample and train."""
    home = next((pool for pool in cluster.pools.values() if "train" in pool.roles), None)
    if not colocated or home is None:
        return cluster.pools
    return {
        name: pool.model_copy(update={"roles": tuple(dict.fromkeys((*pool.roles, "train", "mixed")))})
        if pool.device == home.device and "score" not in pool.roles
        else pool
        for name, pool in cluster.pools.items()
    }


def taking_turns(pools: Mapping[str, PoolConfig]) -> frozenset[str]:
    """Pools on whose devices engines and trainer take turns."""
    return frozenset(name for name, pool in pools.items() if {"train", "mixed"} <= set(pool.roles))


def sampling(pools: Mapping[str, PoolConfig]) -> tuple[str, ...]:
    """Pools with engines."""
    return tuple(name for name, pool in pools.items() if set(pool.roles) & set(SAMPLING_ROLES))


def cluster_problems(
    cluster: ClusterConfig, affinity: Node, tasks: Mapping[str, object], *, colocated: bool, max_staleness: int,
    eval_every: int,
) -> list[str]:  # fmt: skip
    """What cannot hold among pools, schedule and affinity, a line each. `colocated`: the trainer's pool samples as well."""
    return [
        *_role_problems(cluster, colocated=colocated),
        *_turn_problems(cluster, colocated=colocated, max_staleness=max_staleness, eval_every=eval_every),
        *_affinity_problems(cluster, affinity, tasks),
    ]


def _role_problems(cluster: ClusterConfig, *, colocated: bool) -> list[str]:
    """Roles that nobody has, that several pools have, and that would use devices twice."""
    problems: list[str] = []
    roles = {role for pool in cluster.pools.values() for role in pool.roles}
    names = ", ".join(cluster.pools) or "none"
    if cluster.pools and "train" not in roles:
        problems.append(f"cluster.pools ({names}) has no pool with role train; add train to the roles of one")
    if cluster.pools and not colocated and "mixed" not in roles and not {"prefill", "decode"} <= roles:
        problems.append(
            f"cluster.pools ({names}) has nothing that samples; give a pool role mixed, or one prefill and one decode"
        )
    if ("prefill" in roles) != ("decode" in roles):
        has, lacks = ("prefill", "decode") if "prefill" in roles else ("decode", "prefill")
        problems.append(f"cluster.pools ({names}) has role {has} and none with role {lacks}; add it, or use role mixed")
    for role in ("train", "prefill", "decode"):
        first, *others = [name for name, pool in cluster.pools.items() if role in pool.roles] or [""]
        if others:
            problems.append(
                f"cluster.pools.{first} and {', '.join(others)} both have role {role}; give it to one of them"
            )
    problems += [
        f"cluster.pools.{name}.roles=[{', '.join(pool.roles)}] uses its devices twice: train and mixed alone take turns; give "
        "each of these roles a pool of its own"
        for name, pool in cluster.pools.items()
        if len(set(pool.roles)) > 1 and set(pool.roles) != {"train", "mixed"}
    ]
    home = next((pool for pool in cluster.pools.values() if "train" in pool.roles), None)
    problems += [
        f"schedule.colocated=true with cluster.pools.{name}.roles=[{', '.join(pool.roles)}]: its devices are of the trainer's "
        f"kind ({pool.device}) and would sample and train in turn; use role mixed, another device, or schedule.colocated=false"
        for name, pool in cluster.pools.items()
        if colocated and home is not None and pool.device == home.device and {"prefill", "decode"} & set(pool.roles)
    ]
    return problems


def _turn_problems(cluster: ClusterConfig, *, colocated: bool, max_staleness: int, eval_every: int) -> list[str]:
    """What needs devices that sample while others train, and has none."""
    pools = pools_in_use(cluster, colocated=colocated)
    turns = taking_turns(pools)
    in_turn = bool(turns) and turns >= set(sampling(pools))
    problems: list[str] = []
    if in_turn and not colocated and max_staleness:
        problems.append(
            f"schedule.max_staleness={max_staleness}: cluster.pools.{', '.join(sorted(turns))} has roles train and mixed, and "
            "devices that take turns can never overlap rollout and training; use schedule.max_staleness=0, or a pool of its "
            "own with role mixed"
        )
    if eval_every and cluster.pools and (colocated or in_turn):
        where = "schedule.colocated=true" if colocated else f"cluster.pools.{', '.join(sorted(turns))} for both roles"
        problems.append(
            f"eval.every={eval_every} with {where}: an evaluation beside training has no devices; use eval.every=0"
        )
    return problems


def _affinity_problems(cluster: ClusterConfig, affinity: Node, tasks: Mapping[str, object]) -> list[str]:
    """Tasks and pools of a table that are not there."""
    problems: list[str] = []
    if isinstance(affinity, TableAffinity):
        serving = sampling(cluster.pools)
        for task, preference in affinity.tasks.items():
            if task != "default" and task not in tasks:
                problems.append(f"affinity.tasks.{task}: there is no such task; tasks: {', '.join(tasks)}, or default")
            problems += [
                f"affinity.tasks.{task}.pools: {pool!r} does not sample; use {', '.join(serving) or 'affinity.kind=off'}"
                for pool in preference.pools
                if pool not in serving
            ]
    return problems
