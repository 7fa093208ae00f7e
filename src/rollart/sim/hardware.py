"""The engines of a simulated cluster: what a step takes, what fits, for each pool and degrees that a configuration names.

Owns the way from `cluster.pools`, `model` and `engine` to the cost and the rules of a batch. Invariants: the step law is the
one that `perf.serving` is validated with (device and host part alike); what does not fit is refused with what is needed,
what is there and the smallest tensor-parallel size that fits; engines alike share what they have asked of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.config.cluster import PoolConfig
from rollart.config.placement import device_of, shape_of
from rollart.config.schema import RunConfig
from rollart.config.served import kv_tokens, server_of, smallest_tp
from rollart.config.virtual import ModelledEngine, ShapeModel, WorkloadEnv
from rollart.core.errors import ConfigError
from rollart.core.resources import Degrees
from rollart.perf.devices import GIB, Device
from rollart.perf.engines import EngineFacts, engine_facts
from rollart.perf.inference import COLLECTIVE_BYTES, EngineCost
from rollart.perf.serving import Server
from rollart.perf.shapes import ModelShape
from rollart.sim.batching import BatchRules

MOST_TP = 64
"""Where the search for a tensor-parallel size that fits ends."""


@dataclass(slots=True)
class ServedCost:
    """Seconds of a step, host work included (`sim.batching.StepCost`); answers are remembered for all engines alike."""

    server: Server
    _known: dict[tuple[float, float, float, float], float] = field(default_factory=dict)

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        key = (batch, context, prefill, prefill_context)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.server.whole_step_s(batch, context, prefill, prefill_context)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHardware:
    """One engine of a pool."""

    pool: str
    device: Device
    degrees: Degrees
    cost: ServedCost
    rules: BatchRules
    facts: EngineFacts

    @property
    def ranks(self) -> int:
        return self.cost.server.cost.ranks

    @property
    def kv_tokens(self) -> int:
        return int(self.rules.kv_tokens)


class Hardware:
    """Devices, model and engine of a configuration. Raises ConfigError for names that no table knows."""

    def __init__(self, config: RunConfig) -> None:
        model, engine = config.model, config.engine
        problems = _unmodelled(config)
        if problems or not isinstance(model, ShapeModel) or not isinstance(engine, ModelledEngine):
            raise ConfigError("\n".join(problems))
        self._cluster = config.cluster
        self._engine = engine
        self.max_context = model.max_context
        self.shape: ModelShape = shape_of(model)
        self.facts = engine_facts(engine.name, engine.version)
        self._made: dict[tuple[str, Degrees], EngineHardware] = {}

    @property
    def engine_name(self) -> str:
        return self._engine.name

    def device(self, pool: PoolConfig) -> Device:
        """Raises ConfigError for one that is not known, with the nearest names."""
        return device_of(self._cluster, pool.device)

    def engine(self, name: str, pool: PoolConfig, degrees: Degrees) -> EngineHardware:
        """The engine of these degrees in a pool. Raises ConfigError when the longest trajectory has no room in its cache."""
        key = (name, degrees)
        if key not in self._made:
            self._made[key] = self._make(name, pool, degrees)
        return self._made[key]

    def _make(self, name: str, pool: PoolConfig, degrees: Degrees) -> EngineHardware:
        device = self.device(pool)
        self._check_degrees(f"cluster.pools.{name}", degrees)
        server = server_of(self._engine, device, self.shape, degrees)
        room = kv_tokens(server, self.max_context)
        if room < self.max_context:
            raise ConfigError(self._no_room(name, device, degrees, room))
        rules = BatchRules(
            max_live=int(server.sequences), step_tokens=int(server.step_tokens), kv_tokens=float(room),
            mixed=self.facts.mixed,
        )  # fmt: skip
        return EngineHardware(
            pool=name, device=device, degrees=degrees, cost=ServedCost(server), rules=rules, facts=self.facts
        )

    def _check_degrees(self, at: str, degrees: Degrees) -> None:
        """Heads and experts are spread evenly, or not at all."""
        heads, experts = self.shape.heads, self.shape.experts
        if heads % degrees.tp:
            near = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - degrees.tp))
            raise ConfigError(
                f"{at}.tp={degrees.tp} does not divide the {heads} heads of {self.shape.name}; use {at}.tp={near}"
            )
        ranks = degrees.tp * degrees.dp
        if degrees.ep > 1 and (not experts or ranks % degrees.ep or experts % degrees.ep):
            fits = [
                n for n in range(1, experts + 1) if experts % n == 0 and (n % degrees.tp == 0 or degrees.tp % n == 0)
            ]
            near = min(fits or [1], key=lambda n: abs(n - degrees.ep))
            raise ConfigError(
                f"{at}.ep={degrees.ep} does not spread {experts} experts of {self.shape.name} evenly over engines of tp "
                f"{degrees.tp}; use {at}.ep={near}"
            )

    def _no_room(self, name: str, device: Device, degrees: Degrees, room: int) -> str:
        cost = server_of(self._engine, device, self.shape, degrees).cost
        needed = needed_bytes(cost, self.max_context) / GIB
        at = f"cluster.pools.{name}"
        fits = smallest_tp(self._engine, device, self.shape, degrees, max_context=self.max_context, most=MOST_TP)
        way = f"use {at}.tp={fits}" if fits else "use more pipeline stages (pp) or a device with more memory"
        return (
            f"{at}: {self.shape.name} with a trajectory of model.max_context={self.max_context} tokens needs {needed:.1f} GiB "
            f"on each of {cost.ranks} {device.name}, which give {cost.memory_fraction * device.memory_bytes / GIB:.1f} GiB of "
            f"{device.memory_bytes / GIB:.1f} (room for {room} tokens of cache); {way}, or a smaller model.max_context"
        )


def needed_bytes(cost: EngineCost, tokens: float) -> float:
    """Memory of one rank for weights, work space and the cache of `tokens`."""
    fixed = cost.weight_bytes() + cost.runtime_bytes + cost.activation_bytes()
    fixed += COLLECTIVE_BYTES if cost.ranks > 1 else 0.0
    return fixed + tokens / cost.attention_dp * cost.kv_bytes_per_token()


def _unmodelled(config: RunConfig) -> list[str]:
    """All parts of a configuration that no cost model stands for, a line each."""
    lines = []
    if not isinstance(config.model, ShapeModel):
        lines.append(
            f"model.kind={config.model.kind}: a simulation needs a shape; use model.kind=shape with model.name"
        )
    if not isinstance(config.engine, ModelledEngine):
        lines.append(f"engine.kind={config.engine.kind} has no cost model; use engine.kind=modelled")
    lines += [
        f"tasks.{name}.env.kind={task.env.kind} is an environment; a simulation needs its load: use env.kind=workload"
        for name, task in config.tasks.items()
        if not isinstance(task.env, WorkloadEnv)
    ]
    return lines
