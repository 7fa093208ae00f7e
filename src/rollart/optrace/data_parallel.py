"""Data parallelism of a derived trace: gradients reduced, sharded weights gathered, each rank updating its share.

Owns the data-parallel operators of a part. Invariant: what a rank reduces is its gradients, what it gathers its weights, by
the stage of sharding (arXiv 1910.02054): 0 all-reduce; 1 and 2 reduce-scatter, and a gather before the forward pass; 3 a
gather in forward and backward. Where gradients are sharded (2 and 3), those of every micro-batch pass through a buffer of the
part's whole gradient before they are reduced, as in the capture of torch's own sharding. The composer runs gathers of stages 1
and 2 in the first micro-batch of a step only, and reductions of stages 0 and 1 in the last. Expert weights have fewer replicas
and their own group. Why: replicas are alike, so a trace of one needs nothing else to stand for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.parallel_groups import EXPERTS, expert_replicas
from rollart.optrace.rewriting import Rewrite, communication, divided, with_parts
from rollart.perf.operators import BF16_BYTES, OPERAND_BYTES
from rollart.perf.train_plan import Framework, TrainingPlan

SCALAR_BYTES = 4.0
"""The square of a gradient's norm."""


def weight_bytes(plan: TrainingPlan) -> float:
    """Of one weight as the forward pass reads and gathers it."""
    return max(2.0, OPERAND_BYTES.get(plan.dtype, 2.0))


def gradient_bytes(plan: TrainingPlan, framework: Framework) -> float:
    """Of one reduced gradient."""
    return max(float(framework.grad_bytes), weight_bytes(plan))


def data_parallel(trace: Trace, plan: TrainingPlan, framework: Framework, bucket_bytes: float = inf) -> Trace:
    """`trace` under the degrees dp, cp and sharding of `plan`; what was captured of it is kept where the groups agree.

    `bucket_bytes`: a layer's gradients are reduced in pieces of at most this size, each as soon as it is complete.
    """
    captured = any(op.axis == "dp" for part in trace.parts.values() for op in (*part.forward, *part.backward))
    keeps = captured and plan.shards == 3 and plan.ep == 1 and trace.plan.dp == plan.dp * plan.cp and not plan.lora
    # captured updates are those of a shard already
    before = trace.plan.dp if trace.plan.shards == 3 else 1

    def change(_: str, part: Part) -> Part:
        part = replace(part, optimizer=_updates(part, plan, before))
        if keeps:
            return part
        updated = plan.shards >= 1 and not plan.lora
        forward = _gathered(_without(part.forward), part, plan, wanted=updated or plan.shards == 3)
        backward = _gathered(_without(part.backward), part, plan, wanted=plan.shards == 3)
        if not plan.lora:
            backward = _reduced(backward, part, plan, framework, bucket_bytes)
        return replace(part, forward=forward, backward=backward)

    how = "captured" if keeps else "derived"
    notes = (f"data parallelism over {plan.dp * plan.cp} ranks, sharding stage {plan.shards}: {how}",)
    trace = with_parts(trace, change, *(notes if plan.dp * plan.cp > 1 else ()), plan=plan)
    return replace(trace, step=_norms(trace.step, plan))


def _groups(part: Part, plan: TrainingPlan) -> tuple[tuple[str, float], ...]:
    """(end of the name, parameters) of the groups that share a part's weights, those of one rank left out."""
    dense = part.parameters if plan.dp * plan.cp > 1 else 0.0
    expert = part.expert_parameters if expert_replicas(plan) > 1 else 0.0
    return tuple((end, count) for end, count in (("", dense), (EXPERTS, expert)) if count > 0)


def _without(ops: Sequence[Op]) -> tuple[Op, ...]:
    """A pass without its captured data-parallel collectives; who waited for one waits for what it waited for."""
    if not any(op.axis == "dp" for op in ops):
        return tuple(ops)
    out = Rewrite()
    behind: dict[int, set[int]] = {}
    for op in ops:
        deps = {new for dep in op.deps for new in behind[dep]}
        behind[op.id] = deps if op.axis == "dp" else {out.add(op, deps)}
    return out.done()


