"""What a model's layers and its head cost one rank for one micro-batch: device, host and communication seconds.

Owns the walk over a model's matrices with the shapes that a rank sees, and the memory-bound passes between them.
Invariant: the matrices priced are those of `ModelShape.matrices()`, so FLOPs and seconds never disagree. Why: the
schedule, the overlap and the batch are the business of `training`; what a layer costs does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.perf.devices import Device
from rollart.perf.links import Fabric
from rollart.perf.operators import BF16_BYTES, OperatorLaw, flash_attention_s, gemm_s, score_attention_s, stream_s
from rollart.perf.shapes import Matrix, ModelShape
from rollart.perf.train_comm import Collectives, Group, collective_s, group
from rollart.perf.train_plan import Framework, TrainingPlan, flash_fraction

ROW_PARALLEL = frozenset({"attention_out", "ffn_out", "shared_out", "mamba_out"})
NARROW = frozenset({"qkv", "attention_out", "ffn_in", "ffn_out", "expert_in", "expert_out", "shared_in", "shared_out",
                    "latent", "mamba_in", "mamba_out"})  # fmt: skip
"""Products that low-precision recipes run in fp8 or fp4: linear layers of the blocks, not the router, attention or
head."""
LOSS_BYTES = {"passes": 60.0, "torch": 28.0, "fused": 10.0}
"""Bytes moved per logit, forward and backward: a chain of fp32 passes over vocabulary-parallel logits (Megatron-LM
2.x `vocab_parallel_cross_entropy`: 15 passes of 4 bytes), torch's log-softmax and its backward with casts, one fused
kernel each way."""
BACKWARD_PASSES = 1.5
"""Backward of a norm, dropout or activation reads the gradient beside the input: 3 streams for 2."""
CAST_BYTES = {"fp8": 4.0, "fp4": 7.0}
"""Bytes per element to quantise an operand: read 2, write it and its transpose; fp4 reads once more for its scale and
rotates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaw:
    """Seconds of the host per layer and pass when it launches every kernel itself, and what is left of it with
    graphs.
    """

    layer_s: float = 1.4e-3
    graph_share: float = 0.15
    blend: float = 3.0
    """How sharply the slower of host and device decides: their seconds add in this power (infinite: the larger
    alone)."""
    moe_layer_s: float = 1.5e-3
    """A layer of experts, whose shapes depend on the routing and so cannot be captured in a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLaw:
    """All constants that devices and frameworks share."""

    operators: OperatorLaw = field(default_factory=OperatorLaw)
    host: HostLaw = field(default_factory=HostLaw)
    pass_scale: float = 2.0
    """Memory-bound passes that an unfused layer makes beside those counted."""
    moe_pass_scale: float = 3.0
    """The same for routing, permutation and activation of experts."""
    scan_passes: float = 20.0
    """Streams of a chunked state-space scan over its projections, forward."""
    tp_hidden: float = 0.8
    """Share of tensor-parallel communication hidden where the framework overlaps it."""
    dp_hidden: float = 0.9
    """Share of the backward (and, for gathers, the forward) beside which data-parallel communication can run."""
    a2a_hidden: float = 0.3
    """Share of expert all-to-all hidden where the framework overlaps."""
    overlap_slowdown: float = 0.2
    """Computation slows by this share while communication runs beside it (level 1 of the overlap models)."""
    jitter: float = 0.02
    """Step time grows by this share per doubling of the nodes: the slowest of many."""
    hop_s: float = 2e-4
    """Host and device wait for each other once per pipeline transfer, whatever its size."""
    step_host_s: float = 5e-3
    """Host work of a step outside layers: data, loss scaling, norm clip, logging."""


@dataclass(slots=True)
class Cost:
    """Seconds for one micro-batch: forward, and backward by input and weight gradient; communication is on top of
    it.
    """

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    comm_forward_s: float = 0.0
    comm_backward_s: float = 0.0
    host_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Device seconds of the backward, recomputation included."""
        return self.input_grad_s + self.weight_grad_s + self.recompute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that prices a layer."""

    model: ModelShape
    plan: TrainingPlan
    device: Device
    fabric: Fabric
    framework: Framework
    law: TrainingLaw
    collectives: Collectives = collective_s

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return max(1, self.plan.micro_batch * self.plan.sequence // self.plan.cp)

    @property
    def spread(self) -> int:
        """Ways in which norms and residuals are split."""
        return self.plan.tp if self.plan.sequence_parallel else 1

    def stream(self, moved_bytes: float) -> float:
        """Seconds of a memory-bound pass."""
        return stream_s(moved_bytes, device=self.device, law=self.law.operators)


def _product_shape(matrix: Matrix, of: Setting) -> tuple[int, int, int, int]:
    """(tokens, outputs, inputs, batch) of a matrix on one rank."""
    plan = of.plan
    if matrix.experts > 1:
        rows = max(1, of.tokens * matrix.used * plan.ep // (plan.tp * matrix.experts))
        return rows, matrix.outputs, matrix.inputs, max(1, matrix.experts // plan.ep)
    if matrix.kind in ROW_PARALLEL:
        return of.tokens, matrix.outputs, max(1, matrix.inputs // plan.tp), 1
    if matrix.kind in ("router", "latent"):
        return max(1, of.tokens // of.spread), matrix.outputs, matrix.inputs, 1
    return of.tokens, max(1, matrix.outputs // plan.tp), matrix.inputs, 1


def matrix_cost(matrix: Matrix, of: Setting, cost: Cost) -> None:
    """Add the three products of one matrix in all of its layers, with the casts of low precision."""
    rows, outputs, inputs, batch = _product_shape(matrix, of)
    dtype = of.plan.dtype if matrix.kind in NARROW else "bf16"
    law = of.law.operators
    cast = CAST_BYTES.get(of.device.computes(dtype), 0.0) * batch

    def product(m: int, n: int, k: int) -> float:
        return gemm_s(m, n, k, device=of.device, law=law, dtype=dtype, batch=batch)

    cost.forward_s += matrix.layers * (product(rows, outputs, inputs) + of.stream(cast * rows * inputs))
    cost.input_grad_s += matrix.layers * (product(rows, inputs, outputs) + of.stream(cast * rows * outputs))
    if not of.plan.lora:
        cost.weight_grad_s += matrix.layers * product(inputs, outputs, rows)


def attention_s(of: Setting, *, backward: bool) -> float:
    """Seconds of the attention cores of all layers (scores and values, no projections)."""
    plan, model = of.plan, of.model
    heads = max(1, model.heads // plan.tp) * plan.micro_batch
    queries = plan.sequence // plan.cp
    operators = of.law.operators
    if of.framework.attention == "scores":
        one = score_attention_s(
            queries, plan.sequence, heads, model.head_dim, device=of.device, law=operators, backward=backward
        )
        return one * model.attention_layers
    dims = model.qk_dim + model.v_dim
    fraction = flash_fraction(of.framework.attention, of.device.family, dims / 2)

    def one_s(keys: int) -> float:
        return flash_attention_s(
            queries, keys, heads, dims, device=of.device, law=operators, fraction=fraction, backward=backward
        )

    windowed = model.windowed_layers * one_s(min(2 * model.window, plan.sequence)) if model.windowed_layers else 0.0
    return (model.attention_layers - model.windowed_layers) * one_s(plan.sequence) + windowed


def passes_s(of: Setting) -> float:
    """Seconds of the memory-bound passes of all layers, forward: norms, residuals, activations, rotary,
    permutations.
    """
    model, plan, framework = of.model, of.plan, of.framework
    tokens, ups = of.tokens, 2 if model.gated else 1
    blocks = model.attention_layers + model.dense_layers + model.moe_layers + model.mamba_layers
    residual = 4.0 + 6.0 + (1.0 if framework.dropout else 0.0) - (2.0 if framework.fused else 0.0)
    moved = residual * blocks * model.hidden * tokens / of.spread
    rotary = 4.0 * (model.heads + model.kv_heads) * model.head_dim if model.gated else 0.0
    layout = 4.0 * (model.heads + 2 * model.kv_heads) * model.head_dim
    moved += tokens / plan.tp * model.attention_layers * (rotary + layout)
    moved += tokens / plan.tp * 2.0 * (ups + 1) * model.ffn * model.dense_layers
    routed = model.top_k * (2.0 * (ups + 1) * model.moe_ffn + 8.0 * (model.moe_latent or model.hidden))
    routed += 2.0 * (ups + 1) * model.shared_experts * model.shared_ffn
    moved += tokens / plan.tp * model.moe_layers * routed * of.law.moe_pass_scale
    moved += tokens / plan.tp * model.mamba_layers * of.law.scan_passes * 2.0 * (3 * model.mamba_inner)
    kernels = blocks * (4 if framework.fused else 8)
    scale = 1.0 if framework.fused else of.law.pass_scale
    return of.stream(moved) * scale + kernels * of.law.operators.kernel_s


def distinct_ranks(ranks: int, choices: int) -> float:
    """Expected distinct ranks that a token's `choices` experts stand on, balanced routing."""
    return ranks * (1.0 - (1.0 - 1.0 / ranks) ** choices)


