"""The virtual world of a configuration: engines, trainer, weights, environments and rewards from cost models.

`build` is the one way from a `RunConfig` to a world that `control.run.run` drives on `sim.loop.run`. Invariants: whatever
cannot be is refused here, before the first event, with the value and the nearest one that can; two worlds share nothing that
a run changes; every figure that comes of it rests on what `Virtual.basis` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart.config.cluster import SAMPLING_ROLES, DeviceConfig, PoolConfig
from rollart.config.faults import NO_FAULTS
from rollart.config.placement import Placement, colocated_pools, halves, layout, placements
from rollart.config.schema import RunConfig
from rollart.config.virtual import ModelledEngine
from rollart.core.errors import ConfigError
from rollart.core.events import Sink
from rollart.core.resources import Degrees
from rollart.core.types import Failure, TaskSpec, Trajectory
from rollart.perf.links import fabric
from rollart.perf.prices import relative_cost
from rollart.ports import Checkpoints, World
from rollart.sim.basis import basis, notes
from rollart.sim.disk import TrainerParts
from rollart.sim.envs import EnvModel
from rollart.sim.fault_draws import Outages
from rollart.sim.fault_rules import Exposed, check_faults, exposed, fault_lines, trainer_fails
from rollart.sim.faults import Faults
from rollart.sim.fitting import Fitting, Halves
from rollart.sim.hardware import EngineHardware, Hardware
from rollart.sim.loads import draws_of, environments, is_scored, task_specs, usual_tokens
from rollart.sim.rewards import RewardService, scoring
from rollart.sim.slots import PoolSize, Slots
from rollart.sim.trainer import TrainerModel
from rollart.sim.training import TrainerHardware, trainer_hardware
from rollart.sim.transfer import WeightPath, buckets, offload_s, same_devices, weight_path
from rollart.sim.workload import Draws
from rollart.sim.world import SimCluster, Takes
from rollart.sim.world import world as world_of

LONGEST_SHARE = 2.0
"""A deadline that is not this many times what the step or transfer takes by the cost models would end runs by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Virtual:
    """A world that has not begun. For one run: a second one needs another."""

    config: RunConfig
    cluster: SimCluster
    tasks: tuple[TaskSpec, ...]
    basis: tuple[str, ...]
    """What the figures rest on, a line each."""
    notes: tuple[str, ...]
    """What a user should know of the configuration before believing a figure."""
    costs: Mapping[str, float]
    """Pool -> cost of one second of all its devices, relative to an H20's."""
    devices: Mapping[str, int]
    """Pool -> its devices."""
    trainer: TrainerHardware
    engines: Mapping[str, EngineHardware]
    """Pool -> an engine of it."""
    paths: Mapping[str, WeightPath]
    """Pool of engines -> how weights come to it."""
    rewards: RewardService | None
    """The reward service, whose figures are there after a run; None: no task is scored."""
    faults: Faults | None = None
    """What fails; None: nothing does."""
    checkpoints: Checkpoints | None = None
    """Where a trainer that can be lost is brought back from."""

    @property
    def cost_per_s(self) -> float:
        """Of one second of the whole cluster, relative to an H20's."""
        return sum(self.costs.values())

    def world(
        self, sinks: tuple[Sink, ...] = (), *, keep: Callable[[Trajectory], None] = lambda trajectory: None
    ) -> World:
        """What `control.run.run` takes beside the configuration."""
        made = world_of(self.tasks, self.cluster, sinks=sinks, keep=keep, checkpoints=self.checkpoints)
        return made if self.faults is None else replace(made, beside=self.faults.beside)


