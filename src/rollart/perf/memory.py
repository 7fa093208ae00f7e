"""Bytes of device memory that a training step needs, by stage of the pipeline.

Owns the closed forms for weights, gradients, optimizer state, activations and buffers. Invariant: every part is at
least 0 and sharding one more way never raises it. Why: a plan that does not fit is no plan, and what does not fit
decides how much is recomputed. Sources: Korthikanti et al. 2022 (arXiv 2205.05198) for activations; Rajbhandari et
al. 2020 (arXiv 1910.02054) for sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollart.perf.shapes import ModelShape
from rollart.perf.train_plan import Framework, TrainingPlan

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12
"""fp32 master weight and Adam's two moments."""
SCORE_BYTES = 5
"""Softmax output and dropout output of 2 bytes and a mask of 1 a score (arXiv 2205.05198, equation 1)."""
FRAMEWORK_BYTES = 4 << 30
"""CUDA context, communication buffers and fragmentation: 342 to 392 MiB of a collective library and 3.5 GiB other
(aiconfigurator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on a device of one stage, by what holds them."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def rank_parameters(model: ModelShape, plan: TrainingPlan, *, ends: bool = True) -> tuple[float, float]:
    """Parameters that one rank of a stage holds before sharding over data parallelism: (dense, expert).

    `ends`: with the larger of input embedding and output head, as the first and the last stage have.
    """
    body = [matrix for matrix in model.matrices() if matrix.kind != "head"]
    expert = float(sum(matrix.parameters for matrix in body if matrix.experts > 1))
    dense = float(sum(matrix.parameters for matrix in body if matrix.experts <= 1))
    vocabulary = float(model.vocab * model.hidden)
    edge = vocabulary if ends else 0.0
    if plan.pp == 1:
        edge += model.embedding_parameters
    return dense / (plan.tp * plan.pp) + edge / plan.tp, expert / (plan.ep * plan.pp)


def layer_activation_bytes(model: ModelShape, plan: TrainingPlan, framework: Framework) -> float:
    """Bytes that the backward of one average layer needs kept, for one micro-batch on one rank.

    With plain GPT shapes these are arXiv 2205.05198's s b h (10 + 24/t + 5 a s/(h t)), /t throughout with sequence
    parallelism.
    """
    tokens = plan.micro_batch * plan.sequence / plan.cp
    whole = plan.tp if plan.sequence_parallel else 1
    if plan.recompute == "full" and plan.recompute_share >= 1:
        return 2 * model.hidden * tokens / whole
    count = model.layers
    ups = 2 if model.gated else 1
    spread = (8 + (2 if framework.dropout else 0)) * model.hidden * count / whole
    heads = 2 * ((model.heads + 2 * model.kv_heads) * model.head_dim + model.heads * model.v_dim)
    split = heads * model.attention_layers + 2 * (ups + 1) * model.ffn * model.dense_layers
    routed = model.top_k * (2 * model.hidden + 2 * (ups + 1) * model.moe_ffn)
    routed += model.shared_experts * 2 * (ups + 1) * model.shared_ffn
    split += routed * model.moe_layers + 8 * model.mamba_inner * model.mamba_layers
    if plan.dtype in ("fp8", "fp4"):  # the inputs of linear layers are kept as they were multiplied, in a byte
        spread -= 2 * model.hidden * count / whole
        split -= model.heads * model.v_dim * model.attention_layers + model.ffn * model.dense_layers
        split -= model.moe_layers * (
            model.top_k * (model.hidden + model.moe_ffn) + model.shared_experts * model.shared_ffn
        )
    kept = tokens * (spread + split / plan.tp) / count
    if framework.attention == "scores" and plan.recompute != "selective":
        kept += SCORE_BYTES * model.heads * plan.sequence**2 * plan.micro_batch / (plan.tp * plan.cp)
    if framework.attention != "scores" and plan.recompute == "selective":
        # norms and activation functions are computed again, their inputs stay
        width = 1 if plan.dtype in ("fp8", "fp4") else 2
        active = model.ffn * model.dense_layers + model.top_k * model.moe_ffn * model.moe_layers
        kept -= tokens * (2 * width * model.hidden / whole + width * active / count / plan.tp)
    if plan.recompute == "full":
        kept += plan.recompute_share * (2 * model.hidden * tokens / whole - kept)
    return kept


def layers_in_flight(plan: TrainingPlan, layers: int, stage: int = 0) -> float:
    """Layers whose activations a stage keeps at most, as the order of its tasks has it (arXiv 2104.04473, 2401.10241).

    All micro-batches in GPipe, p - stage in 1F1B. Interleaved with v chunks (2 (p - stage - 1) + (v - 1) p + 1) / v times the
    stage's own, on the first stage (1 + (p-1)/(pv)) L. Zero bubble: p times its own on every stage, since a later one puts its
    weight gradients off for longer.
    """
    per_stage, count = layers / plan.pp, plan.micro_batches
    if plan.pp == 1:
        return per_stage
    if plan.schedule == "gpipe":
        return per_stage * count
    if plan.schedule == "zero_bubble":
        return per_stage * min(count, plan.pp)
    if plan.schedule == "interleaved" and plan.chunks > 1:
        return per_stage * _chunks_in_flight(plan, stage) / plan.chunks
    return per_stage * min(count, plan.pp - stage)


def _chunks_in_flight(plan: TrainingPlan, stage: int) -> int:
    """Forwards of chunks before the first backward of a stage; with too few micro-batches for a round, all of them."""
    count, whole = plan.micro_batches, plan.micro_batches * plan.chunks
    if count < plan.pp:
        return whole
    group = -(-count // (count // plan.pp))  # micro-batches that go through a chunk before the next: p, or a few more
    return min(whole, 2 * (plan.pp - stage - 1) + (plan.chunks - 1) * group + 1)


def deferred_gradients(plan: TrainingPlan, stage: int) -> int:
    """Micro-batches that wait on a stage for their weight gradients alone: in zero bubble as many as stages before it."""
    return min(stage, plan.micro_batches - 1) if plan.schedule == "zero_bubble" else 0


def stage_memory(model: ModelShape, plan: TrainingPlan, framework: Framework, *, stage: int = 0) -> StageMemory:
    """Bytes on a device of pipeline stage `stage` (0 is the first, which keeps most activations)."""
    last = stage == plan.pp - 1
    dense, expert = rank_parameters(model, plan, ends=stage == 0 or last)
    replicas, expert_replicas = plan.dp * plan.cp, max(1.0, plan.dp * plan.cp * plan.tp / plan.ep)

    def held(per_parameter: float, stage_of_sharding: int) -> float:
        if plan.shards < stage_of_sharding:
            return per_parameter * (dense + expert)
        return per_parameter * (dense / replicas + expert / expert_replicas)

    trained = 0.0 if plan.lora else 1.0
    layer = layer_activation_bytes(model, plan, framework)
    tokens = plan.micro_batch * plan.sequence / plan.cp
    activations = layer * layers_in_flight(plan, model.layers, stage)
    if plan.recompute == "full":  # one layer is alive in full while it is computed again
        activations += layer_activation_bytes(model, replace(plan, recompute="none"), framework)
    if last:
        logits = {"passes": 10, "torch": 8, "fused": 4}[framework.loss]
        logits += WEIGHT_BYTES * deferred_gradients(plan, stage)  # gradients of logits that the head's own still needs
        activations += logits * tokens * model.vocab / plan.tp
    gathered = 2 * WEIGHT_BYTES * (dense + expert) / model.layers if plan.shards == 3 else 0.0
    return StageMemory(
        weights=held(WEIGHT_BYTES, 3),
        gradients=trained * held(framework.grad_bytes, 2),
        optimizer=trained * held(OPTIMIZER_BYTES, 1),
        activations=activations,
        buffers=FRAMEWORK_BYTES + gathered,
    )


def peak_memory_bytes(model: ModelShape, plan: TrainingPlan, framework: Framework) -> float:
    """Bytes of the stage class (first, middle, last) that needs most."""
    stages = {0, plan.pp // 2, plan.pp - 1}
    return max(stage_memory(model, plan, framework, stage=stage).total for stage in stages)
