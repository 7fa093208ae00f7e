"""What is learned on, as configuration: model, tokenizer, tasks and their environments. See `schema.py` for the whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart.config.node import Node, refuse

# --- model and tokenizer -------------------------------------------------------------------------------------------


class CharsTokenizer(Node):
    """One token per character of a fixed alphabet, plus padding: for tiny models."""

    kind: Literal["chars"] = "chars"
    alphabet: str = "".join(chr(code) for code in range(32, 127)) + "\n"
    """The characters, each once; the newline among them ends a turn."""

    @model_validator(mode="after")
    def _characters(self) -> CharsTokenizer:
        twice = sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})
        refuse(
            f"tokenizer.alphabet holds {''.join(twice)!r} more than once; write each character once" if twice else None,
            None if "\n" in self.alphabet else "tokenizer.alphabet has no newline, which ends a turn; add \\n",
        )
        return self


class HFTokenizer(Node):
    """A tokenizer from a local Hugging Face folder."""

    kind: Literal["hf"]
    path: str
    """The folder that holds tokenizer.json or its older form."""


class ScratchModel(Node):
    """A new model of a known family; the vocabulary size comes from the tokenizer."""

    kind: Literal["scratch"] = "scratch"
    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    """llama; qwen2: with biases on query, key and value; qwen3: with norms on query and key."""
    layers: int = Field(default=2, ge=1)
    hidden: int = Field(default=64, ge=8)
    """Width of the residual stream; a multiple of heads, by an even number (rotary positions turn pairs)."""
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=4, ge=1)
    """Heads of keys and values; divides heads."""
    ffn: int = Field(default=192, ge=8)
    """Width of the feed-forward layer."""
    max_positions: int = Field(default=512, ge=16)
    """Tokens of the longest trajectory, prompt and observations included."""
    tie_embeddings: bool = True
    """Input and output embedding are one matrix."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchModel:
        whole = self.hidden % self.heads == 0
        head = self.hidden // self.heads
        refuse(
            None if whole else f"model.hidden={self.hidden} is not a multiple of model.heads={self.heads}",
            f"model.hidden={self.hidden} over model.heads={self.heads} is {head} per head; it must be even"
            if whole and head % 2
            else None,
            f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}"
            if self.heads % self.kv_heads
            else None,
        )
        return self


class PretrainedModel(Node):
    """Weights and shape from a local Hugging Face folder."""

    kind: Literal["pretrained"]
    path: str
    """The folder that holds config.json and the safetensors files."""


# --- tasks ---------------------------------------------------------------------------------------------------------


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


EnvConfig = Annotated[FrozenLakeEnv | MaxDigitEnv | GymnasiumEnv | PythonEnv, Field(discriminator="kind")]


class PythonScorer(Node):
    """Your own function `package.module:function(trajectory_text, metrics) -> float`, called where environments run."""

    kind: Literal["python"]
    entry: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function beside the trajectory."""


class TaskConfig(Node):
    """One kind of problem."""

    env: EnvConfig
    ratio: float = Field(default=1.0, gt=0)
    """Share of what is trained, relative to the other tasks."""
    size: int = Field(default=1, ge=1)
    """How many different instances there are."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the instances, chosen by hash, that is never trained on."""
    max_turns: int = Field(default=1, ge=1)
    """Turns after which a trajectory ends."""
    max_tokens: int = Field(default=8, ge=1)
    """Sampled tokens per turn."""
    success_at: float = 1.0
    """A trajectory with at least this reward counts as a success."""
    scorer: PythonScorer | None = None
    """None: the reward is the sum of what the environment gave."""


def task_problems(name: str, task: TaskConfig) -> list[str]:
    """What cannot hold within one task, a line each."""
    at, env = f"tasks.{name}", task.env
    problems: list[str] = []
    if not name.replace("_", "").replace("-", "").isalnum():
        problems.append(f"{at}: a task's name is made of letters, digits, '_' and '-'; rename it")
    if task.held_out and not 1 <= task.held_out * task.size <= task.size - 1:
        problems.append(
            f"{at}.held_out={task.held_out:g} of {at}.size={task.size} leaves nothing to train or nothing held back; "
            "use more instances, or held_out=0"
        )
    if isinstance(env, MaxDigitEnv) and task.size > 10**env.digits:
        problems.append(
            f"{at}.size={task.size}: {at}.env.digits={env.digits} makes only {10**env.digits} different problems; "
            "use fewer instances or more digits"
        )
    if isinstance(env, FrozenLakeEnv) and env.map == "default" and task.size > 1:
        problems.append(f"{at}.size={task.size}: there is one default map; use size=1, or {at}.env.map=random")
    return problems
