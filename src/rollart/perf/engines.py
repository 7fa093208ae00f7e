"""Inference engines: the documented defaults and habits that decide how a batch is put together.

Owns: one entry per engine generation: how many sequences and tokens a step may hold, whether prompts share steps with
decoding, whether the KV cache is reserved for the whole answer, how much of the scheduler's work stays on the critical
path. Invariant: these are facts of documentation and release notes, none is fitted; what is fitted is in the calibration.
Why: between two versions of one engine throughput has doubled without one kernel changing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MANY = 1 << 20
EARLY_CHUNK = 512
"""Tokens of a step in vLLM 0.5 and 0.6 with chunked prefill (documentation, "Performance and Tuning")."""
ENGINES = ("vLLM", "SGLang", "TensorRT-LLM")
"""Families that facts are known of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine generation and its defaults."""

    name: str
    max_sequences: int
    max_step_tokens: int
    mixed: bool
    """Prompts and decoding share a step (chunked prefill, in-flight batching); else a prompt's step stops decoding."""
    reserves: bool
    """A sequence is admitted when its whole length has room; else it grows and may be preempted."""
    memory_fraction: float
    of_free: bool
    """The fraction is of what weights leave free; else of all memory, weights included."""
    runtime_gib: float
    """Context of the driver, captured graphs and workspaces of a rank."""
    kv_follows_weights: bool
    """8-bit or narrower weights come with an fp8 cache; else the cache stays in 16 bits unless asked."""
    frees_windows: bool
    """Layers that see a window only keep that window; else they keep the whole sequence unless the user says so."""
    host: float
    """Host work per step on the critical path, relative to an engine that schedules, detokenises and serves in one process."""
    overlapped: bool
    """Host work of the next step runs while the device computes."""
    steps_per_schedule: int = 1
    """Tokens that are decoded and streamed per visit of the scheduler."""
    source: str = ""


TRTLLM = EngineFacts(
    name="TensorRT-LLM", max_sequences=2048, max_step_tokens=8192, mixed=True, reserves=True, memory_fraction=0.9,
    of_free=True, kv_follows_weights=True, runtime_gib=3.5, frees_windows=True, host=0.3, overlapped=True,
    source="TensorRT-LLM documentation: trtllm-bench defaults, GUARANTEED_NO_EVICT, overlap scheduler; memory: aiconfigurator",
)  # fmt: skip
VLLM_EARLY = EngineFacts(
    name="vLLM < 0.6", max_sequences=256, max_step_tokens=8192, mixed=False, reserves=False, memory_fraction=0.9,
    of_free=False, kv_follows_weights=False, runtime_gib=1.0, frees_windows=False, host=1.0, overlapped=False,
    source="vLLM 0.5 engine arguments; blog of release 0.6.0: server 33 %, scheduling 29 %, device 38 % of the time",
)  # fmt: skip
VLLM_V0 = replace(
    VLLM_EARLY, name="vLLM 0.6-0.7", host=0.47, source="blog of vLLM 0.6.0: the server left the process of the scheduler",
)  # fmt: skip
VLLM_V1 = replace(
    VLLM_EARLY, name="vLLM V1", mixed=True, frees_windows=True, host=0.2,
    source="vLLM V1 blog and engine arguments: chunked prefill always, persistent batch, hybrid cache, separate detokeniser",
)  # fmt: skip
SGLANG_EARLY = EngineFacts(
    name="SGLang < 0.4", max_sequences=MANY, max_step_tokens=8192, mixed=False, reserves=False, memory_fraction=0.88,
    of_free=False, kv_follows_weights=False, runtime_gib=1.0, frees_windows=False, host=0.1, overlapped=False,
    source="SGLang server arguments: chunked-prefill-size 8192, mem-fraction-static 0.88; three processes",
)  # fmt: skip
SGLANG = replace(
    SGLANG_EARLY, name="SGLang", host=0.2, overlapped=True, source="SGLang 0.4 blog: zero-overhead batch scheduler",
)  # fmt: skip
UNKNOWN = replace(VLLM_V1, name="unknown", source="the defaults of vLLM V1 stand in for an engine that is not known")


def engine_facts(name: str, version: str = "") -> EngineFacts:
    """Facts of the engine that `name` and `version` mean; `UNKNOWN` for other engines, the newest entry without a version.

    A version may carry scheduler notes: `0.6.0 sched steps 10` decodes ten tokens per visit of the scheduler, `chunked
    prefill` shares steps.
    """
    text = version.lower()
    numbers = re.match(r"\s*v?(\d+)\.(\d+)", text)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (99, 0)
    lower = name.lower()
    if "tensorrt" in lower or "trt" in lower:
        facts = TRTLLM
    elif "vllm" in lower:
        facts = VLLM_EARLY if release < (0, 6) else VLLM_V0 if release < (0, 8) else VLLM_V1
    elif "sglang" in lower:
        facts = SGLANG_EARLY if release < (0, 4) else SGLANG
    else:
        facts = UNKNOWN
    steps = re.search(r"(?:sched(?:uler)?|num-scheduler)[- ]steps[- ](\d+)", text)
    if steps:
        facts = replace(facts, steps_per_schedule=int(steps[1]))
    if "chunked prefill" in text:
        early = "vllm" in lower and not facts.mixed
        facts = replace(facts, mixed=True, max_step_tokens=EARLY_CHUNK if early else facts.max_step_tokens)
    return facts


def engine_family(name: str) -> str:
    """The engine a calibration constant belongs to, without notes, back-ends and versions."""
    lower = name.lower()
    for word, family in (("trt", "TensorRT-LLM"), ("tensorrt", "TensorRT-LLM"), ("vllm", "vLLM"), ("sglang", "SGLang")):
        if word in lower:
            return family
    return re.sub(r"\s*(\(.*|/.*)$", "", name).strip()
