"""Every task keeps its share of what is trained, though one is slow, fails a lot or loses its groups."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import failure
from rollart.core.seeds import rng
from rollart.core.types import Failure, TrajId
from rollart.sched.mixing import Mix
from rollart.sim.engine import EngineModel
from rollart.sim.envs import Call
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, check, random_env, simulate


def shares_trained(sim_batches: list[dict[str, int]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for quota in sim_batches:
        total.update(quota)
    return {task: n / total.total() for task, n in total.items()}


@pytest.mark.parametrize("on_failure", ["retry", "replace", "drop"])
def test_a_slow_task_and_a_failing_one_keep_their_shares(on_failure: str) -> None:
    tasks = [a_task("quick", ratio=2), a_task("slow", ratio=1), a_task("failing", ratio=1)]

    def latency(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        mean_s = 10.0 if "/slow/" in traj else 0.5
        return rng(0, "latency", traj, attempt, call, turn).expovariate(1 / mean_s)

    def fault(traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        unlucky = "/failing/" in traj and rng(0, "fault", traj, attempt).random() < 0.4
        return failure("env", "raised", "a flaky tool") if unlucky and call == "step" else None

    config = a_config(
        tasks, schedule={"steps": 10, "max_staleness": 2, "mix_window": 5},
        failure={"on_failure": {"kind": on_failure}, "give_up_after": 10_000},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(token_s=0.05, prefetch_s=0.1), env=random_env(latency_s=latency, fault=fault),
        trainer=TrainerModel(finish_s=1.0),
    )  # fmt: skip
    sim = simulate(config, tasks, cluster)
    check(sim)
    quotas = [batch["quota"] for batch in sim.of("batch_released")]
    for start in range(len(quotas) - config.schedule.mix_window + 1):
        window = quotas[start : start + config.schedule.mix_window]
        assert shares_trained(window) == pytest.approx({"quick": 0.5, "slow": 0.25, "failing": 0.25}, abs=0.05)
    if on_failure == "replace":
        dropped = Counter(row["task"] for row in sim.of("group_dropped", reason="env_failed"))
        assert dropped["failing"] > 10


@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0, 7.0]), min_size=1, max_size=5),
    groups_per_batch=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
    redundant=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=200)
def test_a_full_window_always_holds_the_next_batch(
    shares: list[float], groups_per_batch: int, max_staleness: int, redundant: int, seed: int
) -> None:
    """Whatever is dropped, and whenever it is replaced: otherwise the trainer would wait for a task that has no room."""
    mix = Mix({f"task-{index}": share for index, share in enumerate(shares)}, groups_per_batch)
    outstanding: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    chance, room = rng(seed, "drops"), (max_staleness + 1) * groups_per_batch + redundant

    def fill() -> None:
        while outstanding.total() < room:
            task = mix.next(counts)
            outstanding[task] += 1
            counts[task] += 1

    for batch in range(30):
        for _ in range(chance.randint(0, 2 * groups_per_batch)):
            fill()
            task = chance.choice(sorted(outstanding.elements()))
            outstanding[task] -= 1
            counts[task] -= 1
        fill()
        quota = Counter(mix.quota(batch))
        assert quota <= outstanding
        outstanding -= quota


@given(shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), groups_per_batch=st.integers(1, 10))
def test_what_is_trained_stays_near_the_shares(shares: list[float], groups_per_batch: int) -> None:
    wanted = {f"task-{index}": share / sum(shares) for index, share in enumerate(shares)}
    mix = Mix(dict(zip(wanted, shares, strict=True)), groups_per_batch)
    trained: Counter[str] = Counter()
    for batch in range(30):
        trained.update(mix.quota(batch))
        off = {task: abs(trained[task] - share * trained.total()) for task, share in wanted.items()}
        assert max(off.values()) <= max(1, len(shares) - 1) + 1e-9
