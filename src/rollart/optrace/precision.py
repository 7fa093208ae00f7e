"""Low precision: the linear layers of blocks multiply in fp8 or fp4, and every operand is quantised first.

Owns which products narrow and the casts before them. Invariant: FLOPs do not change; a product reads narrow operands and
writes 16 bits; each activation and each gradient is cast once, whoever multiplies it; what is kept for a weight gradient is
kept as it was multiplied, in a byte. Output head, embedding, router and attention stay in 16 bits, as `perf.train_layers`
and the public recipes have it (its NARROW).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import (
    Rewrite,
    element_bytes,
    gemm,
    is_router,
    is_scores,
    rebuilt,
    with_parts,
)
from rollart.perf.train_layers import CAST_BYTES
from rollart.perf.train_plan import Framework, TrainingPlan

KEPT_BYTES = 1.0
"""Of an element that waits for its weight gradient."""
Key = tuple[frozenset[int], int, int, int]
"""What is cast: (dependencies, tokens, width, batch)."""


def low_precision(trace: Trace, dtype: str, framework: Framework, experts: Mapping[str, int]) -> Trace:
    """`trace` with the linear layers of its blocks in `dtype`; `experts`: how many each part routes to.

    Raises `ConfigError` for what must be captured instead.
    """
    plan = trace.plan
    if dtype == plan.dtype:
        return trace
    if dtype not in CAST_BYTES or plan.dtype not in ("bf16", "fp16"):
        raise ConfigError(
            f"trace of {trace.model} is in {plan.dtype}, asked for {dtype}: only {', '.join(CAST_BYTES)} are derived, "
            f"from bf16; capture the model in {dtype}"
        )

    def change(name: str, part: Part) -> Part:
        if name in (trace.embedding, trace.head):
            return part
        forward = _narrowed(part.forward, dtype, plan, framework, experts[name])
        backward = _narrowed(part.backward, dtype, plan, framework, experts[name])
        return rebuilt(part, forward=forward, backward=backward)

    note = (
        f"{dtype} linear layers: derived; operands are cast once each, head, router and attention stay in {plan.dtype}"
    )
    return with_parts(trace, change, note, plan=replace(plan, dtype=dtype))


def _narrowed(ops: Sequence[Op], dtype: str, plan: TrainingPlan, framework: Framework, experts: int) -> tuple[Op, ...]:
    linear = {
        op.id for op in ops if op.kind == "gemm" and not is_scores(op, plan, framework) and not is_router(op, experts)
    }
    # gathers that wait for nothing bring weights or kept inputs and say nothing about the gradient that is multiplied
    gathers = {op.id for op in ops if op.stream == "comm" and not op.deps}
    known = {_key(op, gathers) for op in ops if op.id in linear and not op.weight_gradient}
    casts_keep, shards = _kept_as_multiplied(ops, linear)
    out = Rewrite()
    casts: dict[Key, int] = {}
    for op in ops:
        if op.id not in linear:
            small = KEPT_BYTES / element_bytes(op.dtype) if op.id in shards else 1.0
            out.copy(replace(op, saved_bytes=0.0 if op.id in casts_keep else op.saved_bytes * small))
            continue
        key = _gradient_key(op, gathers, known) if op.weight_gradient else _key(op, gathers)
        if key not in casts:
            kept = not casts_keep.isdisjoint(op.deps) and not op.weight_gradient
            casts[key] = out.add(_cast(op, key, dtype, kept=kept), out.mapped(op))
        out.copy(replace(gemm(op, op.shape, dtype), saved_bytes=op.saved_bytes), casts[key])
    return out.done()


def _key(op: Op, gathers: set[int]) -> Key:
    """The operand of tokens that a product reads."""
    rows, _, inner, batch = op.shape
    return frozenset(op.deps) - gathers, rows, inner, batch


def _gradient_key(op: Op, gathers: set[int], known: Collection[Key]) -> Key:
    """The gradient that a weight gradient multiplies: the one of the input gradient behind the same operators."""
    rows, columns, tokens, batch = op.shape
    waits = frozenset(op.deps) - gathers
    for width in (columns, rows):
        for key in known:
            if waits <= key[0] and key[1:] == (tokens, width, batch):
                return key
    return waits, tokens, rows, batch


def _cast(op: Op, key: Key, dtype: str, *, kept: bool) -> Op:
    _, tokens, width, batch = key
    elements = float(tokens) * width * batch
    moved = CAST_BYTES[dtype] * elements
    return Op(
        id=0, name="derived.cast", kind="pass", shape=(tokens * batch, width), dtype=op.dtype, moved_bytes=moved,
        written_bytes=2 * KEPT_BYTES * elements, recomputed=op.recomputed, saved_bytes=KEPT_BYTES * elements if kept else 0.0,
    )  # fmt: skip


def _kept_as_multiplied(ops: Sequence[Op], linear: set[int]) -> tuple[set[int], set[int]]:
    """Operators whose kept result is a linear layer's input alone: those whose cast is kept instead, and those behind a
    gather or exchange, which keep their own shard in the narrow format. Fused attention needs its result in full as well.
    """
    direct, shards = set[int](), set[int]()
    for op in ops:
        open_ids = list(op.deps) if op.id in linear else []
        direct |= {dep for dep in open_ids if ops[dep].saved_bytes and ops[dep].kind != "attention"}
        while open_ids:
            dep = ops[open_ids.pop()]
            if dep.stream == "comm" and not dep.saved_bytes:
                open_ids += dep.deps
            elif dep.id not in op.deps and dep.kind != "attention":
                shards.add(dep.id)
    return direct, shards - direct
