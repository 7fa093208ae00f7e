"""Fusion of memory-bound passes: a chain that runs back to back becomes one kernel.

Owns which passes merge and what the merged one moves. Invariant: a fused kernel reads each outside input once and writes
what another kernel or part reads; it never moves more than its members. What only its members read is neither written nor
kept: the fused backward makes it again from the inputs, which are kept instead. Why: compilers and hand-fused kernels hold
intermediate results in registers, and passes are bound by memory, so this is most of what "fused" buys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import Rewrite, is_pass, keeping_input, rebuilt, result_bytes, with_parts

UNFUSED = (
    "fsdp",
    "index",
    "gather",
    "scatter",
    "sort",
    "topk",
    "permute",
    "embedding",
    "multi_tensor",
    "foreach",
    "cumsum",
)
"""Passes by a piece of their names whose results are not elementwise in their inputs."""

ENTERS = -1
"""Stands for what enters a part among the ids of its operators."""
ACCUMULATES = ".add_"
"""Ends the name of a pass that adds to a tensor in place."""


def fused(trace: Trace) -> Trace:
    """`trace` with chains of passes merged in the forward and backward of every part; optimizers stay as they are."""

    ranks = trace.plan.tp

    def change(_: str, part: Part) -> Part:
        backward = fuse(accumulating(part.backward), ranks)
        new = rebuilt(part, forward=fuse(part.forward, ranks), backward=backward)
        return keeping_input(new) if _reads_input_again(part.forward) else new

    return with_parts(
        trace, change, "chains of memory-bound passes: fused (inputs read once, results written once)", plan=trace.plan
    )


def accumulating(ops: Sequence[Op]) -> tuple[Op, ...]:
    """A backward pass whose weight gradients are added to those of earlier micro-batches where they are made.

    The product reads the sum once more; the pass that would add to it afterwards is gone (Megatron-LM's fused accumulation).
    """
    readers = [0] * len(ops)
    for op in ops:
        for dep in op.deps:
            readers[dep] += 1
    out = Rewrite()
    for op in ops:
        made = ops[op.deps[0]] if len(op.deps) == 1 else op
        adds = is_pass(op) and op.weight_gradient and op.name.endswith(ACCUMULATES)
        if not (adds and made.kind == "gemm" and readers[made.id] == 1):
            out.copy(op)
            continue
        at = out.stands_for[made.id]
        out.ops[at] = replace(out.ops[at], moved_bytes=out.ops[at].moved_bytes + result_bytes(made))
        out.stands_for[op.id] = at
    return out.done()


def fuse(ops: Sequence[Op], ranks: int = 1) -> tuple[Op, ...]:
    """One pass of a part with connected passes merged; a kernel runs where the last of its members did.

    `ranks`: of the tensor-parallel group, whose scattered results may have to be kept.
    """
    readers = _readers(ops)
    groups = _groups(ops, readers)
    out = Rewrite()
    for op in ops:
        members = groups.get(op.id, [op])
        if op.id != members[-1].id:
            continue
        if len(members) == 1:
            out.copy(op)
            continue
        ids = {member.id for member in members}
        outside = {dep for member in members for dep in member.deps if dep not in ids}
        needed = _needed_again(members, ids, readers)
        for dep in outside & needed:
            _keep(out, out.stands_for[dep], ranks)
        new = out.add(_merged(members, ids, readers, needed), {out.stands_for[dep] for dep in outside})
        out.stands_for |= dict.fromkeys(ids, new)
    return out.done()


def _readers(ops: Sequence[Op]) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {op.id: set() for op in ops}
    for op in ops:
        for dep in op.deps:
            readers[dep].add(op.id)
    return readers


def _reads_input_again(ops: Sequence[Op]) -> bool:
    """Whether a kernel kept inside what is made from the input of the part."""
    readers = _readers(ops)
    groups = {members[0].id: members for members in _groups(ops, readers).values() if len(members) > 1}
    return any(ENTERS in _needed_again(one, {op.id for op in one}, readers) for one in groups.values())


def _groups(ops: Sequence[Op], readers: dict[int, set[int]]) -> dict[int, list[Op]]:
    """Passes by the id of each member: one joins those before it that nobody else has read by then."""
    groups: dict[int, list[Op]] = {}
    for op in ops:
        if not _joins(op):
            continue
        mine = [op]
        for dep in op.deps:
            others = groups.get(dep, [])
            if not others or _when(others[-1]) != _when(op) or others[0] in mine:
                continue
            ids = {other.id for other in others}
            if all(at >= op.id or at in ids for other in ids for at in readers[other]):
                mine = sorted([*others, *mine], key=lambda member: member.id)
        groups |= {member.id: mine for member in mine}
    return groups


def _when(op: Op) -> tuple[bool, bool]:
    """Schedules may move weight gradients, so they stay apart; what is computed again is told apart in reports."""
    return op.recomputed, op.weight_gradient


def _joins(op: Op) -> bool:
    return is_pass(op) and op.stream == "compute" and not any(piece in op.name for piece in UNFUSED)


def _inside(op: Op, ids: set[int], readers: dict[int, set[int]]) -> bool:
    """Whether nobody outside a kernel reads what its member makes."""
    return bool(readers[op.id]) and readers[op.id] <= ids


def _needed_again(members: Sequence[Op], ids: set[int], readers: dict[int, set[int]]) -> set[int]:
    """Results from which a backward pass makes again what a kernel kept inside: those it reads or writes itself."""
    inside = {op.id: op for op in members if _inside(op, ids, readers)}
    open_ids = [at for at, op in inside.items() if op.saved_bytes]
    seen, needed = set(open_ids), set[int]()
    while open_ids:
        deps = inside[open_ids.pop()].deps
        for dep in deps or (ENTERS,):
            if dep not in inside:
                needed.add(dep)
            elif dep not in seen:
                seen.add(dep)
                open_ids.append(dep)
    return needed


def _keep(out: Rewrite, at: int, ranks: int) -> None:
    """Keep the result of an operator for a backward pass that makes what it needs from it."""
    op = out.ops[at]
    if op.saved_bytes == 0 and op.axis != "dp":
        out.ops[at] = replace(op, saved_bytes=result_bytes(op, ranks))


def _merged(members: Sequence[Op], ids: set[int], readers: dict[int, set[int]], needed: set[int]) -> Op:
    """One kernel that does what `members` do one after the other."""
    made = {op.id: min(result_bytes(op), op.moved_bytes) for op in members}
    read: dict[tuple[int, ...], float] = {}
    written = saved = 0.0
    for op in members:
        outside = tuple(dep for dep in op.deps if dep not in ids)
        taken = op.moved_bytes - made[op.id] - sum(made[dep] for dep in op.deps if dep in ids)
        # members that read the same outside results read them once
        read[outside] = max(read.get(outside, 0.0), taken)
        if not _inside(op, ids, readers):
            written += made[op.id]
            saved += op.saved_bytes or (made[op.id] if op.id in needed else 0.0)
    moved = min(written + sum(read.values()), sum(op.moved_bytes for op in members))
    first, last = members[0], members[-1]
    largest = max(members, key=lambda op: op.moved_bytes)
    return replace(
        largest, name=f"fused.{_short(first.name)}+{_short(last.name)}", flops=sum(op.flops for op in members),
        moved_bytes=moved, written_bytes=written, saved_bytes=saved,
    )  # fmt: skip


def _short(name: str) -> str:
    return name.removeprefix("fused.").split("+")[0].rsplit(".", 1)[-1]
