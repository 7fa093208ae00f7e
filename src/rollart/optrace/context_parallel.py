"""Context parallelism of a traced part: each rank has 1/cp of every sequence and gathers the keys and values of the rest.

Owns the change from whole to local sequences and the exchange around attention. Invariant: FLOPs, saved bytes and the
payload of tensor-parallel collectives fall by cp, keys and values do not; per attention layer and micro-batch the forward
gathers keys and values once, the backward gathers them again and scatters their gradients (three payloads in all), which is
also what a ring of cp - 1 sends moves. Source: Llama 3 (arXiv 2407.21783, section 3.3.2) for the gather, perf.train_layers
for the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import (
    Rewrite,
    ancestors,
    communication,
    descendants,
    element_bytes,
    fewer_tokens,
    is_scores,
    kept_bytes,
    shrunk,
    token_dimension,
    with_parts,
)
from rollart.perf.train_plan import Framework, TrainingPlan


def context_parallel(trace: Trace, cp: int, framework: Framework) -> Trace:
    """`trace` with sequences cut into `cp` shares; raises `ConfigError` where they do not divide."""
    plan = trace.plan
    if cp == plan.cp:
        return trace
    if plan.cp != 1:
        raise ConfigError(f"trace of {trace.model}: captured with cp {plan.cp}, asked for {cp}; capture it with cp 1")
    step = cp * (plan.tp if plan.sequence_parallel else 1)
    if plan.sequence % step:
        nearest = max(1, round(plan.sequence / step)) * step
        raise ConfigError(
            f"sequence {plan.sequence} does not divide into {step} shares; the nearest that does: {nearest}"
        )

    def change(_: str, part: Part) -> Part:
        exchanged = kv_bytes(part, plan, framework)
        forward = [_local(op, plan, cp) for op in part.forward]
        products = [op.id for op in part.backward if op.weight_gradient and op.kind == "gemm"]
        over_weights = descendants(part.backward, products)
        backward = [op if op.id in over_weights else _local(op, plan, cp) for op in part.backward]
        if exchanged:
            forward = _exchange(part.forward, forward, exchanged, plan, framework, backward=False)
            backward = _exchange(part.backward, backward, exchanged, plan, framework, backward=True)
        other = part.saved_bytes - kept_bytes(part.forward)
        return replace(
            part, forward=tuple(forward), backward=tuple(backward), boundary_bytes=part.boundary_bytes / cp,
            saved_bytes=max(0.0, kept_bytes(forward) + other / cp),
        )  # fmt: skip

    note = f"context parallelism {cp}: derived; keys and values are gathered, causal work is spread evenly"
    return with_parts(trace, change, note, plan=replace(plan, cp=cp, devices=plan.devices * cp))


def _local(op: Op, plan: TrainingPlan, cp: int) -> Op:
    """`op` on one of `cp` shares of the tokens."""
    if op.stream == "comm":
        return replace(op, payload_bytes=op.payload_bytes / cp) if op.axis == "tp" else op
    if op.kind == "gemm":
        return fewer_tokens(op, cp)
    if op.kind in ("attention", "attention_backward"):
        queries, keys, heads, dims = op.shape
        per_query = element_bytes(op.dtype) * queries * heads * dims * (1 if op.kind == "attention" else 2)
        return replace(
            op, shape=(queries // cp, keys, heads, dims), flops=op.flops / cp, saved_bytes=op.saved_bytes / cp,
            moved_bytes=op.moved_bytes - min(per_query, op.moved_bytes / 2) * (1 - 1 / cp),
            written_bytes=op.written_bytes / cp if op.kind == "attention" else op.written_bytes,
        )  # fmt: skip
    length = plan.sequence // (plan.tp if plan.sequence_parallel else 1)
    at = token_dimension(op.shape, length)
    looks_up = "embedding" in op.name and "backward" not in op.name
    # a pass over weights alone (a cast, a zeroed gradient) has no dimension of tokens and stays as large
    return shrunk(op, cp, at) if at is not None or looks_up else op


def kv_bytes(part: Part, plan: TrainingPlan, framework: Framework) -> float:
    """Keys and values of whole sequences of a micro-batch as a rank's heads need them; 0 without attention.

    From the attention's own operands, or from the projections before it where those are narrower: heads that share keys may
    have been repeated for a kernel that knows nothing of it, and nobody would send them repeated.
    """
    for op in part.forward:
        fused = op.kind == "attention"
        if not (fused or is_scores(op, plan, framework)):
            continue
        width = element_bytes(op.dtype)
        if fused:
            queries, keys, heads, dims = op.shape
            whole = width * keys * heads * dims
            operands = op.moved_bytes - width * queries * heads * dims
        else:
            queries, keys, head_dim, heads = op.shape
            dims = 2 * head_dim
            whole = operands = width * keys * heads * dims
        cores = [op.id] if fused else [one.id for one in part.forward if is_scores(one, plan, framework)]
        before = ancestors(part.forward, cores) - set(cores)
        tokens = plan.micro_batch * plan.sequence
        columns = sum(part.forward[at].shape[1] for at in before if part.forward[at].kind == "gemm")
        projected = width * (tokens * columns - queries * heads * dims / 2)
        return min([size for size in (whole, operands, projected) if size > 0])
    return 0.0


def _exchange(
    whole: Sequence[Op],
    local: Sequence[Op],
    payload: float,
    plan: TrainingPlan,
    framework: Framework,
    *,
    backward: bool,
) -> list[Op]:
    """`local` with keys and values gathered before attention and, backward, their gradients scattered after it."""
    scores = [op.id for op in whole if is_scores(op, plan, framework)]
    groups = [(scores[0], scores[-1])] if scores else []
    groups += [(op.id, op.id) for op in whole if op.kind in ("attention", "attention_backward")]
    firsts, lasts = {first for first, _ in groups}, {last for _, last in groups}
    out = Rewrite()
    for op in local:
        gather: tuple[int, ...] = ()
        if op.id in firsts:
            again = communication("all_gather", "cp", payload, recomputed=op.recomputed)
            # backward the gather needs nothing but what the forward kept
            gather = (out.add(again, () if backward else out.mapped(op)),)
        done = out.copy(op, *gather)
        if backward and op.id in lasts:
            out.stands_for[op.id] = out.add(communication("reduce_scatter", "cp", payload), [done])
    return out.ops
