"""The processes that sample, as configuration: what they compute with, how much they hold, how they batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.config.learning import SamplingConfig
from rollart.config.node import Node
from rollart.config.problems import ScratchModel


class EngineConfig(Node):
    """The processes that sample."""

    kind: Literal["native"] = "native"
    """native: this package's own; vllm: vLLM in an environment of its own."""
    count: int = Field(default=1, ge=1)
    """Engines, each in a process of its own."""
    threads: int = Field(default=1, ge=1)
    """torch threads per engine."""
    max_live: int = Field(default=128, ge=1)
    """Requests decoded together."""
    kv_tokens: int = Field(default=65536, ge=16)
    """Tokens of key/value cache."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens per step."""
    share_prefixes: bool = True
    """Siblings of a group compute the start that they have in common once."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the engine computes on."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and cache; the trainer's weights are cast when they come in, log-probabilities are always fp32."""
    path: Literal["auto", "fast", "transformers"] = "auto"
    """Whose forward pass: the engine's own (`fast`: llama, qwen2, qwen3), the model's definition in transformers, or the
    first that the model allows."""
    native: Literal["auto", "off", "required"] = "auto"
    """Whether decoding attends and draws, and in fp32 computes all between its matrix products, by the functions that the C
    compiler of the machine makes (`fast` on a CPU): where there is one, never, or always, so that an engine without it does not
    start. A run without it says why."""


class VllmEngine(Node):
    """vLLM, each server with a process of its own beside it, in an environment of its own; `make vllm` makes one."""

    kind: Literal["vllm"]
    python: str = ".venv-vllm/bin/python"
    """Interpreter of that environment."""
    count: int = Field(default=1, ge=1)
    """Servers."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads per server."""
    max_live: int = Field(default=128, ge=1)
    """Requests decoded together."""
    kv_gb: int = Field(default=1, ge=1)
    """GiB of key/value cache per server."""
    max_model_len: int = Field(default=0, ge=0)
    """Tokens of the longest sequence; 0: as many as the model has positions for."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and cache."""
    start_s: float = Field(default=170.0, gt=0)
    """Longest wait for a server to come up; deadlines.start_s bounds it as well."""


def vllm_problems(engine: Node, model: Node, sampling: SamplingConfig) -> list[str]:
    """What vLLM cannot serve, a line each; none for another engine."""
    if not isinstance(engine, VllmEngine):
        return []
    problems: list[str] = []
    for name, value, off in (("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0)):
        if value != off:
            problems.append(
                f"sampling.{name}={value:g} with engine.kind=vllm: vLLM does not return the probability mass that truncation "
                f"kept, so the correction would be wrong; use sampling.{name}={off}, or engine.kind=native"
            )
    if sampling.temperature < VLLM_MIN_TEMPERATURE:
        problems.append(
            f"sampling.temperature={sampling.temperature:g} with engine.kind=vllm: vLLM raises it to {VLLM_MIN_TEMPERATURE:g} "
            f"and the trainer would divide by what is configured; use sampling.temperature={VLLM_MIN_TEMPERATURE:g} or more, "
            "or engine.kind=native"
        )
    if isinstance(model, ScratchModel):
        head = model.hidden // model.heads
        if head not in VLLM_HEAD_SIZES:
            near = min(VLLM_HEAD_SIZES, key=lambda size: abs(size - head))
            problems.append(
                f"model.hidden={model.hidden} over model.heads={model.heads} is {head} per head, for which vLLM has no kernel "
                f"on a CPU; use {near} per head, for example model.hidden={near * model.heads}, or engine.kind=native"
            )
        if 0 < engine.max_model_len < model.max_positions:
            problems.append(
                f"engine.max_model_len={engine.max_model_len} is below model.max_positions={model.max_positions}, so a long "
                f"trajectory has no room; use engine.max_model_len={model.max_positions} or 0"
            )
    return problems


VLLM_MIN_TEMPERATURE = 0.01
"""Lower ones, but for 0, which is greedy, become this (vllm/sampling_params.py, `_MAX_TEMP`)."""
VLLM_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that vLLM's kernels for CPUs have."""
