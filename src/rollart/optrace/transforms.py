"""From the trace of one rank to the trace that a whole plan asks for.

Owns the order of the transformations and the checks before them. Invariant: each one is a function from trace to trace that
moves `Trace.plan` one degree closer to the plan and writes a line of `Trace.notes`; the result's plan is the plan. Order:
what runs where (context, tensor, experts), then how it is computed (precision, recomputation, fusion), then what replicas
exchange, because every later one reads sizes that the earlier ones set. Why derived: capture costs seconds for every plan,
and of these degrees none changes what a block computes. Pipeline stages are cut by the composer, which sends
`Part.boundary_bytes` between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from rollart.core.errors import ConfigError
from rollart.optrace.context_parallel import context_parallel
from rollart.optrace.data_parallel import data_parallel
from rollart.optrace.expert_parallel import expert_parallel
from rollart.optrace.fusion import fused
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.precision import low_precision
from rollart.optrace.recompute import full, selective
from rollart.optrace.rewriting import Rewrite, descendants, experts_on_rank, is_scores, with_parts
from rollart.optrace.tensor_parallel import sequence_parallel
from rollart.perf.train_plan import Framework, TrainingPlan


def derived(trace: Trace, plan: TrainingPlan, framework: Framework, *, bucket_bytes: float = inf) -> Trace:
    """`trace`, captured or built with some degrees of `plan`, as the rank of the whole plan runs it.

    `bucket_bytes`: gradients of a layer are reduced in pieces of at most this size (a layer at a time otherwise). Raises
    `ConfigError` for what only another capture can give (tp, micro-batch, sequence, 32-bit numbers) and for degrees that do
    not divide.
    """
    _check(trace, plan)
    made = marked(trace, framework)
    experts = {name: experts_on_rank(part, trace.plan, framework) for name, part in trace.parts.items()}
    if plan.lora:
        made = _frozen(made)
    made = context_parallel(made, plan.cp, framework)
    if plan.sequence_parallel:
        made = sequence_parallel(made, framework)
    made = expert_parallel(made, plan.ep, framework)
    made = low_precision(made, plan.dtype, framework, experts)
    if plan.recompute == "selective" != trace.plan.recompute:
        made = selective(made, framework)
    if framework.fused:
        made = fused(made)
    if plan.recompute == "full" != trace.plan.recompute:
        made = full(made, plan.recompute_share)
    made = replace(made, plan=trace.plan)  # replicas are read from what was captured
    return data_parallel(made, plan, framework, bucket_bytes)


def _check(trace: Trace, plan: TrainingPlan) -> None:
    had = trace.plan
    for label in ("tp", "micro_batch", "sequence"):
        if getattr(had, label) != getattr(plan, label):
            raise ConfigError(
                f"trace of {trace.model} was captured with {label} {getattr(had, label)}, the plan has {getattr(plan, label)}; "
                "capture it with the plan's"
            )
    if had.sequence_parallel and not plan.sequence_parallel and plan.tp > 1:
        raise ConfigError(f"trace of {trace.model} has sequence parallelism, the plan has not; capture it without")
    if had.recompute not in ("none", plan.recompute):
        raise ConfigError(
            f"trace of {trace.model} was captured with recompute {had.recompute}, the plan says {plan.recompute}; "
            "capture it with none"
        )
    if had.shards == 3 and (plan.shards != 3 or plan.dp * plan.cp != had.dp):
        raise ConfigError(
            f"trace of {trace.model} was captured with weights sharded over {had.dp} ranks, the plan has shards "
            f"{plan.shards} and dp x cp {plan.dp * plan.cp}; capture it with the plan's, or without sharding"
        )
    ranks = plan.dp * plan.cp * plan.tp
    if ranks % plan.ep:
        fits = max(ways for ways in range(1, min(plan.ep, ranks) + 1) if ranks % ways == 0)
        raise ConfigError(f"ep {plan.ep} does not divide dp x cp x tp = {ranks}; the nearest that does: {fits}")


def marked(trace: Trace, framework: Framework) -> Trace:
    """`trace` with its weight gradients marked where capture did not: products that no other computation waits for."""

    def change(_: str, part: Part) -> Part:
        if any(op.weight_gradient for op in part.backward):
            return part
        return replace(part, backward=_marked(part, trace.plan, framework))

    return with_parts(trace, change, plan=trace.plan)


def _marked(part: Part, plan: TrainingPlan, framework: Framework) -> tuple[Op, ...]:
    ops = part.backward
    made = {_sizes(op) for op in part.forward if op.kind == "gemm"}

    def is_gradient(op: Op) -> bool:
        if op.kind != "gemm" or is_scores(op, plan, framework) or _sizes(op) not in made:
            return False
        return not any(ops[at].stream == "compute" or ops[at].axis == "tp" for at in descendants(ops, [op.id]))

    return tuple(replace(op, weight_gradient=is_gradient(op)) for op in ops)


def _sizes(op: Op) -> tuple[int, ...]:
    """The three sizes of a product and its batch, whichever way it is transposed."""
    return (*sorted(op.shape[:3]), *op.shape[3:])


def _frozen(trace: Trace) -> Trace:
    """`trace` without weight gradients and updates: adapters are trained, whose own products are below 1 % of a layer's."""

    def change(_: str, part: Part) -> Part:
        dropped = {op.id for op in part.backward if op.weight_gradient}
        return replace(part, backward=_dropped(part.backward, dropped), optimizer=())

    note = "frozen weights: no weight gradients, no updates; the adapters' own products are left out"
    return replace(with_parts(trace, change, note, plan=replace(trace.plan, lora=True)), step=())


def _dropped(ops: Sequence[Op], dropped: set[int]) -> tuple[Op, ...]:
    """A pass without `dropped` and without what waits for nothing else but them (their casts and reductions)."""
    out = Rewrite()
    gone = set(dropped)
    for op in ops:
        if op.id in gone or (op.deps and gone.issuperset(op.deps)):
            gone.add(op.id)
            continue
        out.stands_for[op.id] = out.add(op, [out.stands_for[dep] for dep in op.deps if dep not in gone])
    return out.done()
