"""Which ranks take part in a derived or captured communication: how many, how far apart they stand, and on which links.

Owns the map from an operator's axis to a group of the plan; prices and shared links read it here. Invariant: the numbering is
that of `perf.train_comm` (tensor-parallel ranks innermost, then context, data, pipeline), so closed form and trace place a
group alike. Why: an operator knows its axis only, and the same trace is priced on many plans.
"""

from __future__ import annotations

from rollart.optrace.ops import Op
from rollart.perf.links import Fabric
from rollart.perf.train_comm import Group, group
from rollart.perf.train_plan import TrainingPlan

EXPERTS = ".experts"
"""Ends the name of a data-parallel operator over the replicas of expert weights, which are fewer than those of others."""
SEND = "derived.send"
"""Begins the name of a pipeline transfer; the two stages that it runs between follow, as `derived.send.0.1`."""


def expert_replicas(plan: TrainingPlan) -> int:
    """Ranks of a pipeline stage that hold the same experts: expert parallelism spans tensor-parallel ranks too."""
    return max(1, plan.dp * plan.cp * plan.tp // plan.ep)


def is_experts(op: Op) -> bool:
    """Whether a data-parallel operator is about the experts' parameters, which have a group of their own."""
    return op.axis == "dp" and op.name.endswith(EXPERTS)


def members(op: Op, plan: TrainingPlan) -> tuple[int, int]:
    """(ranks, stride in devices) of the group that `op` communicates in; (1, 1) for an operator that does not."""
    if op.axis == "dp":
        return (expert_replicas(plan), plan.ep) if is_experts(op) else (plan.dp * plan.cp, plan.tp)
    stage = plan.devices // plan.pp
    groups = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1),
        "pp": (2 if op.collective == "send_recv" else plan.pp, stage),
    }
    return groups.get(op.axis, (1, 1))


def placed(op: Op, plan: TrainingPlan, fabric: Fabric) -> Group:
    """The group of `op` on a fabric; of a transfer its two ends, one to a domain if it leaves one."""
    ranks, stride = members(op, plan)
    if op.collective != "send_recv":
        return group(ranks, stride, fabric)
    apart = crosses(op, plan, fabric.domain) if op.axis == "pp" else stride >= fabric.domain
    return Group(ranks=2, local=1 if apart else 2)


def send_name(stage: int, other: int) -> str:
    """Of a transfer between two stages, either way."""
    return f"{SEND}.{stage}.{other}"


def crosses(op: Op, plan: TrainingPlan, domain: int) -> bool:
    """Whether a pipeline transfer leaves a domain of `domain` devices on any rank of its stages: that rank decides, since the
    others wait for it. One that does not say between which stages it runs is taken for the worst of the plan.
    """
    width = plan.devices // plan.pp
    if width >= domain:
        return True
    said = op.name.removeprefix(f"{SEND}.").split(".")
    named = op.name.startswith(f"{SEND}.") and len(said) == 2
    pairs = [(int(said[0]), int(said[1]))] if named else [(stage, stage + 1) for stage in range(plan.pp - 1)]
    return any(
        (one * width + rank) // domain != (other * width + rank) // domain
        for one, other in pairs
        for rank in range(width)
    )
