"""Expert parallelism of a traced part: a rank has experts/ep of them and exchanges tokens before and after.

Owns the change of expert products and the all-to-alls around them. Invariant: with tokens spread evenly over experts the
FLOPs of a rank stay the same, its expert weights fall by ep, and a layer and micro-batch has four exchanges (dispatch and
combine, each way). A token crosses once to every rank that needs it, as deduplicating dispatchers do. Why: who holds which
expert changes no result, so one trace serves every ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import (
    Rewrite,
    communication,
    descendants,
    divided,
    element_bytes,
    experts_on_rank,
    gemm,
    is_expert,
    rebuilt,
    with_parts,
)
from rollart.perf.train_layers import distinct_ranks
from rollart.perf.train_plan import Framework, TrainingPlan

SHARD_COPIES = "fsdp."
"""Starts the name of a pass that copies weights or gradients between their layers and the buffers that are exchanged."""


def expert_parallel(trace: Trace, ep: int, framework: Framework) -> Trace:
    """`trace` with experts spread over `ep` ranks; raises `ConfigError` where they do not divide or there are none."""
    plan = trace.plan
    counts = {experts_on_rank(part, plan, framework) for part in trace.parts.values()} - {0}
    if ep == plan.ep:
        return trace
    if not counts:
        raise ConfigError(f"ep is {ep}, but {trace.model} has no experts; set ep 1")
    for count in counts:
        if plan.ep != 1 or count % ep:
            fits = max(ways for ways in range(1, min(ep, count) + 1) if count % ways == 0)
            raise ConfigError(
                f"ep {ep} does not divide the {count} experts of {trace.model}; the nearest that does: {fits}"
            )

    def change(_: str, part: Part) -> Part:
        experts = experts_on_rank(part, plan, framework)
        if not experts:
            return part
        payload = dispatched_bytes(part, plan, framework, ep)
        held = part.parameters + part.expert_parameters
        ways = held / (held - part.expert_parameters * (1 - 1 / ep))
        forward, backward = (
            _spread(_copied(ops, ways), payload, plan, framework, ep) for ops in (part.forward, part.backward)
        )
        return replace(
            rebuilt(part, forward=forward, backward=backward), expert_parameters=part.expert_parameters / ep,
            optimizer=divided(part.optimizer, ways),
        )  # fmt: skip

    note = (
        f"expert parallelism {ep}: derived; tokens spread evenly over experts, sent once to each rank that needs them"
    )
    return with_parts(trace, change, note, plan=replace(plan, ep=ep))


def dispatched_bytes(part: Part, plan: TrainingPlan, framework: Framework, ep: int) -> float:
    """What a rank sends to experts of one layer, bytes: its tokens times the distinct ranks of a token's experts."""
    first = next(op for op in part.forward if is_expert(op, plan, framework))
    rows, _, inner, experts = first.shape
    # experts run on a share of the tokens on each tensor-parallel rank, with or without sequence parallelism
    tokens = plan.micro_batch * plan.sequence / (plan.cp * plan.tp)
    chosen = max(1, round(rows * experts / tokens))
    return tokens * inner * element_bytes(first.dtype) * distinct_ranks(ep, chosen)


def _copied(ops: Sequence[Op], ways: float) -> tuple[Op, ...]:
    """A pass with captured copies of sharded weights made for the weights that are left."""
    return tuple(divided([op], ways)[0] if op.name.startswith(SHARD_COPIES) else op for op in ops)


def _spread(ops: Sequence[Op], payload: float, plan: TrainingPlan, framework: Framework, ep: int) -> tuple[Op, ...]:
    """A pass with exchanges before its first and after its last product of experts that others wait for."""
    products = [op for op in ops if is_expert(op, plan, framework)]
    if not products:
        return tuple(ops)
    behind = descendants(ops, [op.id for op in products])
    starts = {op.id for op in products if op.id not in behind}
    last = [op.id for op in products if not op.weight_gradient][-1]
    out = Rewrite()
    sent = -1
    for op in ops:
        if not is_expert(op, plan, framework):
            out.copy(op)
            continue
        more: tuple[int, ...] = ()
        if op.id in starts:
            if sent < 0:
                sent = out.add(communication("alltoall", "ep", payload, recomputed=op.recomputed), out.mapped(op))
            more = (sent,)
        done = out.copy(_fewer_experts(op, ep), *more)
        if op.id == last:
            back = communication("alltoall", "ep", payload, recomputed=op.recomputed)
            out.stands_for[op.id] = out.add(back, [done])
    return out.done()


def _fewer_experts(op: Op, ep: int) -> Op:
    """The products of a share of the experts, each with the tokens of `ep` ranks."""
    rows, columns, inner, experts = op.shape
    if op.weight_gradient:
        return gemm(op, (rows, columns, inner * ep, experts // ep))
    return gemm(op, (rows * ep, columns, inner, experts // ep))