def experts_exchange_s(of: Setting) -> float:
    """Seconds of one dispatch (a combine is alike) of all expert layers: a token is sent once to every rank that
    needs it.
    """
    plan, model = of.plan, of.model
    if plan.ep == 1 or not model.moe_layers:
        return 0.0
    where = group(plan.ep, 1, of.fabric)
    width = BF16_BYTES * (model.moe_latent or model.hidden)
    tokens = of.tokens / plan.tp
    sent = tokens * width * distinct_ranks(plan.ep, model.top_k)
    one_s = of.collectives("alltoall", sent, Group(ranks=plan.ep, local=plan.ep), of.fabric)
    if where.domains > 1:  # once per domain over the network, then on within it
        others = (where.domains - 1) / where.domains
        crossing = tokens * width * distinct_ranks(where.domains, model.top_k) * others
        one_s += of.collectives("send_recv", crossing, Group(ranks=2, local=1), of.fabric)
    return one_s * model.moe_layers


def _communication(of: Setting, cost: Cost) -> None:
    plan, model, framework, law = of.plan, of.model, of.framework, of.law
    again = 1 + (plan.recompute_share if plan.recompute == "full" else 0.0)
    if plan.tp > 1:
        payload = 2.0 * of.tokens * model.hidden
        one_s = of.collectives("all_reduce", payload, group(plan.tp, 1, of.fabric), of.fabric)
        count = model.attention_layers + model.dense_layers + model.mamba_layers
        exposed = one_s * count * (1.0 - (law.tp_hidden if framework.overlap_tp else 0.0))
        cost.comm_forward_s += exposed
        cost.comm_backward_s += exposed * again
    exchange = 2 * experts_exchange_s(of) * (1.0 - (law.a2a_hidden if framework.graphs else 0.0))
    cost.comm_forward_s += exchange
    cost.comm_backward_s += exchange * again
    if plan.cp > 1:
        payload = 2.0 * of.tokens * 2 * model.kv_heads * model.head_dim / plan.tp * plan.cp
        where = group(plan.cp, plan.tp, of.fabric)
        moved_s = of.collectives("all_gather", payload, where, of.fabric) * model.attention_layers
        hidden = law.dp_hidden * attention_s(of, backward=False)
        cost.comm_forward_s += max(0.0, moved_s - hidden)
        cost.comm_backward_s += max(0.0, 2 * moved_s - 2.5 * hidden)


