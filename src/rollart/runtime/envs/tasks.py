"""From a task's configuration to what runs it: its environment, its instances, what is held back of them.

Invariant: the split depends on the problem alone. An instance is held back iff the hash of its canonical id says so, in
every process, run and seed; so equal problems are never on both sides, and a problem that a reader draws at random can be
told to be held back or not.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollart.config.real import model_of
from rollart.config.schema import (
    EnvConfig,
    FrozenLakeEnv,
    GymnasiumEnv,
    MaxDigitEnv,
    PretrainedModel,
    PythonEnv,
    ReasoningGymEnv,
    RunConfig,
    ScratchModel,
    TaskConfig,
    TextArenaEnv,
    TextWorldEnv,
)
from rollart.core.errors import ConfigError
from rollart.core.seeds import rng, seed_of
from rollart.core.types import TaskSpec
from rollart.runtime.envs.text import TextTask
from rollart.runtime.pretrained import local_folder
from rollart.runtime.tokenizers import Tokenizer

SEEDS_PER_INSTANCE = 64
"""How many seeds, per wanted instance, are tried for different problems before the task counts as having no more."""
POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Where model families keep their longest context in config.json."""


BUILDERS: Mapping[type[EnvConfig], str] = {
    FrozenLakeEnv: "rollart.runtime.envs.frozen_lake:FrozenLake",
    MaxDigitEnv: "rollart.runtime.envs.max_digit:MaxDigit",
    GymnasiumEnv: "rollart.runtime.envs.gymnasium:GymnasiumText",
    PythonEnv: "rollart.runtime.envs.python:python_env",
    ReasoningGymEnv: "rollart.runtime.envs.reasoning_gym:ReasoningGym",
    TextArenaEnv: "rollart.runtime.envs.textarena:TextArena",
    TextWorldEnv: "rollart.runtime.envs.textworld:TextWorld",
}
"""What makes an environment of each kind from its configuration; imported when the first one is made."""


def build_env(task: TaskConfig) -> TextTask:
    """A new environment of this task. Raises ConfigError when it cannot be used here; user code's own errors pass through."""
    module, _, name = BUILDERS[type(task.env)].partition(":")
    made: TextTask = getattr(importlib.import_module(module), name)(task.env)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Seeds of a task's different problems, lowest seed of each, rising."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    trained_ids: frozenset[int]
    """Canonical ids of `train`."""
    data: str
    """Digest of what the seeds stand for: the environment, the scorer, and each problem's canonical id."""


def held_back(canonical: int, share: float) -> bool:
    """Whether the problem of this id is never trained on, when `share` of all problems are to be held back."""
    return seed_of(0, "held_out", canonical) < share * 2**63


def instances(name: str, task: TaskConfig) -> Instances:
    """`task.size` different problems, split by hash. Raises ConfigError when there are fewer, or one side is empty."""
    env = build_env(task)
    train: list[int] = []
    held_out: list[int] = []
    seen: dict[int, None] = {}
    trained: set[int] = set()
    for seed in range(task.size * SEEDS_PER_INSTANCE):
        canonical = env.canonical(seed)
        if canonical in seen:
            continue
        seen[canonical] = None
        if held_back(canonical, task.held_out):
            held_out.append(seed)
        else:
            train.append(seed)
            trained.add(canonical)
        if len(seen) == task.size:
            break
    env.close()
    if len(seen) < task.size:
        raise ConfigError(
            f"tasks.{name}.size={task.size}: only {len(seen)} different instances were found; use size={len(seen)} or less"
        )
    if not train or (task.held_out > 0 and not held_out):
        raise ConfigError(
            f"tasks.{name}.held_out={task.held_out} of size={task.size} leaves {len(train)} instances to train on and "
            f"{len(held_out)} held back; use a larger size, or held_out=0"
        )
    return Instances(
        train=tuple(train), held_out=tuple(held_out), trained_ids=frozenset(trained), data=_data(task, seen)
    )


def _data(task: TaskConfig, canonical: Iterable[int]) -> str:
    """Two data sets are the same when this is; ids are in it because an environment's own files can change what it poses."""
    scorer = None if task.scorer is None else task.scorer.model_dump(mode="json")
    what = {"env": task.env.model_dump(mode="json"), "scorer": scorer, "ids": list(canonical)}
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()


def task_specs(config: RunConfig, tokenizer: Tokenizer) -> tuple[TaskSpec, ...]:
    """What control must know of each task, in the order of the configuration."""
    specs: list[TaskSpec] = []
    for name, task in config.tasks.items():
        split = instances(name, task)
        specs.append(
            TaskSpec(
                name=name,
                ratio=task.ratio,
                train=split.train,
                held_out=split.held_out,
                data=split.data,
                success_at=task.success_at,
                max_turns=task.max_turns,
                max_tokens=task.max_tokens,
                max_context=max_context(model_of(config)),
                stop_ids=tokenizer.stop_ids,
                scored=task.scorer is not None,
            )
        )
    return tuple(specs)


def max_context(model: ScratchModel | PretrainedModel) -> int:
    """Tokens that the model can attend to. Raises ConfigError when a pretrained model's folder does not say."""
    if isinstance(model, ScratchModel):
        return model.max_positions
    path = local_folder(model.path) / "config.json"
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model.path!r}: cannot read {path.name} ({error})") from error
    for key in POSITION_KEYS:
        if isinstance(written.get(key), int):
            return int(written[key])
    raise ConfigError(f"model.path={model.path!r}: {path.name} has none of {', '.join(POSITION_KEYS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInstance:
    """An instance that a reader drew."""

    seed: int
    canonical: int
    split: Literal["train", "held_out", "unseen"]
    """held_out: by hash; train: the same problem as a training instance; unseen: neither, as `size` did not reach it."""


def eval_instances(name: str, task: TaskConfig, instance_seed: int, count: int) -> tuple[EvalInstance, ...]:
    """`count` random instances (31-bit seeds, drawn from `instance_seed`), each with the side of the split it is on.

    Repeats are kept: the draw is uniform over seeds, not over problems.
    """
    draw = rng(instance_seed, "eval_instances")
    seeds: Sequence[int] = [draw.getrandbits(31) for _ in range(count)]
    trained = instances(name, task).trained_ids
    env = build_env(task)
    drawn: list[EvalInstance] = []
    for seed in seeds:
        canonical = env.canonical(seed)
        side: Literal["train", "held_out", "unseen"] = (
            "held_out" if held_back(canonical, task.held_out) else "train" if canonical in trained else "unseen"
        )
        drawn.append(EvalInstance(seed=seed, canonical=canonical, split=side))
    env.close()
    return tuple(drawn)
