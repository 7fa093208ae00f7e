"""The environments and tasks of a simulated run: a workload for each task, and one model that speaks for all of them.

Invariant: what a trajectory does depends on its task's workload and its own id alone, so a task draws the same beside others as
by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rollart.config.schema import RunConfig, TaskConfig
from rollart.config.virtual import WorkloadEnv
from rollart.core.errors import ConfigError
from rollart.core.types import Failure, TaskSpec, TrajId
from rollart.sim.envs import Call, EnvModel, Fault
from rollart.sim.storms import Pull
from rollart.sim.workload import Draws, Workload, workload

MEDIAN = 0.5


def draws_of(config: RunConfig) -> dict[str, Draws]:
    """Task -> what its trajectories do. Raises ConfigError for a task that is no load."""
    found: dict[str, Draws] = {}
    for name, task in config.tasks.items():
        if not isinstance(task.env, WorkloadEnv):
            raise ConfigError(
                f"tasks.{name}.env.kind={task.env.kind} is an environment; a simulation needs its load: use env.kind=workload"
            )
        found[name] = Draws(load_of(task.env.name), config.seed)
    return found


def load_of(name: str) -> Workload:
    """A workload of the package, or of a file of one's own (.yaml)."""
    if not name.endswith((".yaml", ".yml")):
        return workload(name)
    try:
        written: Any = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        return Workload.model_validate(written)
    except OSError as error:
        raise ConfigError(
            f"workload {name!r} cannot be read: {error.strerror}; give the path of a .yaml file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"workload {name!r} is no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"workload {name!r}: {where}: {first['msg']}") from error


def usual_tokens(load: Workload) -> float:
    """Tokens of a trajectory all of whose draws are medians."""
    turns = max(1.0, load.turns.at(MEDIAN))
    read = load.prompt_tokens.at(MEDIAN) + (turns - 1.0) * load.observation_tokens.at(MEDIAN)
    return read + turns * load.response.median


def task_specs(config: RunConfig, draws: Mapping[str, Draws], *, max_context: int) -> tuple[TaskSpec, ...]:
    """What control must know of each task, in the order of the configuration."""
    return tuple(_spec(name, task, draws[name].load, max_context) for name, task in config.tasks.items())


def _spec(name: str, task: TaskConfig, load: Workload, max_context: int) -> TaskSpec:
    train = task.size - round(task.held_out * task.size)
    return TaskSpec(
        name=name, ratio=task.ratio, train=range(train), held_out=range(train, task.size), success_at=task.success_at,
        max_turns=task.max_turns, max_tokens=task.max_tokens, max_context=max_context, scored=is_scored(load),
    )  # fmt: skip


def is_scored(load: Workload) -> bool:
    """Whether a scorer takes time for it; else the environment's last observation has the reward."""
    return load.score_s.at(MEDIAN) > 0


def environments(draws: Mapping[str, Draws]) -> EnvModel:
    """All tasks' environments as one model, by the task in a trajectory's id."""
    models = {name: own.env() for name, own in draws.items()}
    if len(models) == 1:
        return next(iter(models.values()))
    by_task = _ByTask(models)
    return EnvModel(
        latency_s=by_task.latency_s, fault=by_task.fault, turns=by_task.turns, reward=by_task.reward, tokens=by_task.tokens,
        pull=by_task.pull if any(model.pull for model in models.values()) else None,
    )  # fmt: skip


class _ByTask:
    def __init__(self, models: Mapping[str, EnvModel]) -> None:
        self._models = models

    def _of(self, traj: TrajId) -> EnvModel:
        return self._models[traj.split("/", 2)[1]]

    def latency_s(self, traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        return self._of(traj).latency_s(traj, attempt, call, turn)

    def fault(self, traj: TrajId, attempt: int, call: Call, turn: int) -> Fault | Failure | None:
        return self._of(traj).fault(traj, attempt, call, turn)

    def turns(self, traj: TrajId, attempt: int) -> int:
        return self._of(traj).turns(traj, attempt)

    def reward(self, traj: TrajId, attempt: int) -> float | None:
        return self._of(traj).reward(traj, attempt)

    def tokens(self, traj: TrajId, attempt: int, turn: int) -> int:
        own = self._of(traj).tokens
        assert own is not None
        return own(traj, attempt, turn)

    def pull(self, traj: TrajId, attempt: int) -> Pull | None:
        own = self._of(traj).pull
        return None if own is None else own(traj, attempt)
