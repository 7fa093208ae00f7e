"""Sequence parallelism of a part traced with plain tensor parallelism: the stretches between two blocks are split by tokens.

Owns the change of every all-reduce of hidden states into a reduce-scatter and an all-gather, and of the passes between
them. Invariant: payloads stay those of the all-reduce, so the same bytes cross the wires; norms, residuals and what they
leave for the backward pass fall by tp. A block's gathered input is not kept but gathered once more for the weight gradient,
beside the gradient of the input. Source: Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import (
    Rewrite,
    ancestors,
    communication,
    descendants,
    element_bytes,
    experts_on_rank,
    fewer_tokens,
    is_expert,
    is_pass,
    is_router,
    kept_bytes,
    same,
    shrunk,
    token_dimension,
    with_parts,
)
from rollart.perf.train_plan import Framework, TrainingPlan

Roots = Literal["split", "whole", "gathered"]
"""What operators without a dependency start from: a shard of the hidden states, all of them, or all after a gather."""


def sequence_parallel(trace: Trace, framework: Framework) -> Trace:
    """`trace` with the residual stream split over the tensor-parallel group by tokens; no change where it is already."""
    plan = trace.plan
    if plan.sequence_parallel:
        return trace
    if plan.tp == 1:
        return replace(trace, plan=replace(plan, sequence_parallel=True))
    local = plan.sequence // plan.cp
    if local % plan.tp:
        nearest = max(1, round(local / plan.tp)) * plan.tp * plan.cp
        raise ConfigError(
            f"sequence {plan.sequence} does not divide over cp {plan.cp} x tp {plan.tp}; the nearest that does: {nearest}"
        )
    hidden = trace.parts[trace.layers[0]].boundary_bytes
    embeds = any(_reduces(op, hidden) for op in trace.parts[trace.embedding].forward)
    roots: dict[str, tuple[Roots, Roots]] = {
        trace.embedding: ("whole", "gathered" if embeds else "whole"),
        trace.head: ("split", "whole"),
    }

    def change(name: str, part: Part) -> Part:
        experts = experts_on_rank(part, plan, framework)
        first, last = roots.get(name, ("split", "split"))
        forward = _Walk(plan=plan, framework=framework, experts=experts, hidden_bytes=hidden, roots=first)
        backward = _Walk(
            plan=plan, framework=framework, experts=experts, hidden_bytes=hidden, roots=last,
            again=_weight_gradients(part.backward, hidden),
        )  # fmt: skip
        forward.walk(part.forward)
        backward.walk(part.backward)
        entering = max(0.0, part.saved_bytes - kept_bytes(part.forward))
        kept = kept_bytes(forward.out.ops) + entering / (1 if first == "whole" else plan.tp)
        return replace(
            part, forward=forward.out.done(), backward=backward.out.done(), saved_bytes=kept,
            boundary_bytes=part.boundary_bytes / plan.tp,
        )  # fmt: skip

    note = (
        f"sequence parallelism over tp {plan.tp}: derived; block inputs are gathered again for their weight gradients"
    )
    return with_parts(trace, change, note, plan=replace(plan, sequence_parallel=True))


def _reduces(op: Op, hidden_bytes: float) -> bool:
    """Whether `op` sums the hidden states of a tensor-parallel group (and not a loss's few numbers)."""
    return op.axis == "tp" and op.collective == "all_reduce" and same(op.payload_bytes, hidden_bytes)


def _weight_gradients(ops: Sequence[Op], hidden_bytes: float) -> dict[int, int]:
    """Weight gradient -> all-reduce of its block's input gradient: both need the block's input, gathered."""
    found: dict[int, int] = {}
    for reduce in (op for op in ops if _reduces(op, hidden_bytes)):
        before = ancestors(ops, [reduce.id], through=is_pass)
        sources = [set(ops[at].deps) for at in before if ops[at].kind == "gemm"]
        found |= {
            op.id: reduce.id
            for op in ops
            if op.kind == "gemm"
            and op.weight_gradient
            and op.deps
            and any(source.issuperset(op.deps) for source in sources)
        }
    return found


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One pass of one part, operator by operator: which results are shards by token, and what each becomes."""

    plan: TrainingPlan
    framework: Framework
    experts: int
    hidden_bytes: float
    roots: Roots
    again: dict[int, int] = field(default_factory=dict)
    """Weight gradients that need a block's input gathered once more, by the collective that marks the block."""
    out: Rewrite = field(default_factory=Rewrite)
    shards: set[int] = field(default_factory=set)
    entering: set[int] = field(default_factory=set)
    """Passes that read the hidden states that enter the part."""
    loose: set[int] = field(default_factory=set)
    """Passes over labels, positions or kept numbers, which every rank has as it needs them."""
    neutral: set[int] = field(default_factory=set)
    """Gathers of weights and the like, which say nothing about the layout of activations."""
    whole: dict[int, int] = field(default_factory=dict)
    """Old id of a shard (-1: what enters the pass; -2 - id of a block's collective: its input) -> new id of its gather."""

    def walk(self, ops: Sequence[Op]) -> None:
        if self.roots == "split":
            self.entering |= {op.id for op in ops if not op.deps and self._reads_hidden(op, ops)}
        for op in ops:
            self._step(op)

    def _reads_hidden(self, op: Op, ops: Sequence[Op]) -> bool:
        """Whether a pass behind nothing reads the hidden states that enter the part or were kept in it.

        By its size, and because no pass that uses its result waits for a product that is split by columns.
        """
        if not is_pass(op) or not same(element_bytes(self.plan.dtype) * prod(op.shape), self.hidden_bytes):
            return False
        users = descendants(ops, [op.id], through=is_pass)
        waits = {dep for at in users if is_pass(ops[at]) for dep in ops[at].deps}
        return not any(self._splits(ops[dep]) for dep in waits)

    def _splits(self, op: Op) -> bool:
        """Whether what `op` makes is split by columns or heads."""
        return op.stream == "compute" and not is_pass(op) and not self._by_tokens(op)

    def _by_tokens(self, op: Op) -> bool:
        return is_router(op, self.experts) or (self.experts > 0 and is_expert(op, self.plan, self.framework))

    def _step(self, op: Op) -> None:
        if _reduces(op, self.hidden_bytes):
            scatter = communication("reduce_scatter", "tp", op.payload_bytes, recomputed=op.recomputed)
            scatter = replace(scatter, saved_bytes=op.saved_bytes / self.plan.tp, dtype=op.dtype)
            self.out.stands_for[op.id] = self.out.add(scatter, self.out.mapped(op))
            self.shards.add(op.id)
        elif self.experts and op.collective == "all_gather" and same(op.payload_bytes, self.hidden_bytes):
            raise ConfigError(
                "experts run on shards of the tokens already; capture the model with sequence parallelism"
            )
        elif op.stream == "comm" and op.axis != "tp":
            self.out.copy(op)
            self.neutral.add(op.id)
        elif self._on_shard(op):
            self._shard(op)
        else:
            self._on_whole(op)

    def _on_shard(self, op: Op) -> bool:
        """Whether `op` can run on a shard of the tokens: a pass, a router or experts behind shards and what is loose."""
        if not (is_pass(op) or self._by_tokens(op)):
            return False
        parents = [dep for dep in op.deps if dep not in self.neutral]
        if not parents:
            return op.id in self.entering
        return any(dep in self.shards for dep in parents) and all(
            dep in self.shards or dep in self.loose for dep in parents
        )

    def _shard(self, op: Op) -> None:
        tp = self.plan.tp
        if op.kind == "gemm":
            small = fewer_tokens(op, tp)
        else:
            small = shrunk(op, tp, token_dimension(op.shape, self.plan.sequence // self.plan.cp))
        self.out.copy(small)
        self.shards.add(op.id)

    def _on_whole(self, op: Op) -> None:
        if is_pass(op) and all(dep in self.loose or dep in self.neutral for dep in op.deps):
            self.loose.add(op.id)
        deps = [self._gathered(dep) if dep in self.shards else self.out.stands_for[dep] for dep in op.deps]
        starts = not [dep for dep in op.deps if dep not in self.neutral]
        if (
            starts
            and op.stream == "compute"
            and (self.roots == "gathered" or (self.roots == "split" and not is_pass(op)))
        ):
            deps.append(self._gathered(-1))
        if op.id in self.again:
            deps.append(self._gathered(-2 - self.again[op.id]))
        self.out.stands_for[op.id] = self.out.add(op, deps)

    def _gathered(self, old: int) -> int:
        """New id of the gather of a shard, made when it is first asked for."""
        if old not in self.whole:
            deps = (self.out.stands_for[old],) if old >= 0 else ()
            self.whole[old] = self.out.add(communication("all_gather", "tp", self.hidden_bytes), deps)
        return self.whole[old]