def build(config: RunConfig) -> Virtual:
    """The virtual world that `config` describes. Raises ConfigError before the first event for what cannot be."""
    pools = _pools(config)
    hardware = Hardware(config)
    _check_devices(hardware, pools)
    draws = draws_of(config)
    engines = _engines(config, hardware, pools)
    usual = max(usual_tokens(own.load) for own in draws.values())
    trainer = trainer_hardware(config, hardware.shape, longest=hardware.max_context, usual=usual)
    paths = {name: _path(config, trainer, engine, pools[name]) for name, engine in engines.items()}
    push_s = max(path.push_s for path in paths.values())
    _check_deadlines(config, trainer, paths)
    costs = {name: pool.devices * _cost_of(config, hardware, pool) for name, pool in pools.items()}
    fitting = _fitting(config, pools, engines, paths, draws)
    check_room(placements(config), fitting.sizes, fitting.takes)
    specs = task_specs(config, draws, max_context=hardware.max_context)
    of = exposed(
        config, scored=any(spec.scored for spec in specs), pulled=any(path.pull_s > 0 for path in paths.values()),
        parameters=hardware.shape.parameters,
    )  # fmt: skip
    check_faults(config, of)
    slots = Slots(fitting.sizes)
    faults = _faults(config, of, fitting, slots)
    rewards = _rewards(config, draws, pools, None if faults is None else faults.outages)
    checkpoint_s = of.checkpoint_s(config.cluster.faults) if faults is not None else 0.0
    cluster = SimCluster(
        engine_of=fitting.fit, env=_env(config, draws),
        trainer=TrainerModel(
            publish_s=offload_s(trainer.weight_bytes, trainer.plan.devices, config.cluster.link), push_s=push_s,
            step_s=trainer.samples_s, logprobs_s=trainer.logprobs_s, weight_bytes=trainer.weight_bytes,
            buckets=buckets(trainer.weight_bytes, config.cluster.link), remembers=False, save_s=checkpoint_s,
            load_s=checkpoint_s,
        ),
        slots=slots, takes=fitting.takes, scoring=None if rewards is None else lambda: rewards, fate=faults,
    )  # fmt: skip
    keeps = trainer_fails(config.cluster.faults, of)
    return Virtual(
        config=config, cluster=cluster, tasks=specs, trainer=trainer, engines=engines, paths=paths, rewards=rewards,
        basis=(*basis(config, hardware, trainer, engines, paths, draws), *fault_lines(config, of)),
        notes=notes(config, hardware, draws, trainer, engines, costs),
        costs=costs, devices={name: pool.devices for name, pool in pools.items()}, faults=faults,
        checkpoints=TrainerParts(cluster.disk, keep=config.checkpoint.keep) if keeps else None,
    )  # fmt: skip


def _pools(config: RunConfig) -> Mapping[str, PoolConfig]:
    pools = layout(config)
    if not pools:
        raise ConfigError(
            "cluster.pools is empty: a simulation needs devices; give for example cluster.pools.train={device: H800, roles: "
            "[train]} and cluster.pools.roll={device: H20}"
        )
    return pools


