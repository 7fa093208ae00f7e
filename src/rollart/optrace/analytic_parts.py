"""A part of a trace that is built from numbers: its operators added forward, the backward written from them.

Owns how a step of a block becomes operators of both passes. Invariant: the backward is the forward's steps in the opposite
order, each product with the gradients of its input and of its weight, a reduction for every block's input; nothing waits for
a weight gradient. Why: a block is then said once, forward, and its backward cannot forget a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollart.optrace.ops import Op, Part
from rollart.optrace.rewriting import Rewrite, communication, gemm, kept_bytes
from rollart.perf.operators import BF16_BYTES
from rollart.perf.shapes import Kind, Matrix, ModelShape
from rollart.perf.train_layers import BACKWARD_PASSES, TrainingLaw
from rollart.perf.train_plan import Framework, TrainingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What sizes an operator on one rank."""

    shape: ModelShape
    plan: TrainingPlan
    framework: Framework
    law: TrainingLaw
    split: int
    """Ways in which experts share the tokens of a micro-batch without sequence parallelism."""

    @property
    def width(self) -> float:
        return 4.0 if self.plan.dtype == "fp32" else float(BF16_BYTES)

    @property
    def tokens(self) -> int:
        return self.plan.micro_batch * self.plan.sequence

    @property
    def hidden_bytes(self) -> float:
        return self.width * self.tokens * self.shape.hidden

    def matrices(self, *kinds: Kind) -> list[Matrix]:
        return [matrix for matrix in self.shape.matrices() if matrix.kind in kinds]

    def moved(self, elements: float, *, moe: bool = False) -> float:
        """Bytes of a pass over `elements` that `perf.train_layers` counts with two bytes each."""
        scale = 1.0 if self.framework.fused else self.law.pass_scale
        return elements * scale * (self.law.moe_pass_scale if moe else 1.0) * self.width / BF16_BYTES


@dataclass(slots=True, kw_only=True)
class Building:
    """A part being built: forward operators one after the other, backward ones in the opposite order at the end."""

    of: Numbers
    forward: Rewrite = field(default_factory=Rewrite)
    backward: list[list[Op]] = field(default_factory=list)
    """Per forward step, last to first when written: what its backward runs, weight gradients last."""
    residual: int = -1
    parameters: float = 0.0
    expert_parameters: float = 0.0

    def last(self) -> tuple[int, ...]:
        """What the next forward operator waits for."""
        return (len(self.forward.ops) - 1,) if self.forward.ops else ()

    def product(self, matrix: Matrix, rows: int, columns: int, inner: int, batch: int = 1, saved: float = 0.0) -> None:
        """The product of tokens with one weight of the rank, and its two gradients."""
        held = float(columns) * inner * batch
        if matrix.experts > 1:
            self.expert_parameters += held
        else:
            self.parameters += held
        op = product_of(rows, columns, inner, batch, self.of.plan.dtype, saved)
        self.forward.add(op, self.last())
        gradient = product_of(inner, columns, rows, batch, self.of.plan.dtype)
        self.backward.append(
            [product_of(rows, inner, columns, batch, self.of.plan.dtype), replace(gradient, weight_gradient=True)]
        )

    def passes(
        self, name: str, shape: tuple[int, ...], moved: float, *, written: float, saved: float = 0.0,
        backward: float | None = None, residual: bool = False,
    ) -> None:  # fmt: skip
        """A memory-bound pass and its backward (`backward` bytes, or as many more as a gradient adds)."""
        op = Op(
            id=0, name=f"derived.{name}", kind="pass", shape=shape, dtype=self.of.plan.dtype, moved_bytes=moved,
            written_bytes=written, saved_bytes=saved,
        )  # fmt: skip
        other = () if self.residual < 0 or not residual else (self.residual,)
        added = self.forward.add(op, (*self.last(), *other))
        self.residual = added if residual else self.residual
        back = BACKWARD_PASSES * moved if backward is None else backward
        again = replace(op, name=f"derived.{name}_backward", moved_bytes=back, saved_bytes=0.0)
        self.backward.append([again])

    def reduce(self) -> None:
        """The sum of a row-parallel product over the tensor-parallel group; backward there is nothing to do."""
        if self.of.plan.tp > 1:
            self.forward.add(
                communication("all_reduce", "tp", self.of.hidden_bytes, dtype=self.of.plan.dtype), self.last()
            )

    def reduced_backward(self) -> None:
        """The sum of the gradients of a block's input, which every rank of the group has a part of."""
        if self.of.plan.tp > 1:
            self.backward.append([communication("all_reduce", "tp", self.of.hidden_bytes, dtype=self.of.plan.dtype)])

    def done(self, name: str, boundary: float) -> Part:
        """The part: its backward as one chain, weight gradients beside it."""
        out = Rewrite()
        for steps in reversed(self.backward):
            before = _chain_end(out.ops)
            beside = any(op.weight_gradient for op in steps)
            for op in steps:
                added = out.add(op, before)
                before = before if beside else (added,)
        held = self.parameters + self.expert_parameters
        update = Op(
            id=0, name="derived.adam", kind="pass", shape=(max(1, round(held)),), dtype="fp32",
            moved_bytes=self.of.framework.optimizer_bytes * held, written_bytes=self.of.framework.optimizer_bytes * held / 2,
        ) if held else None  # fmt: skip
        forward = self.forward.done()
        return Part(
            name=name, forward=forward, backward=out.done(), optimizer=(update,) if update else (),
            parameters=self.parameters, expert_parameters=self.expert_parameters, saved_bytes=kept_bytes(forward),
            boundary_bytes=boundary,
        )  # fmt: skip


def _chain_end(ops: Sequence[Op]) -> tuple[int, ...]:
    """The last operator that gradients flow through; none at the start."""
    return next(((op.id,) for op in reversed(ops) if not op.weight_gradient), ())


def product_of(rows: int, columns: int, inner: int, batch: int, dtype: str, saved: float = 0.0) -> Op:
    """A product of tokens, to be numbered when it is added."""
    blank = Op(id=0, name="derived.mm" if batch == 1 else "derived.bmm", kind="gemm", dtype=dtype, flops=1.0)
    return replace(gemm(blank, (max(1, rows), max(1, columns), max(1, inner), max(1, batch))), saved_bytes=saved)
