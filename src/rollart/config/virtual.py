"""What is simulated, as configuration: a model's shape, an engine's and a trainer's cost models, tasks as loads.

Nothing here can be trained: `rollart train` refuses it and `rollart simulate` takes it. See `schema.py` for the whole.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart.config.node import Node, refuse
from rollart.perf.engines import ENGINES, engine_family


class VirtualWorld(Node):
    """Virtual time and cost models in place of devices; `rollart simulate` runs it."""

    kind: Literal["virtual"]
    calibration: str = ""
    """A file that `rollart calibrate` wrote; empty: the tables of the package."""


class ShapeModel(Node):
    """A model that is only a shape."""

    kind: Literal["shape"]
    name: str = ""
    """A public model by its name (qwen3-8b, qwen3-32b, llama3-70b ..); empty where `config` is given."""
    config: dict[str, Any] = Field(default_factory=dict)
    """A config.json of transformers, as a map."""
    max_context: int = Field(default=32768, ge=16)
    """Tokens of the longest trajectory, prompt and observations included."""


class ModelledEngine(Node):
    """An inference engine by name; its pools say on which devices."""

    kind: Literal["modelled"]
    name: str = "vLLM"
    """vLLM, SGLang or TensorRT-LLM."""
    version: str = ""
    """Empty: the newest that the facts are known of."""
    count: int = Field(default=1, ge=1)
    """Engines where no pools are given."""
    max_live: int = Field(default=0, ge=0)
    """Sequences in one batch; 0: the engine's default."""
    step_tokens: int = Field(default=0, ge=0)
    """Tokens of a step; 0: the engine's default."""
    dtype: Literal["bf16", "fp8"] = "bf16"
    prefix_cache: bool = True
    sleep_s: float = Field(default=2.0, ge=0)
    """Giving a device's memory to the trainer, where both share it."""
    wake_s: float = Field(default=3.0, ge=0)
    """Taking it back, weights not included."""

    @model_validator(mode="after")
    def _known(self) -> ModelledEngine:
        near = difflib.get_close_matches(self.name, ENGINES, n=1, cutoff=0.0)[0]
        refuse(
            None
            if engine_family(self.name) in ENGINES
            else f"name={self.name}: no facts are known of this engine; use {near}"
        )
        return self


class TrainPlan(Node):
    """How the simulated trainer lays the model over its pool. Degrees of 0 are chosen: the fastest that fits."""

    tp: int = Field(default=0, ge=0)
    pp: int = Field(default=0, ge=0)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    micro_batch: int = Field(default=1, ge=1)
    """Sequences of one forward pass."""
    recompute: Literal["none", "selective", "full"] = "selective"
    framework: str = "Megatron-Core"
    logprob_pass: bool = False
    """Log-probabilities are computed again before the step (another forward pass)."""
    table: str = ""
    """A table of step times that `rollart trace .. --table FILE` wrote; empty: the cost model. Degrees, micro_batch, recompute
    and framework are then the table's, and values given here must agree with it."""


class WorkloadEnv(Node):
    """A task as a load: turns, tokens, latencies and failures as published."""

    kind: Literal["workload"]
    name: str
    """swe_bench, webshop, frozen_lake, gem_math, gem_game, math, code, judge, or a file of your own (.yaml)."""


class EnvRewards(Node):
    """The environment gives the reward, or a scorer at once; nothing is shared."""

    kind: Literal["unlimited"] = "unlimited"


class LocalRewards(Node):
    """A service of its own devices (role score)."""

    kind: Literal["local"]
    concurrency: int = Field(default=4, ge=1)
    """Calls that one of its devices takes at once."""


class ServerlessRewards(Node):
    """Instances that come up when calls wait and go when they idle (RollArt, R3)."""

    kind: Literal["serverless"]
    max_concurrency: int = Field(default=256, ge=1)
    cold_start_s: float = Field(default=2.0, ge=0)
    keep_warm_s: float = Field(default=60.0, ge=0)
    transport_s: float = Field(default=0.01, ge=0)
    """Of one call (RollArt: mean 0.01 s)."""
    cost_per_s: float = Field(default=0.2, ge=0)
    """Of one busy instance, relative to an H20's second."""


RewardConfig = Annotated[EnvRewards | LocalRewards | ServerlessRewards, Field(discriminator="kind")]
