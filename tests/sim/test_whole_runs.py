"""Whole runs under random schedules, latencies and faults: the promises of the design hold in every event log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import failure
from rollart.core.seeds import rng
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, check, failing, random_env, simulate, trained


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    group_size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    staleness = draw(st.integers(0, 3))
    return {
        "steps": draw(st.integers(1, 5)),
        "group_size": group_size,
        "batch": group_size * groups,
        "steps_per_batch": draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0])),
        "max_staleness": staleness,
        "sync_order": draw(st.sampled_from(["early", "paper"])) if staleness else "early",
        "redundancy": draw(st.integers(0, 2)),
        "redundant_groups": draw(st.integers(0, 2)),
    }


@given(
    schedule=schedules(),
    seed=st.integers(0, 10**6),
    ratios=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=3),
    engines=st.integers(1, 3),
    failing_share=st.sampled_from([0.0, 0.1, 0.4]),
    speed=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=70)
def test_every_promise_holds_under_random_schedules_latencies_and_faults(
    schedule: dict[str, Any], seed: int, ratios: list[float], engines: int, failing_share: float, speed: float
) -> None:
    """Staleness within the bound, the ledger closed at every step, one end for each attempt and group, versions rising.

    `speed` is how fast the trainer is beside the rollout.
    """
    tasks = [a_task(f"task-{index}", ratio=ratio) for index, ratio in enumerate(ratios)]
    config = a_config(
        tasks, seed=seed, engines=engines, schedule=schedule,
        failure={"on_failure": {"kind": "retry", "max_retries": 1}, "give_up_after": 10_000},
    )  # fmt: skip
    lengths = lambda request: rng(seed, "length", *request.id).randint(1, request.max_tokens)  # noqa: E731
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefill_token_s=0.001, prefetch_s=0.7, apply_s=0.3, length=lengths),
        env=random_env(seed, fault=failing(failing_share, failure("env", "raised", "lost its way"), seed)),
        trainer=TrainerModel(accumulate_s=0.5 / speed, finish_s=2.0 / speed, publish_s=0.2),
    )
    check(simulate(config, tasks, cluster))


@pytest.mark.parametrize(
    ("max_staleness", "order"), [(0, "early"), *((n, order) for n in (1, 2, 3) for order in ("early", "paper"))]
)
def test_what_is_trained_is_within_the_staleness_bound_and_the_bound_is_used(max_staleness: int, order: str) -> None:
    tasks = [a_task()]
    config = a_config(tasks, schedule={"steps": 12, "max_staleness": max_staleness, "sync_order": order})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1),
        env=random_env(mean_s=1.0),
        trainer=TrainerModel(finish_s=3.0),
    )
    sim = simulate(config, tasks, cluster)
    check(sim)
    assert max(batch["staleness_max"] for batch in sim.of("batch_released")) == max_staleness


def test_groups_that_lost_a_member_are_trained_with_those_that_are_left() -> None:
    tasks = [a_task()]
    config = a_config(tasks, failure={"on_failure": {"kind": "drop"}, "give_up_after": 1000})
    cluster = SimCluster(env=random_env(fault=failing(0.3, failure("env", "raised", "a broken tool"))))
    sim = simulate(config, tasks, cluster)
    check(sim)
    sizes = {len(members) for members in trained(sim).values()}
    assert sizes <= {2, 3, 4}
    assert len(sizes) > 1
