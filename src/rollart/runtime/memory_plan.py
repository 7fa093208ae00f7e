"""Where the memory of a run goes, part by part, before it is started.

Invariant: without the activations the parts add up to what `room.py` refuses a run by, which is what the end of a step needs
(activations are gone by then, so the sum of all parts is from above). Activations are an estimate of what one micro-batch
keeps for its backward pass (counted on a Llama-like layer in fp32, within a third of what torch keeps; attention scores are not
in it, as fused attention keeps none); it is told and never refused by.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart.config.explain import FP32_BYTES
from rollart.config.schema import LocalWorld, RunConfig, VllmEngine
from rollart.control.weights import VERSIONS_KEPT
from rollart.runtime import room

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


def memory_plan(config: RunConfig) -> tuple[Part, ...]:
    """All parts of the host's memory, trainer first."""
    sizes, ranks, engines = room.model_sizes(config), config.trainer.ranks, config.engine.count
    weights = FP32_BYTES * sizes.parameters
    kv_tokens = room.kv_tokens_of(config)
    cache = room.kv_token_bytes(config) * kv_tokens
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
        Part(what="engines: weights", n_bytes=engines * room.ENGINE_COPIES * weights,
             how=f"{engines} x served and fetched", keys=f"engine.count, {smaller}"),
        Part(what="engines: KV cache", n_bytes=engines * cache,
             how=f"{engines} x {kv_tokens} tokens of {config.engine.dtype}",
             keys=f"engine.{'kv_gb' if vllm else 'kv_tokens'}, engine.count"),
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


def activation_bytes(sizes: room.ModelSizes, tokens: int) -> int:
    """What one forward pass over `tokens` keeps for its backward pass."""
    layer = HIDDEN_PER_LAYER * sizes.hidden + KV_PER_LAYER * sizes.kv_width + FFN_PER_LAYER * sizes.ffn
    return FP32_BYTES * tokens * (sizes.layers * layer + LOGIT_COPIES * sizes.vocabulary)