def _gathered(ops: tuple[Op, ...], part: Part, plan: TrainingPlan, *, wanted: bool) -> tuple[Op, ...]:
    """A pass behind the gathers of its weights."""
    groups = _groups(part, plan) if wanted else ()
    if not groups:
        return ops
    out = Rewrite()
    for end, count in groups:
        name = f"derived.all_gather{end}"
        out.add(communication("all_gather", "dp", weight_bytes(plan) * count, name=name))
    gathers = range(len(groups))
    for op in ops:
        out.copy(op, *(gathers if not op.deps and op.stream == "compute" else ()))
    return out.done()


def _reduced(
    ops: tuple[Op, ...], part: Part, plan: TrainingPlan, framework: Framework, bucket_bytes: float
) -> tuple[Op, ...]:
    """A backward pass with its gradients reduced, each bucket behind the weight gradients that it carries."""
    groups = _groups(part, plan)
    if not groups:
        return ops
    what = "reduce_scatter" if plan.shards else "all_reduce"
    buffered = plan.shards >= 2
    carriers = [op.id for op in ops if op.weight_gradient] or [op.id for op in ops if op.stream == "compute"][-1:]
    size = gradient_bytes(plan, framework)
    after: dict[int, list[tuple[str, float, list[int]]]] = {}
    for end, count in groups:
        pieces = min(max(1, ceil(size * count / bucket_bytes)), len(carriers)) if carriers else 1
        cuts = [at * len(carriers) // pieces for at in range(pieces + 1)]
        for start, stop in pairwise(cuts):
            mine = carriers[start:stop]
            after.setdefault(mine[-1] if mine else -1, []).append((end, size * count / pieces, mine))
    out = Rewrite()
    for op in ops:
        out.copy(op)
        for end, payload, waits in after.pop(op.id, ()):
            reduce = communication(what, "dp", payload, name=f"derived.{what}{end}")
            made = [out.stands_for[at] for at in waits]
            out.add(reduce, [out.add(_buffered(payload / size, plan, size), made)] if buffered else made)
    return out.done()


def _buffered(count: float, plan: TrainingPlan, size: float) -> Op:
    """`count` gradients as they are made ready to be reduced in elements of `size` bytes.

    They are copied into one buffer in the width that they are made in, cast where they are reduced in another, and divided
    in place by a share of the ranks, so that their sum stays in range (torch's `_reduce_grad` of
    `torch/distributed/fsdp/_runtime_utils.py`; DeepSpeed's ZeRO copies and divides its buckets alike).
    """
    made = weight_bytes(plan)
    cast = made + size if size != made else 0.0
    dtype = "fp32" if made > BF16_BYTES else "bf16"
    return Op(
        id=0, name="derived.gradient_buffer", kind="pass", shape=(max(1, round(count)),), dtype=dtype,
        moved_bytes=count * (2.0 * made + cast + 2.0 * size), written_bytes=count * size, weight_gradient=True,
    )  # fmt: skip


def _updates(part: Part, plan: TrainingPlan, before: int) -> tuple[Op, ...]:
    """The update of a rank's share of the weights; a captured trace updates 1/`before` of them already."""
    if plan.lora:
        return ()
    held = part.parameters + part.expert_parameters
    if not plan.shards or held <= 0:
        return part.optimizer
    share = part.parameters / (plan.dp * plan.cp) + part.expert_parameters / expert_replicas(plan)
    return divided(part.optimizer, held / share / before)


def _norms(step: Sequence[Op], plan: TrainingPlan) -> tuple[Op, ...]:
    """The norm of all gradients, its square summed over whoever holds the rest of them."""
    if not step or plan.lora:
        return ()
    out = Rewrite()
    for op in step:
        out.copy(op)
    summed = {op.axis for op in step if op.stream == "comm"}
    if plan.shards and plan.dp * plan.cp > 1 and "dp" not in summed:
        out.add(communication("all_reduce", "dp", SCALAR_BYTES), [len(out.ops) - 1])
    if plan.pp > 1 and "pp" not in summed:
        out.add(communication("all_reduce", "pp", SCALAR_BYTES), [len(out.ops) - 1])
    return out.done()
