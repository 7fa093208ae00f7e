"""Traces written by hand whose operators take the seconds that one gives them."""

from __future__ import annotations

from collections.abc import Sequence

from rollart.optrace.ops import Op, Part, Priced, Trace
from rollart.perf.train_plan import Framework, TrainingPlan

PER_S = 1e12
"""FLOPs of a second of computation, bytes of a second of communication."""
BLOCKING = Framework(overlap_dp=True, overlap_tp=False, overlap_pp=False)
OVERLAPPING = Framework(overlap_dp=True, overlap_tp=True, overlap_pp=True)


def by_hand(op: Op) -> Priced:
    """What the operator says of itself."""
    amount = op.payload_bytes if op.stream == "comm" else op.flops
    return Priced(seconds=amount / PER_S, provenance="analytic", log_std=0.1, source="hand")


def computes(number: int, seconds: float, *deps: int, weight: bool = False, name: str = "aten.mm") -> Op:
    return Op(id=number, name=name, kind="gemm", deps=deps, flops=seconds * PER_S, weight_gradient=weight)


def talks(number: int, seconds: float, axis: str, collective: str, *deps: int, name: str = "c10d") -> Op:
    return Op(
        id=number, name=f"{name}.{collective}", kind="collective", stream="comm", deps=deps, collective=collective,
        payload_bytes=seconds * PER_S, axis=axis,  # type: ignore[arg-type]
    )  # fmt: skip


def plan_of(
    *, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, micro_batches: int = 1, **more: object
) -> TrainingPlan:  # fmt: skip
    return TrainingPlan(
        devices=tp * pp * dp * cp, tp=tp, pp=pp, dp=dp, cp=cp, micro_batch=1, global_batch=dp * micro_batches, sequence=128,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def plain(plan: TrainingPlan, *, layers: int, forward_s: float, backward_s: float, boundary_s: float = 0.0) -> Trace:
    """Layers of one product each way; embedding and head take nothing worth the name (a tick)."""
    ends = Part(name="end", forward=(computes(0, 1e-12),), backward=(computes(0, 1e-12),))
    layer = Part(
        name="layer",
        forward=(computes(0, forward_s),),
        backward=(computes(0, backward_s / 2), computes(1, backward_s / 2, 0, weight=True)),
        boundary_bytes=boundary_s * PER_S,
    )
    return Trace(
        model="plain", plan=plan, parts={"embedding": ends, "head": ends, "layer": layer}, layers=("layer",) * layers
    )


def nothing_but(plan: TrainingPlan, forward: Sequence[Op], backward: Sequence[Op], *, layers: int = 1) -> Trace:
    """Layers with these operators between ends of a tick."""
    ends = Part(name="end", forward=(computes(0, 1e-12),), backward=(computes(0, 1e-12),))
    layer = Part(name="layer", forward=tuple(forward), backward=tuple(backward))
    return Trace(
        model="given", plan=plan, parts={"embedding": ends, "head": ends, "layer": layer}, layers=("layer",) * layers
    )


def rich(plan: TrainingPlan, *, layers: int = 4, unit_s: float = 1e-3, comm: float = 1.0) -> Trace:
    """Layers with tensor-, data- and expert-parallel communication as far as the plan has it, an update and a norm.

    `unit_s`: seconds of a product; `comm`: scale of all communication.
    """

    def listed(steps: Sequence[tuple[str, float, str, str, bool]], *, chain: bool = True) -> tuple[Op, ...]:
        ops: list[Op] = []
        for what, amount, axis, collective, weight in steps:
            deps = (len(ops) - 1,) if ops and chain else ()
            if what == "compute":
                ops.append(computes(len(ops), amount * unit_s, *deps, weight=weight))
            elif getattr(plan, axis) * (plan.cp if axis == "dp" else 1) > 1:
                needs = () if collective == "all_gather" and axis == "dp" else deps
                ops.append(talks(len(ops), amount * unit_s * comm, axis, collective, *needs))
        return tuple(ops)

    gather = ("comm", 0.4, "dp", "all_gather", False)
    forward = [gather] if plan.shards else []
    forward += [
        ("compute", 1.0, "", "", False), ("comm", 0.3, "tp", "all_reduce", False), ("comm", 0.2, "ep", "alltoall", False),
        ("compute", 0.7, "", "", False), ("comm", 0.3, "tp", "all_reduce", False),
    ]  # fmt: skip
    backward = [gather] if plan.shards == 3 else []
    backward += [
        ("compute", 1.1, "", "", False), ("comm", 0.3, "tp", "all_reduce", False), ("compute", 0.9, "", "", True),
        ("compute", 0.8, "", "", True), ("comm", 0.6, "dp", "reduce_scatter" if plan.shards else "all_reduce", True),
    ]  # fmt: skip
    layer = Part(
        name="layer", forward=listed(forward), backward=listed(backward), optimizer=(computes(0, 0.2 * unit_s),),
        boundary_bytes=0.15 * unit_s * comm * PER_S * plan.tp,
    )  # fmt: skip
    wide = Part(
        name="wide", forward=listed([*forward, ("compute", 0.5, "", "", False)]), backward=listed(backward),
        optimizer=(computes(0, 0.3 * unit_s),), boundary_bytes=layer.boundary_bytes,
    )  # fmt: skip
    embedding = Part(name="embedding", forward=(computes(0, 0.05 * unit_s),), backward=(computes(0, 0.1 * unit_s),))
    head = Part(
        name="head", forward=(computes(0, 0.6 * unit_s),), backward=(computes(0, 1.1 * unit_s),),
        optimizer=(computes(0, 0.1 * unit_s),), boundary_bytes=layer.boundary_bytes,
    )  # fmt: skip
    step = [computes(0, 0.1 * unit_s)]
    if plan.pp > 1:
        step.append(talks(1, 0.05 * unit_s * comm, "pp", "all_reduce", 0))
    step.append(computes(len(step), 0.1 * unit_s, len(step) - 1))
    names = tuple("wide" if index % 3 == 2 else "layer" for index in range(layers))
    return Trace(
        model="rich", plan=plan, parts={"embedding": embedding, "head": head, "layer": layer, "wide": wide}, layers=names,
        step=tuple(step),
    )  # fmt: skip
