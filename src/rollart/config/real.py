"""What a run on real devices is made of, and what such a run refuses.

Invariant: a configuration that passes `require_real` has no part that only a simulation understands, so the narrowing
functions below cannot fail after it.
"""

from __future__ import annotations

from rollart.config.cluster import NoAffinity
from rollart.config.engines import EngineConfig, VllmEngine
from rollart.config.faults import NO_FAULTS
from rollart.config.problems import PretrainedModel, ScratchModel
from rollart.config.schema import RunConfig
from rollart.config.virtual import EnvRewards, ModelledEngine, ShapeModel, VirtualWorld, WorkloadEnv
from rollart.core.errors import ConfigError

SIMULATE = "or predict it with `rollart simulate`"


def real_problems(config: RunConfig) -> list[str]:
    """What cannot be run on devices, a line each."""
    problems: list[str] = []
    if isinstance(config.world, VirtualWorld):
        problems.append(f"world.kind=virtual has no devices to train on; use world.kind=local, {SIMULATE}")
    if isinstance(config.model, ShapeModel):
        problems.append(f"model.kind=shape has no weights; use model.kind=scratch or pretrained, {SIMULATE}")
    if isinstance(config.engine, ModelledEngine):
        problems.append(f"engine.kind=modelled samples no tokens; use engine.kind=native or vllm, {SIMULATE}")
    problems += [
        f"tasks.{name}.env.kind=workload is a load without an environment; use one of the other kinds, {SIMULATE}"
        for name, task in config.tasks.items()
        if isinstance(task.env, WorkloadEnv)
    ]
    if config.cluster.pools:
        pools = ", ".join(config.cluster.pools)
        problems.append(f"cluster.pools ({pools}): this machine is one pool; leave cluster.pools out, {SIMULATE}")
    if config.cluster.faults != NO_FAULTS:
        problems.append(
            "cluster.faults: devices fail when they like; leave cluster.faults out (`rollart torture` injects faults into the "
            f"control code of real runs), {SIMULATE}"
        )
    if not isinstance(config.affinity, NoAffinity):
        problems.append(
            f"affinity.kind={config.affinity.kind}: on one machine all engines are alike; use affinity.kind=off, {SIMULATE}"
        )
    if not isinstance(config.rewards, EnvRewards):
        problems.append(
            f"rewards.kind={config.rewards.kind}: a reward service needs a cluster; use rewards.kind=unlimited, {SIMULATE}"
        )
    if config.schedule.enforce == "admission":
        problems.append(
            "schedule.enforce=admission does not bound staleness (it is AReaL's rule, kept for comparison); use "
            f"schedule.enforce=admission_and_release, {SIMULATE}"
        )
    return problems


def require_real(config: RunConfig) -> None:
    """Raises ConfigError with a line for each part that needs a simulation."""
    problems = real_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def model_of(config: RunConfig) -> ScratchModel | PretrainedModel:
    """The model that is trained. Raises ConfigError for one that is only a shape."""
    if isinstance(config.model, ShapeModel):
        raise ConfigError(f"model.kind=shape has no weights; use model.kind=scratch or pretrained, {SIMULATE}")
    return config.model


def engine_of(config: RunConfig) -> EngineConfig | VllmEngine:
    """The engine that samples. Raises ConfigError for one that is only a cost model."""
    if isinstance(config.engine, ModelledEngine):
        raise ConfigError(f"engine.kind=modelled samples no tokens; use engine.kind=native or vllm, {SIMULATE}")
    return config.engine
