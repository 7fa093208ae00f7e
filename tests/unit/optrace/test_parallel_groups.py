"""Groups of a plan: prices, shared links and rank classes mean the same ranks by the same operator."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from rollart.optrace.classes import EXPERTS as EXPERT_CLASSES
from rollart.optrace.classes import classes_of
from rollart.optrace.costs import Pricer
from rollart.optrace.ops import Op
from rollart.optrace.parallel_groups import EXPERTS, expert_replicas, is_experts, members, placed
from rollart.optrace.step_tasks import group_key
from rollart.perf.devices import device
from rollart.perf.links import fabric
from rollart.perf.train_calibration import calibration
from rollart.perf.train_plan import Framework, TrainingPlan

LINKS = fabric("H100")
OPS: dict[str, tuple[Any, str]] = {
    "tp": ("tp", "c10d.all_reduce"), "cp": ("cp", "derived.all_gather"), "dp": ("dp", "derived.all_reduce"),
    "ep": ("ep", "derived.alltoall"), EXPERT_CLASSES: ("dp", f"derived.all_reduce{EXPERTS}"), "pp": ("pp", "norm.all_reduce"),
}  # fmt: skip
GRID = [
    TrainingPlan(
        devices=tp * cp * dp * pp, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, micro_batch=1, global_batch=dp, sequence=64
    )
    for tp, cp, dp, pp, ep in product((1, 2, 4), (1, 2), (1, 2, 8), (1, 2), (1, 2, 4, 16))
    if (dp * cp * tp) % ep == 0
]


def operator(key: str) -> Op:
    axis, name = OPS[key]
    return Op(
        id=0, name=name, kind="collective", stream="comm", collective="all_reduce", axis=axis, payload_bytes=1e7
    )  # fmt: skip


@pytest.mark.parametrize("key", list(OPS))
def test_an_operator_has_the_ranks_of_its_classes_whoever_asks(key: str) -> None:
    op = operator(key)
    assert group_key(op) == key
    seen = set()
    for plan in GRID:
        ranks, stride = members(op, plan)
        if ranks == 1:
            continue
        priced = Pricer(device=device("H100"), fabric=LINKS, law=calibration()[0].law, framework=Framework(), plan=plan)
        where = priced.group_of(op)
        assert where == placed(op, plan, LINKS)
        for one in classes_of(plan, every_rank=True):
            met = one.partners[key]
            assert met == tuple(range(met[0], met[0] + ranks * stride, stride)), (plan, one.name)
            assert where.local == max(Counter(rank // LINKS.domain for rank in met).values())
            assert where.ranks == len(met)
        seen.add((ranks, stride))
    assert len(seen) > 1


def test_the_operators_of_experts_are_told_by_the_end_of_their_name() -> None:
    plan = TrainingPlan(devices=16, tp=2, dp=8, ep=4, micro_batch=1, global_batch=8, sequence=64)
    assert members(operator(EXPERT_CLASSES), plan) == (expert_replicas(plan), 4) == (4, 4)
    beside = Op(
        id=0, name="derived.all_reduce.of_expert_router", kind="collective", stream="comm", collective="all_reduce",
        axis="dp", payload_bytes=1.0,
    )  # fmt: skip
    assert not is_experts(beside)
    assert members(beside, plan) == (8, 2)