def body_cost(of: Setting) -> Cost:
    """All layers of the model for one micro-batch on one rank (the whole depth, before pipeline stages share it)."""
    cost = Cost()
    for matrix in of.model.matrices():
        if matrix.kind != "head":
            matrix_cost(matrix, of, cost)
    passes = passes_s(of)
    core_s = attention_s(of, backward=False)
    cost.forward_s += passes + core_s
    cost.input_grad_s += passes * BACKWARD_PASSES + attention_s(of, backward=True)
    if of.plan.recompute == "full":
        cost.recompute_s = cost.forward_s * of.plan.recompute_share
    elif of.plan.recompute == "selective":
        cost.recompute_s = core_s if of.framework.attention == "scores" else passes
    _communication(of, cost)
    host = of.law.host
    visits = 2 + (of.plan.recompute_share if of.plan.recompute == "full" else 0.0)
    share = host.graph_share if of.framework.graphs else 1.0
    plain = (of.model.layers - of.model.moe_layers) * host.layer_s * share
    cost.host_s = visits * (plain + of.model.moe_layers * host.moe_layer_s)
    return cost


def head_cost(of: Setting) -> Cost:
    """Output head, loss and input embedding for one micro-batch on one rank."""
    cost = Cost()
    matrix_cost(of.model.matrices()[-1], of, cost)
    loss_s = of.stream(LOSS_BYTES[of.framework.loss] * of.tokens * of.model.vocab / of.plan.tp)
    cost.forward_s += 0.4 * loss_s
    cost.input_grad_s += 0.6 * loss_s
    return cost
