"""Writing a pass of operators anew: numbering, dependencies, smaller shapes, and what an operator is for.

Owns what all transformations share. Invariant: a rewritten pass is numbered 0, 1, .. in order again and whoever waited for
an operator waits for what stands for its result now. Why: a transformation should say what changes and nothing about ids.
Sizes tell the roles apart (a product over two sequence dimensions belongs to attention, one of many to experts), because
names and modules differ between models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from rollart.optrace.ops import Axis, Op, Part, Trace
from rollart.perf.operators import BF16_BYTES, OPERAND_BYTES
from rollart.perf.train_plan import Framework, TrainingPlan

SAME_SIZE = 0.01
"""Buffers that differ by less are taken for the same tensor (padding, an odd row)."""


@dataclass(slots=True)
class Rewrite:
    """A pass being written; `stands_for` maps the id of an old operator to that of its result in the new pass."""

    ops: list[Op] = field(default_factory=list)
    stands_for: dict[int, int] = field(default_factory=dict)

    def add(self, op: Op, deps: Iterable[int] = ()) -> int:
        """Append `op` with the next id and `deps` in new ids; returns its id."""
        new = len(self.ops)
        self.ops.append(replace(op, id=new, deps=tuple(sorted(set(deps)))))
        return new

    def mapped(self, op: Op) -> tuple[int, ...]:
        """New ids of what `op` waits for."""
        return tuple(self.stands_for[dep] for dep in op.deps)

    def copy(self, op: Op, *more: int) -> int:
        """Append `op` with the dependencies that it had, and `more` in new ids; its result stands for itself."""
        new = self.add(op, (*self.mapped(op), *more))
        self.stands_for[op.id] = new
        return new

    def done(self) -> tuple[Op, ...]:
        return tuple(self.ops)


def communication(
    what: str, axis: Axis, payload_bytes: float, *, name: str = "", recomputed: bool = False, dtype: str = "bf16"
) -> Op:
    """A derived collective, to be numbered by `Rewrite.add`."""
    return Op(
        id=0, name=name or f"derived.{what}", kind="collective", stream="comm", collective=what, axis=axis,
        payload_bytes=payload_bytes, recomputed=recomputed, dtype=dtype,
    )  # fmt: skip


def rebuilt(part: Part, *, forward: Sequence[Op] | None = None, backward: Sequence[Op] | None = None) -> Part:
    """`part` with other passes; what stays for the backward follows from the forward operators."""
    forward = part.forward if forward is None else tuple(forward)
    saved = part.saved_bytes + kept_bytes(forward) - kept_bytes(part.forward)
    return replace(
        part,
        forward=forward,
        backward=part.backward if backward is None else tuple(backward),
        saved_bytes=max(0.0, saved),
    )


def keeping_input(part: Part) -> Part:
    """`part` with the hidden states that enter it kept for its backward, unless it or the part before does that already."""
    waited = {dep for op in part.forward for dep in op.deps}
    leaving = max((op.saved_bytes for op in part.forward if op.id not in waited), default=0.0)
    entering = part.saved_bytes - kept_bytes(part.forward)
    if max(leaving, entering) >= part.boundary_bytes / 2:
        return part
    return replace(part, saved_bytes=part.saved_bytes + part.boundary_bytes)


def kept_bytes(ops: Iterable[Op]) -> float:
    """Bytes of activations that `ops` leave for the backward pass."""
    return sum(op.saved_bytes for op in ops)


def with_parts(trace: Trace, change: Callable[[str, Part], Part], *notes: str, plan: TrainingPlan) -> Trace:
    """`trace` with every part changed, under the plan that its operators now follow."""
    parts = {name: change(name, part) for name, part in trace.parts.items()}
    return replace(trace, parts=parts, plan=plan, notes=(*trace.notes, *notes))


# ---- sizes


def element_bytes(dtype: str) -> float:
    """Bytes of one element of a result: narrow formats are operands only, their products come out in 16 bits."""
    return max(float(BF16_BYTES), OPERAND_BYTES.get(dtype, BF16_BYTES))


def gemm(op: Op, shape: tuple[int, ...], dtype: str = "") -> Op:
    """The product `op` with another shape and dtype; FLOPs and bytes follow."""
    rows, columns, inner, batch = shape
    dtype = dtype or op.dtype
    written = element_bytes(dtype) * rows * columns * batch
    return replace(
        op, shape=shape, dtype=dtype, flops=2.0 * rows * columns * inner * batch, written_bytes=written,
        moved_bytes=written + OPERAND_BYTES.get(dtype, BF16_BYTES) * (rows + columns) * inner * batch,
    )  # fmt: skip


def fewer_tokens(op: Op, ways: int) -> Op:
    """The product `op` of one of `ways` equal shares of the tokens: its rows, or what a weight gradient sums over."""
    rows, columns, inner, batch = op.shape
    if op.weight_gradient:
        shape = (rows, columns, max(1, inner // ways), batch)
    else:
        shape = (max(1, rows // ways), columns, inner, batch)
    return replace(gemm(op, shape), saved_bytes=op.saved_bytes / ways)


def shrunk(op: Op, ways: int, at: int | None) -> Op:
    """A memory-bound pass over one of `ways` equal shares of dimension `at` of its shape."""
    shape = op.shape
    if at is not None:
        shape = (*shape[:at], max(1, shape[at] // ways), *shape[at + 1 :])
    return replace(
        op, shape=shape, flops=op.flops / ways, moved_bytes=op.moved_bytes / ways,
        written_bytes=op.written_bytes / ways, saved_bytes=op.saved_bytes / ways,
    )  # fmt: skip


def divided(ops: Sequence[Op], ways: float) -> tuple[Op, ...]:
    """Passes over all parameters (updates, norms), over one of `ways` equal shares of them."""

    def share(op: Op) -> Op:
        if op.stream == "comm" or ways == 1:
            return op
        shape = (max(1, ceil(op.shape[0] / ways)), *op.shape[1:]) if op.shape else ()
        return replace(
            op, shape=shape, flops=op.flops / ways, moved_bytes=op.moved_bytes / ways, written_bytes=op.written_bytes / ways
        )  # fmt: skip

    return tuple(share(op) for op in ops)


def token_dimension(shape: Sequence[int], length: int) -> int | None:
    """Which dimension of a shape counts tokens: the first multiple of a sequence, features (the last one) only if no other."""
    candidates = [at for at, size in enumerate(shape) if size and size % length == 0]
    return candidates[0] if candidates else None


def result_bytes(op: Op, ranks: int = 1) -> float:
    """Bytes of what `op` makes, from what it writes or, where that is unknown, from its shape; `ranks` share a scatter."""
    if op.stream == "comm":
        return op.payload_bytes / (ranks if op.collective == "reduce_scatter" else 1)
    if op.written_bytes:
        return op.written_bytes
    if op.kind == "gemm" and len(op.shape) == 4:
        rows, columns, _, batch = op.shape
        return element_bytes(op.dtype) * rows * columns * batch
    if op.kind in ("attention", "attention_backward") and len(op.shape) == 4:
        queries, _, heads, dims = op.shape
        return element_bytes(op.dtype) * queries * heads * dims / 2
    return min(op.moved_bytes / 2, element_bytes(op.dtype) * prod(op.shape)) if op.shape else op.moved_bytes / 2


def same(a: float, b: float) -> bool:
    """Whether two sizes are those of one tensor."""
    return abs(a - b) <= SAME_SIZE * max(a, b)


# ---- roles


def is_scores(op: Op, plan: TrainingPlan, framework: Framework) -> bool:
    """A batched product of attention that keeps its scores in memory: two of its dimensions are sequences."""
    if op.kind != "gemm" or framework.attention != "scores" or len(op.shape) != 4 or op.shape[3] <= 1:
        return False
    lengths = (plan.sequence, plan.sequence // plan.cp)
    return sum(size in lengths for size in op.shape[:3]) >= 2


def is_expert(op: Op, plan: TrainingPlan, framework: Framework) -> bool:
    """One product for each of several experts."""
    return op.kind == "gemm" and len(op.shape) == 4 and op.shape[3] > 1 and not is_scores(op, plan, framework)


def experts_on_rank(part: Part, plan: TrainingPlan, framework: Framework) -> int:
    """Experts whose products a part runs; 0 where it has none."""
    if part.expert_parameters <= 0:
        return 0
    return max((op.shape[3] for op in part.forward if is_expert(op, plan, framework)), default=0)


def is_router(op: Op, experts: int) -> bool:
    """The product that scores `experts` experts, or one of its gradients."""
    return op.kind == "gemm" and experts > 1 and op.shape[3] == 1 and experts in op.shape[:3]


def descendants(ops: Sequence[Op], roots: Iterable[int], *, through: Callable[[Op], bool] | None = None) -> set[int]:
    """Ids that wait, directly or not, for one of `roots`; paths go on only behind operators that `through` accepts."""
    open_ids, found = set(roots), set[int]()
    for op in ops:
        if open_ids.intersection(op.deps):
            found.add(op.id)
            if through is None or through(op):
                open_ids.add(op.id)
    return found


def ancestors(ops: Sequence[Op], roots: Iterable[int], *, through: Callable[[Op], bool] | None = None) -> set[int]:
    """Ids that one of `roots` waits for, directly or not; paths go on only before operators that `through` accepts."""
    open_ids, found = set(roots), set[int]()
    for op in reversed(ops):
        if op.id in open_ids:
            for dep in op.deps:
                found.add(dep)
                if through is None or through(ops[dep]):
                    open_ids.add(dep)
    return found


def is_pass(op: Op) -> bool:
    return op.kind == "pass"