def _check_devices(hardware: Hardware, pools: Mapping[str, PoolConfig]) -> None:
    problems = []
    for name, pool in pools.items():
        try:
            hardware.device(pool)
        except ConfigError as error:
            problems.append(f"cluster.pools.{name}.device={pool.device}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def _engines(
    config: RunConfig, hardware: Hardware, pools: Mapping[str, PoolConfig]
) -> dict[str, EngineHardware]:  # fmt: skip
    """An engine for each pool that samples."""
    found: dict[str, EngineHardware] = {}
    for name, pool in pools.items():
        if pool.tp and set(pool.roles) & set(SAMPLING_ROLES):
            degrees = Degrees(tp=pool.tp, pp=pool.pp, ep=pool.ep, dp=max(1, pool.ep // pool.tp))
            hardware.engine(name, pool, degrees)  # says more than a placement could of what does not fit
    for place in placements(config):
        if place.role != "train" and place.pool not in found:
            found[place.pool] = hardware.engine(place.pool, pools[place.pool], place.degrees)
    split = halves(config)
    if split is not None:
        read = split[0]
        found[read.pool] = hardware.engine(read.pool, pools[read.pool], read.degrees)
    if not found:
        names = ", ".join(pools)
        raise ConfigError(f"cluster.pools ({names}) has no device left to sample on; give one of them role mixed")
    return found


def _env(config: RunConfig, draws: Mapping[str, Draws]) -> EnvModel:
    return replace(environments(draws), sessions_per_host=config.envs.sessions_per_host)


def _faults(config: RunConfig, of: Exposed, fitting: Fitting, slots: Slots) -> Faults | None:
    if config.cluster.faults == NO_FAULTS:
        return None
    made = Faults(
        config.cluster.faults, seed=config.seed, nodes=of.nodes, home=of.home, first=of.first, slots=slots,
        forget=fitting.forget,
    )  # fmt: skip
    fitting.spoils = made.spoils
    return made


def _rewards(
    config: RunConfig, draws: Mapping[str, Draws], pools: Mapping[str, PoolConfig], outages: Outages | None
) -> RewardService | None:  # fmt: skip
    if not any(is_scored(own.load) for own in draws.values()):
        return None
    devices = sum(pool.devices for pool in pools.values() if "score" in pool.roles)
    return RewardService(config.rewards, scoring(draws), devices=devices, outages=outages)


# --- weights -----------------------------------------------------------------------------------------------------------


def _path(config: RunConfig, trainer: TrainerHardware, engine: EngineHardware, pool: PoolConfig) -> WeightPath:
    if engine.pool in colocated_pools(config):
        return same_devices(trainer.weight_bytes, engine.ranks, fabric(pool.device).inter_bytes_per_s)
    return weight_path(trainer.weight_bytes, config.cluster.link, tp=engine.degrees.tp)


def _check_deadlines(config: RunConfig, trainer: TrainerHardware, paths: Mapping[str, WeightPath]) -> None:
    limits, problems = config.deadlines, list[str]()
    step_s = trainer.usual_s()
    # where steps are shorter than pushes, a version waits for the one before it to be in the store
    longest = max(path.naive_s + (path.push_s if step_s < path.push_s else 0.0) for path in paths.values())
    if limits.weights_s < longest:
        problems.append(
            f"deadlines.weights_s={limits.weights_s:g} is shorter than a version's way over cluster.link, {longest:.1f} s; use "
            f"deadlines.weights_s={round(LONGEST_SHARE * longest) + 1} or more"
        )
    if limits.train_s < step_s:
        problems.append(
            f"deadlines.train_s={limits.train_s:g} is shorter than a usual step of trainer.plan, {step_s:.1f} s; use "
            f"deadlines.train_s={round(LONGEST_SHARE * step_s) + 1} or more"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _cost_of(config: RunConfig, hardware: Hardware, pool: PoolConfig) -> float:
    """Of one device for a second, relative to an H20's; 0: no source says."""
    if pool.cost:
        return pool.cost
    own = config.cluster.devices.get(pool.device)
    return _own_cost(own) if own is not None else relative_cost(hardware.device(pool)) or 0.0


def _own_cost(device: DeviceConfig) -> float:
    return device.cost


# --- engines -----------------------------------------------------------------------------------------------------------


def _fitting(
    config: RunConfig, pools: Mapping[str, PoolConfig], engines: Mapping[str, EngineHardware],
    paths: Mapping[str, WeightPath], draws: Mapping[str, Draws],
) -> Fitting:  # fmt: skip
    assert isinstance(config.engine, ModelledEngine)
    split = halves(config)
    if split is not None:  # the halves serve a version when both have it
        read, decode = paths[split[0].pool], paths[split[1].pool]
        both = WeightPath(
            push_s=decode.push_s, pull_s=max(read.pull_s, decode.pull_s), load_s=max(read.load_s, decode.load_s)
        )
        paths = {**paths, split[1].pool: both}
    return Fitting(
        engine=config.engine, link=config.cluster.link, sizes={name: _size(pool) for name, pool in pools.items()},
        engines=engines, paths=paths, draws=draws,
        halves=None if split is None else Halves(prefill=split[0], decode=split[1]),
    )  # fmt: skip


def check_room(places: Sequence[Placement], sizes: Mapping[str, PoolSize], takes: Takes) -> None:
    """Raises ConfigError where not all workers have devices at the same time."""
    slots = Slots(sizes)
    for n, place in enumerate(places):
        taken = slots.take(f"worker {n}", takes(place.role, place.pool, place.degrees))
        if isinstance(taken, Failure):
            alike = sum(place == other for other in places)
            raise ConfigError(
                f"cluster.pools.{place.pool}: no devices for {alike} workers of role {place.role}: {taken.detail}; use fewer "
                "roles of the pool, or more of its nodes"
            )


def _size(pool: PoolConfig) -> PoolSize:
    return PoolSize(devices=pool.nodes * pool.devices_per_node, devices_per_node=pool.devices_per_node)
