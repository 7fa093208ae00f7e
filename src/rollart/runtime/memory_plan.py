"""Where the memory of a run goes, part by part, before it is started.

Invariant: without the activations the parts of the host add up to what `room.py` refuses a run by, which is what the end of a
step needs while engines fetch the version before it (activations are gone by then, so with them the sum is from above, but
for what a step of an engine computes with, and for freed memory that the C library keeps). Activations are an estimate of
what one micro-batch keeps for its backward pass (counted on a Llama-like layer in fp32, within a third of what torch keeps;
attention scores are not in it, as fused attention keeps none); it is told and never refused by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollart.config.explain import FP32_BYTES
from rollart.config.schema import LocalWorld, RunConfig, VllmEngine
from rollart.control.weights import VERSIONS_KEPT
from rollart.runtime import room
from rollart.runtime.model_sizes import ModelSizes, model_sizes

HIDDEN_PER_LAYER, KV_PER_LAYER, FFN_PER_LAYER = 9, 4, 4
"""Arrays of each width that a layer keeps per token: what enters and leaves norms, projections, attention, gate and product."""
LOGIT_COPIES = 3
"""Arrays of the vocabulary's width per token: logits, their log-softmax, and the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    what: str
    n_bytes: int
    how: str
    """The product that it is."""
    keys: str
    """What to change for less."""
    place: Literal["host", "device"] = "host"


def memory_plan(config: RunConfig) -> tuple[Part, ...]:
    """All parts of the memory, trainer first."""
    sizes, ranks, engines = model_sizes(config), config.trainer.ranks, config.engine.count
    weights = FP32_BYTES * sizes.parameters
    vllm = isinstance(config.engine, VllmEngine)
    smaller = "a smaller model"
    kl = Part(
        what="trainer: reference", n_bytes=weights, how="fp32, frozen, for the KL term", keys="algorithm.kl.kind=none"
    )
    reference = [kl] if room.has_reference(config) else []
    parts = [
        Part(what="trainer: weights", n_bytes=weights, how="fp32", keys=smaller),
        Part(what="trainer: gradients", n_bytes=weights, how="fp32", keys=smaller),
        Part(what="trainer: optimizer", n_bytes=2 * weights, how="AdamW's two moments in fp32", keys=smaller),
        *reference,
        Part(
            what="trainer: activations", n_bytes=ranks * activation_bytes(sizes, config.trainer.micro_batch_tokens),
            how=f"estimate: {ranks} x {config.trainer.micro_batch_tokens} padded tokens of a micro-batch",
            keys="trainer.micro_batch_tokens",
        ),
        Part(
            what="trainer: in passing", n_bytes=room.PASSING_COPIES * ranks * weights,
            how=f"{ranks} x all weights: gathered and in buckets to be published; before and after a step",
            keys=f"trainer.ranks, {smaller}" if ranks > 1 else smaller,
        ),
        *_engine_parts(config),
    ]  # fmt: skip
    if not isinstance(config.world, LocalWorld):
        versions = VERSIONS_KEPT * weights
        how = f"buckets of {VERSIONS_KEPT} versions"
        return (
            *parts,
            Part(what="published weights", n_bytes=versions, how=how, keys=f"world.kind=local, {smaller}"),
            Part(what="this process", n_bytes=room.WORKER_BYTES, how="", keys="world.kind"),
        )
    processes = ranks + engines + config.envs.hosts
    if vllm:
        n_bytes = engines * room.VLLM_BYTES
        parts.append(Part(what="engines: vLLM itself", n_bytes=n_bytes, how=f"{engines} servers", keys="engine.count"))
    return (
        *parts,
        Part(
            what="object store", n_bytes=config.world.object_store_mb << 20, how="in /dev/shm",
            keys="world.object_store_mb",
        ),
        Part(
            what="processes", n_bytes=processes * room.WORKER_BYTES,
            how=f"{ranks} trainer + {engines} engine + {config.envs.hosts} env host", keys="envs.hosts, engine.count",
        ),
        Part(what="Ray", n_bytes=room.RAY_BYTES, how="its servers", keys="world.kind=inline"),
    )  # fmt: skip


def _engine_parts(config: RunConfig) -> Iterator[Part]:
    """What all engines hold, as one of them is counted by `room.engine_memory`."""
    n, cache = config.engine.count, "kv_gb" if isinstance(config.engine, VllmEngine) else "kv_tokens"
    for one in room.engine_memory(config):
        keys = f"engine.{cache}, engine.count" if one.what == "KV cache" else "engine.count, a smaller model"
        where = ", on the device" if one.on_device else ""
        yield Part(
            what=f"engines: {one.what}", n_bytes=n * one.n_bytes, how=f"{n} x {one.how}{where}", keys=keys,
            place="device" if one.on_device else "host",
        )  # fmt: skip


def activation_bytes(sizes: ModelSizes, tokens: int) -> int:
    """What one forward pass over `tokens` keeps for its backward pass."""
    layer = HIDDEN_PER_LAYER * sizes.hidden + KV_PER_LAYER * sizes.kv_width + FFN_PER_LAYER * sizes.ffn
    return FP32_BYTES * tokens * (sizes.layers * layer + LOGIT_COPIES * sizes.vocabulary)
