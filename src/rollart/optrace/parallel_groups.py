"""Which ranks take part in a derived or captured communication: how many, and how far apart they stand.

Owns the map from an operator's axis to a group of the plan. Invariant: the numbering is that of `perf.train_comm`
(tensor-parallel ranks innermost, then context, data, pipeline), so closed form and trace place a group alike. Why: an
operator knows its axis only, and the same trace is priced on many plans.
"""

from __future__ import annotations

from rollart.optrace.ops import Op
from rollart.perf.train_plan import TrainingPlan

EXPERTS = ".experts"
"""Ends the name of a data-parallel operator over the replicas of expert weights, which are fewer than those of others."""


def expert_replicas(plan: TrainingPlan) -> int:
    """Ranks of a pipeline stage that hold the same experts: expert parallelism spans tensor-parallel ranks too."""
    return max(1, plan.dp * plan.cp * plan.tp // plan.ep)


def members(op: Op, plan: TrainingPlan) -> tuple[int, int]:
    """(ranks, stride in devices) of the group that `op` communicates in; (1, 1) for an operator that does not."""
    if op.axis == "dp":
        return (expert_replicas(plan), plan.ep) if op.name.endswith(EXPERTS) else (plan.dp * plan.cp, plan.tp)
    stage = plan.devices // plan.pp
    groups = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1),
        "pp": (2 if op.collective == "send_recv" else plan.pp, stage),
    }
    return groups.get(op.axis, (1, 1))
