"""Kinds of environments, as configuration: one class per kind, and the union `EnvConfig` of them. See `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart.config.node import Node, refuse
from rollart.config.virtual import WorkloadEnv


class FrozenLakeEnv(Node):
    """gymnasium's FrozenLake as multi-turn text. One move a turn: L, D, R or U."""

    kind: Literal["frozen_lake"]
    map: Literal["default", "random"] = "default"
    """default: gymnasium's map of that side (4 or 8); random: a solvable map per instance."""
    side: int = Field(default=4, ge=2, le=16)
    """Rows and columns."""
    slippery: bool = False
    """Moves go astray two times in three."""
    bad_action_reward: float = Field(default=0.0, le=0)
    """Added for each turn that is no move. Below 0 it lowers the reward of a solved lake as well: mind success_at."""

    @model_validator(mode="after")
    def _map_exists(self) -> FrozenLakeEnv:
        if self.map == "default" and self.side not in (4, 8):
            raise ValueError(
                f"side={self.side}: gymnasium has a default map of side 4 or 8 only; use one of them, or map=random"
            )
        return self


class MaxDigitEnv(Node):
    """Single turn: name the largest of some digits."""

    kind: Literal["max_digit"]
    digits: int = Field(default=3, ge=1, le=6)
    """How many digits; 10 to this power is the number of different problems."""


class GymnasiumEnv(Node):
    """Any gymnasium environment with discrete actions and a text rendering."""

    kind: Literal["gymnasium"]
    id: str
    """What `gymnasium.make` takes."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gymnasium.make`."""
    actions: tuple[str, ...] = ()
    """Names of the actions, in gymnasium's order; a number is understood as well. Empty: numbers only."""


class PythonEnv(Node):
    """Your own class, `package.module:Class`, with `reset(seed) -> str` and `step(action) -> StepResult`."""

    kind: Literal["python"]
    entry: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the class."""


class ReasoningGymEnv(Node):
    """A data set of reasoning-gym: one question, one answer, scored by the data set's own `score_answer`.

    Nothing else decides the reward: some data sets give 0.01 for any answer, and parts of 1 for answers that are nearly right.
    """

    kind: Literal["reasoning_gym"]
    dataset: str = Field(pattern=r"^[a-z0-9_]+$")
    """Its name in reasoning-gym, for example `chain_sum`; `rollart envs list reasoning_gym` prints all of them."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `reasoning_gym.create_dataset`, beside `size` and `seed`, which are `items` and `data_seed` here."""
    items: int = Field(default=1000, ge=1)
    """How many different items the data set has; an instance's seed modulo this is the item. A few data sets make all of them
    at once, which takes seconds for thousands."""
    data_seed: int = Field(default=0, ge=0)
    """Another one makes other items."""
    answer: Literal["tag", "last_line", "whole"] = "tag"
    """What counts as the answer. tag: what stands between the last `<answer>` and the `</answer>` after it; last_line: the last
    line that is not empty; whole: all that was written. Space around it does not count; without it the turn is a bad action."""
    instruction: str | None = None
    """Written after the question. null: a line that asks for the tags, where `answer` is tag, else nothing."""

    @model_validator(mode="after")
    def _own_keys(self) -> ReasoningGymEnv:
        fields = {"size": "items", "seed": "data_seed"}
        refuse(*(f"env.kwargs.{key}: write env.{field}" for key, field in fields.items() if key in self.kwargs))
        return self


class TextArenaEnv(Node):
    """A single-player game of textarena, as multi-turn text; the reward is given at its end."""

    kind: Literal["textarena"]
    id: str
    """The game's id, for example `FrozenLake-v0`; `rollart envs list textarena` prints those that work here."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `textarena.make`."""
    bad_action_reward: float = Field(default=0.0, le=0)
    """Added for each move that the game calls invalid. Most games end at the second in a row."""


class TextWorldEnv(Node):
    """A text adventure of TextWorld, made from the instance's seed: rooms, objects and a quest, played by typed commands."""

    kind: Literal["textworld"]
    rooms: int = Field(default=1, ge=1, le=20)
    """Rooms of a game."""
    objects: int = Field(default=3, ge=1, le=50)
    """Objects of a game, containers and supporters among them."""
    quest_length: int = Field(default=2, ge=1, le=20)
    """Commands that the shortest way to the goal takes."""
    commands: Literal["all", "acting", "numbered", "none"] = "all"
    """Which of the commands that are possible now each observation lists. acting: without those that only look at things;
    numbered: the same with numbers, by which they can be given as well."""
    reward: Literal["score", "progress"] = "score"
    """score: the game's points over their maximum; progress: how much of the way to the goal is done, given as it is done."""
    bad_action_reward: float = Field(default=0.0, le=0)
    """Added for each turn that is no command. Below 0 it lowers the reward of a game that is won as well: mind success_at."""


EnvConfig = Annotated[
    FrozenLakeEnv
    | MaxDigitEnv
    | GymnasiumEnv
    | PythonEnv
    | ReasoningGymEnv
    | TextArenaEnv
    | TextWorldEnv
    | WorkloadEnv,
    Field(discriminator="kind"),
]


def env_problems(at: str, size: int, env: EnvConfig) -> list[str]:
    """What cannot hold between the environment of the task `at` and its number of instances, a line each."""
    problems: list[str] = []
    if isinstance(env, MaxDigitEnv) and size > 10**env.digits:
        problems.append(
            f"{at}.size={size}: {at}.env.digits={env.digits} makes only {10**env.digits} different problems; "
            "use fewer instances or more digits"
        )
    if isinstance(env, FrozenLakeEnv) and env.map == "default" and size > 1:
        problems.append(f"{at}.size={size}: there is one default map; use size=1, or {at}.env.map=random")
    if isinstance(env, ReasoningGymEnv) and size > env.items:
        problems.append(f"{at}.size={size} is more than {at}.env.items={env.items}; use {at}.env.items={size} or more")
    return problems
