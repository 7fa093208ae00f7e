"""Activation recomputation: forward operators run again before the backward that needs what they made.

Owns which operators run again, and what stays instead of their results. Invariant: an operator that runs again keeps
nothing in the forward pass and keeps its bytes in the backward (the working set of the layer being computed again);
whatever enters the recomputed operators stays. Full recomputation repeats the whole layer with its collectives, so a layer
has 6 tensor-parallel all-reduces instead of 4; gathers of sharded weights serve both. Source: Korthikanti et al. 2022
(arXiv 2205.05198, section 5); what frameworks with fused attention repeat selectively is as in `perf.memory`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import floor, prod

from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import (
    Rewrite,
    ancestors,
    descendants,
    element_bytes,
    is_pass,
    is_scores,
    keeping_input,
    result_bytes,
    same,
    with_parts,
)
from rollart.perf.train_plan import Framework

MOVES = ("index", "gather", "scatter", "sort", "topk", "permute")
"""Passes that only rearrange tokens for a product, by a piece of their names: their results are kept."""
AGAIN = "+recomputed"
"""Ends the name of the part of those layers that are computed again, where others are not."""


def full(trace: Trace, share: float) -> Trace:
    """`trace` with the whole of `share` of the layers, evenly spread, computed again in the backward pass."""
    chosen = [floor((at + 1) * share + 1e-9) > floor(at * share + 1e-9) for at in range(len(trace.layers))]
    names = tuple(f"{name}{AGAIN}" if again else name for name, again in zip(trace.layers, chosen, strict=True))
    if all(chosen):
        names = trace.layers
    parts = dict(trace.parts)
    for old, new in dict.fromkeys(zip(trace.layers, names, strict=True)):
        if all(chosen) or new != old:
            parts[new] = _fully(trace.parts[old])
    note = f"full recomputation of {sum(chosen)} of {len(chosen)} layers: derived; their inputs alone are kept"
    return replace(
        trace, parts={name: part for name, part in parts.items() if name in {*names, trace.embedding, trace.head}},
        layers=names, notes=(*trace.notes, note), plan=replace(trace.plan, recompute="full", recompute_share=share),
    )  # fmt: skip


def _fully(part: Part) -> Part:
    forward = [replace(op, saved_bytes=0.0) for op in part.forward]
    again = {op.id for op in part.forward if op.axis != "dp"}
    backward = _before_backward(part, again)
    return replace(part, forward=tuple(forward), backward=backward, saved_bytes=part.boundary_bytes)


def selective(trace: Trace, framework: Framework) -> Trace:
    """`trace` with the cheap, large results computed again: the attention core where it keeps its scores, else the
    results of norms and activation functions.
    """
    plan = trace.plan

    def change(name: str, part: Part) -> Part:
        if name in (trace.embedding, trace.head):
            return part
        core = [op.id for op in part.forward if is_scores(op, plan, framework)]
        again = _core(part.forward, core) if core else _cheap(part)
        # the sum of the values is what leaves a core, and the projection after it needs it
        return _selected(part, again, set(core[-1:]), plan.tp) if again else part

    what = "attention cores" if framework.attention == "scores" else "norms and activation functions"
    return with_parts(
        trace, change, f"selective recomputation of {what}: derived", plan=replace(plan, recompute="selective")
    )


def _core(ops: Sequence[Op], products: Sequence[int]) -> set[int]:
    """Everything from the first product of scores to the last, which makes the values' sum."""
    return {*products, *(descendants(ops, products) & ancestors(ops, products))}


def _cheap(part: Part) -> set[int]:
    """Passes that make a product's input from something kept: no residual sums, nothing of attention's result."""
    ops = part.forward
    sums = {op.id for op in ops if _is_residual(op, ops, part)}

    def flows(op: Op) -> bool:
        handed = is_pass(op) or op.collective in ("all_gather", "alltoall")
        return handed and op.id not in sums

    products = [op.id for op in ops if op.kind == "gemm"]
    feeding = ancestors(ops, products, through=flows) - sums
    feeding -= descendants(ops, [op.id for op in ops if op.kind == "attention"], through=flows)
    found = set[int]()
    for at in sorted(feeding):
        op = ops[at]
        if not is_pass(op) or any(piece in op.name for piece in MOVES):
            continue
        # what waits for a collective would need it again, and a cast is made again only with what it casts
        gathered = any(ops[dep].stream == "comm" and ops[dep].axis != "dp" for dep in op.deps)
        if not gathered and (op.name != "derived.cast" or found.intersection(op.deps)):
            found.add(at)
    return found


def _is_residual(op: Op, ops: Sequence[Op], part: Part) -> bool:
    """A sum of two hidden states: of the size that enters the part, behind something that is no pass."""
    if not is_pass(op) or "add" not in op.name or not op.shape:
        return False
    size = prod(op.shape) * element_bytes(op.dtype)
    return same(size, part.boundary_bytes) and any(
        not is_pass(ops[at]) for at in ancestors(ops, [op.id], through=is_pass)
    )


def _selected(part: Part, again: set[int], left: set[int], ranks: int) -> Part:
    """`part` with the operators in `again` run once more before the backward pass; their inputs and `left` are kept."""
    ops = part.forward
    inputs = {dep for at in again for dep in ops[at].deps if dep not in again}
    forward = []
    for op in ops:
        saved = 0.0 if op.id in again - left else op.saved_bytes
        if op.id in inputs and saved == 0 and op.axis != "dp":
            saved = result_bytes(op, ranks)
        forward.append(replace(op, saved_bytes=saved))
    change = sum(op.saved_bytes for op in forward) - sum(op.saved_bytes for op in ops)
    new = replace(
        part, forward=tuple(forward), backward=_before_backward(part, again, left),
        saved_bytes=max(0.0, part.saved_bytes + change),
    )  # fmt: skip
    starts = any(not [dep for dep in ops[at].deps if ops[dep].axis != "dp"] for at in again)
    return keeping_input(new) if starts else new


def _before_backward(part: Part, again: set[int], left: Collection[int] = ()) -> tuple[Op, ...]:
    """The backward pass with the operators in `again` before it, behind any gather of weights that leads it."""
    lead = _leading_gathers(part.backward)
    out = Rewrite()
    for op in part.backward[:lead]:
        out.copy(op)
    made: dict[int, int] = {}
    for op in part.forward:
        if op.id in again:
            deps = [made[dep] for dep in op.deps if dep in again] or range(lead)
            saved = 0.0 if op.id in left else op.saved_bytes
            made[op.id] = out.add(replace(op, recomputed=True, saved_bytes=saved), deps)
    waited = {dep for op in out.ops for dep in op.deps}
    ends = [at for at in made.values() if at not in waited]
    for op in part.backward[lead:]:
        starts = op.axis != "dp" and not [dep for dep in op.deps if dep >= lead]
        out.copy(op, *(ends if starts else ()))
    return out.done()


def _leading_gathers(ops: Sequence[Op]) -> int:
    """How many operators at the start of a backward pass bring sharded weights: gathers and what waits for them alone."""
    lead = 0
    for op in ops:
        gathers = op.axis == "dp" and op.collective == "all_gather"
        if not gathers and not (is_pass(op) and op.deps and max(op.deps) < lead):
            break
        lead += 1
    return lead
