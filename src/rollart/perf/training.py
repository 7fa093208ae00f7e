"""Seconds of a distributed training step from a model's shape, a plan, a device and its links.

Owns `step_time` and its parts. Invariant: the parts sum to the step; more bandwidth or FLOP/s never makes it slower;
nothing here knows a row of any measurement. Why: one function answers the planner, the simulated trainer and the
validation, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart.perf.devices import Device
from rollart.perf.links import Fabric
from rollart.perf.memory import StageMemory, peak_memory_bytes, rank_parameters, stage_memory
from rollart.perf.operators import BF16_BYTES
from rollart.perf.pipeline import balanced_layers, schedule_s
from rollart.perf.shapes import ModelShape
from rollart.perf.train_comm import Collectives, collective_s, group, transfer_s
from rollart.perf.train_layers import Cost, Setting, TrainingLaw, body_cost, head_cost
from rollart.perf.train_plan import Framework, TrainingPlan

PIPELINE_EXPOSED = 0.2
"""What is left to see of pipeline transfers that run beside computation: those of warm-up and cool-down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by part; they sum to `total_s`. `scale` is the calibration factor that is already in
    them.
    """

    compute_s: float
    """Forward, backward and recomputation of the busiest stage, all micro-batches."""
    tensor_comm_s: float
    """Exposed tensor, context and expert communication."""
    pipeline_comm_s: float
    bubble_s: float
    data_comm_s: float
    """Exposed data-parallel communication: gradients, gathers of sharded weights."""
    optimizer_s: float
    host_s: float
    jitter_s: float
    model_flops: float
    """Of the whole step on all devices, without recomputation."""
    memory: StageMemory
    scale: float = 1.0

    @property
    def total_s(self) -> float:
        """The step, seconds."""
        return (
            self.compute_s + self.tensor_comm_s + self.pipeline_comm_s + self.bubble_s + self.data_comm_s
            + self.optimizer_s + self.host_s + self.jitter_s
        )  # fmt: skip

    def mfu(self, devices: int, peak_flops: float) -> float:
        """Model FLOPs utilisation of `devices` with `peak_flops` FLOP/s each."""
        return self.model_flops / (self.total_s * devices * peak_flops)


def model_flops(model: ModelShape, plan: TrainingPlan) -> float:
    """FLOPs of a step without recomputation: 6 per active parameter and token, 3 forwards of causal attention."""
    tokens = float(plan.global_batch) * plan.sequence
    return 3.0 * tokens * model.flops_per_token(plan.sequence / 2)


def hardware_flops(model: ModelShape, plan: TrainingPlan) -> float:
    """FLOPs of a step with recomputation and unmasked attention, as arXiv 2104.04473 equation 3 counts them (96 B s l
    h^2 ..).
    """
    tokens = float(plan.global_batch) * plan.sequence
    head = 2.0 * model.vocab * model.hidden
    forward = model.flops_per_token(plan.sequence)
    again = {"full": forward - head, "selective": model.attention_flops(plan.sequence), "none": 0.0}[plan.recompute]
    return tokens * (3.0 * forward + again)


def step_time(
    model: ModelShape,
    plan: TrainingPlan,
    device: Device,
    fabric: Fabric,
    framework: Framework,
    law: TrainingLaw,
    scale: float = 1.0,
    collectives: Collectives = collective_s,
) -> StepTime:
    """Seconds of one optimiser step and where they go. `scale` multiplies all of it (the constant of a framework on a
    device); `collectives` may be a measured table.
    """
    of = Setting(
        model=model, plan=plan, device=device, fabric=fabric, framework=framework, law=law, collectives=collectives
    )
    body, head = body_cost(of), head_cost(of)
    micro_batches = plan.micro_batches
    data_s, slowed = _data_parallel(of, body, head)
    stages = _stages(of, body, head, slowed)
    whole = schedule_s(
        plan.schedule if plan.pp > 1 else "1f1b", stage_forward_s=[stage.forward_s for stage in stages],
        stage_backward_s=[stage.backward_s for stage in stages], micro_batches=micro_batches,
        chunks=plan.chunks if plan.schedule == "interleaved" else 1,
    )  # fmt: skip
    busiest = max(stages, key=lambda stage: stage.total_s)
    bubble = whole - micro_batches * busiest.total_s
    optimizer = _optimizer_s(of)
    nodes = plan.devices / min(8, fabric.domain)
    before_jitter = whole + data_s + optimizer + law.step_host_s
    jitter = law.jitter * max(0.0, math.log2(max(1.0, nodes))) * before_jitter
    return StepTime(
        compute_s=scale * micro_batches * busiest.device_s,
        tensor_comm_s=scale * micro_batches * busiest.comm_s,
        pipeline_comm_s=scale * micro_batches * _hops_s(of),
        bubble_s=scale * bubble,
        data_comm_s=scale * data_s,
        optimizer_s=scale * optimizer,
        host_s=scale * (law.step_host_s + micro_batches * busiest.host_s),
        jitter_s=scale * jitter,
        model_flops=model_flops(model, plan),
        memory=stage_memory(model, plan, framework),
        scale=scale,
    )


def fitting_plans(
    model: ModelShape, plans: Sequence[TrainingPlan], device: Device, framework: Framework
) -> tuple[TrainingPlan, ...]:
    """Those of `plans` that fit the device's memory, with no more recomputation than the rest of the plan needs; where
    none fits, those that need least.
    """
    if len(plans) == 1:
        return tuple(plans)
    needs = {plan: peak_memory_bytes(model, plan, framework) for plan in plans}
    limit = max(device.memory_bytes, min(needs.values()))
    least: dict[TrainingPlan, TrainingPlan] = {}
    for plan in sorted((plan for plan, need in needs.items() if need <= limit), key=_recomputed):
        least.setdefault(replace(plan, recompute="none", recompute_share=1.0), plan)
    return tuple(least.values())


def _recomputed(plan: TrainingPlan) -> float:
    return {"none": 0.0, "selective": 0.1, "full": plan.recompute_share}[plan.recompute]


def fastest(
    model: ModelShape, plans: Sequence[TrainingPlan], device: Device, fabric: Fabric, framework: Framework, law: TrainingLaw,
) -> StepTime:  # fmt: skip
    """The fastest step of `plans`."""
    return min(
        (step_time(model, plan, device, fabric, framework, law) for plan in plans), key=lambda step: step.total_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One micro-batch on one pipeline stage, seconds; forward and backward hold all the other parts."""

    forward_s: float
    backward_s: float
    device_s: float
    host_s: float
    comm_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def _hops_s(of: Setting) -> float:
    """Seconds that one micro-batch's transfers between stages add to each stage: one each way and chunk."""
    plan = of.plan
    if plan.pp == 1:
        return 0.0
    payload = 2.0 * of.tokens * of.model.hidden / plan.tp
    one_s = transfer_s(payload, stride=plan.devices // plan.pp, fabric=of.fabric, collectives=of.collectives)
    exposed = PIPELINE_EXPOSED if of.framework.overlap_pp else 1.0
    return 2 * (one_s + of.law.hop_s) * plan.chunks * exposed


def _stages(of: Setting, body: Cost, head: Cost, slowed: float) -> list[_Stage]:
    """The stages of the pipeline; the last one has the head, `slowed` is what overlapped communication costs."""
    plan, model, blend = of.plan, of.model, of.law.host.blend
    head_layers = (head.forward_s + head.backward_s) / ((body.forward_s + body.backward_s) / model.layers)
    counts = balanced_layers(model.layers, plan.pp, first_extra=0.0, last_extra=head_layers)
    hop_s = _hops_s(of)
    found = []
    for stage, count in enumerate(counts):
        part = count / model.layers
        last = 1.0 if stage == len(counts) - 1 else 0.0
        forward = (part * body.forward_s + last * head.forward_s) * slowed
        backward = (part * body.backward_s + last * head.backward_s) * slowed
        comm = part * (body.comm_forward_s + body.comm_backward_s)
        busy = forward + backward + comm
        # kernels queue behind the host that launches them: neither hides the other entirely
        lack = (busy**blend + (part * body.host_s) ** blend) ** (1 / blend) - busy
        share = forward / (forward + backward)
        found.append(
            _Stage(
                forward_s=forward + part * body.comm_forward_s + lack * share + hop_s / 2,
                backward_s=backward + part * body.comm_backward_s + lack * (1 - share) + hop_s / 2,
                device_s=forward + backward,
                host_s=lack,
                comm_s=comm,
            )
        )
    return found


def _reduced_s(of: Setting, op: str, parameter_bytes: float, buckets: int) -> float:
    """Seconds of a data-parallel collective over the rank's dense and expert parameters, in `buckets` buckets."""
    plan = of.plan
    dense, expert = rank_parameters(of.model, plan)
    expert_ranks = max(1, plan.dp * plan.cp * plan.tp // plan.ep)
    groups = (
        (dense, group(plan.dp * plan.cp, plan.tp, of.fabric)),
        (expert, group(expert_ranks, min(plan.ep, of.fabric.domain), of.fabric)),
    )
    each = parameter_bytes / buckets
    return sum(buckets * of.collectives(op, held * each, where, of.fabric) for held, where in groups)


def _data_parallel(of: Setting, body: Cost, head: Cost) -> tuple[float, float]:
    """Exposed seconds of data-parallel communication in a step, and by what factor it slows what it hides behind.

    Sharded weights (stages 2 and 3) are gathered and gradients reduced with every micro-batch, layer by layer; else once a
    step, where the last backward hides the reduction and the first forward the gather. The first bucket's gather and the
    last one's reduction hide behind nothing.
    """
    plan, framework, law = of.plan, of.framework, of.law
    if plan.lora or plan.dp * plan.cp == 1:
        return 0.0, 1.0
    buckets = max(1, of.model.layers // plan.pp)
    forward = (body.forward_s + head.forward_s) / plan.pp
    backward = (body.backward_s + head.backward_s) / plan.pp
    if plan.shards:
        gather = _reduced_s(of, "all_gather", BF16_BYTES, buckets)
        reduce = _reduced_s(of, "reduce_scatter", framework.grad_bytes, buckets)
    else:
        gather, reduce = 0.0, _reduced_s(of, "all_reduce", framework.grad_bytes, buckets)
    if not framework.overlap_dp and plan.shards < 2:
        return gather + reduce, 1.0
    again = gather if plan.shards == 3 else 0.0
    edges = (gather + (reduce if plan.shards < 3 else 0.0)) / buckets
    exposed = edges + max(0.0, gather - law.dp_hidden * forward)
    exposed += max(0.0, again + reduce - law.dp_hidden * backward)
    moved = gather + again + reduce
    if plan.shards >= 2:
        return plan.micro_batches * exposed, 1.0 + law.overlap_slowdown * min(1.0, moved / (forward + backward))
    beside = max(0.0, moved - exposed) / ((forward + backward) * plan.micro_batches)
    return exposed, 1.0 + law.overlap_slowdown * beside


def _optimizer_s(of: Setting) -> float:
    dense, expert = rank_parameters(of.model, of.plan)
    if of.plan.lora:
        return 0.0
    if of.plan.shards:
        dense /= of.plan.dp * of.plan.cp
        expert /= max(1.0, of.plan.dp * of.plan.cp * of.plan.tp / of.plan.ep)
    return of.stream(of.framework.optimizer_bytes * (dense + expert))
