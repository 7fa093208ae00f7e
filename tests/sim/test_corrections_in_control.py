"""What control does for a loss: masked tokens in the ledger, ages of tokens, recomputed log-probabilities, whole batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rollart.core.types import TrajId
from rollart.sim.engine import EngineModel
from rollart.sim.trainer import TrainerCall, TrainerMishap
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, check, random_env, simulate


def a_run(
    algorithm: dict[str, Any], *, masked_share: float = 0.0, calls: Counter[str] | None = None, **schedule: int
) -> SimRun:
    def count(trainer: str, call: TrainerCall, nth: int) -> TrainerMishap | None:
        if calls is not None:
            calls[call] += 1
        return None

    tasks = [a_task("a")]
    config = a_config(tasks, schedule={"steps": 4, **schedule}, algorithm=algorithm)
    cluster = SimCluster(
        engine=EngineModel(token_s=0.05), env=random_env(mean_s=0.5),
        trainer=TrainerModel(finish_s=2.0, masked_share=masked_share, fault=count),
    )  # fmt: skip
    return simulate(config, tasks, cluster)


@pytest.mark.parametrize("steps_per_batch", [1, 2])
def test_tokens_that_a_correction_took_out_are_masked_in_the_ledger_and_not_trained(steps_per_batch: int) -> None:
    sim = a_run({}, masked_share=0.25, steps_per_batch=steps_per_batch)
    check(sim)
    batches = sum(row["tokens"] for row in sim.of("batch_released"))
    last = sim.of("ledger")[-1]
    masked = last["dropped"]["masked"]
    assert 0.2 * batches < masked <= 0.25 * batches
    assert last["trained"] == batches - masked
    finished = sim.of("step_finished")
    assert sum(row["masked_tokens"] for row in finished) == masked
    assert sum(row["trained_tokens"] for row in finished) == last["trained"]


def test_nothing_is_masked_without_a_correction_that_masks() -> None:
    sim = a_run({})
    check(sim)
    assert "masked" not in sim.of("ledger")[-1]["dropped"]


def test_samples_carry_the_oldest_version_that_enters_the_loss_while_staleness_counts_all_tokens() -> None:
    sim = a_run({"mask_older_than": 0}, max_staleness=2)
    check(sim)
    steps = sim.cluster.trainers[-1].batches
    assert [{sample.min_version for sample in step} for step in steps] == [{0}, {1}, {2}, {3}]
    assert max(row["staleness_max"] for row in sim.of("batch_released")) >= 1, "counted before the mask"
    spans = [
        (span.version, sample.min_version)
        for step in steps for sample in step for piece in sample.segment.pieces for span in piece.spans
    ]  # fmt: skip
    assert any(version < oldest for version, oldest in spans), "there was something to mask"
    relaxed = a_run({"mask_older_than": 1}, max_staleness=2).cluster.trainers[-1].batches
    assert [{sample.min_version for sample in step} for step in relaxed] == [{0}, {0}, {1}, {2}]


@pytest.mark.parametrize(
    ("loss", "correction", "steps_per_batch", "wanted"),
    [
        ("ppo_clip", "tis", 1, 0), ("ppo_clip", "tis", 2, 4), ("decoupled", "tis", 1, 0), ("decoupled", "tis", 4, 4),
        ("gspo", "tis", 1, 0), ("gspo", "tis", 4, 4), ("ppo_clip", "clip", 4, 0),
    ],
)  # fmt: skip
def test_old_logprobs_are_recomputed_once_a_batch_where_they_may_differ(
    loss: str, correction: str, steps_per_batch: int, wanted: int
) -> None:
    calls: Counter[str] = Counter()
    sim = a_run(
        {"loss": {"kind": loss}, "correction": {"kind": correction}}, calls=calls, steps_per_batch=steps_per_batch
    )
    check(sim)
    assert calls["logprobs"] == wanted
    assert calls["finish"] == 4 * steps_per_batch


def test_an_advantage_over_the_batch_sees_the_whole_batch() -> None:
    """40 groups, more than control makes into samples at a time."""
    tasks = [a_task("a")]
    config = a_config(
        tasks, schedule={"steps": 2, "batch": 80, "group_size": 2},
        algorithm={"advantage": {"kind": "reinforce_pp", "baseline": "batch"}},
    )  # fmt: skip

    def reward(traj: TrajId, attempt: int) -> float:
        return float(traj.split("/")[3])

    sim = simulate(config, tasks, SimCluster(env=random_env(reward=reward)))
    check(sim)
    for step in sim.cluster.trainers[-1].batches:
        advantages = [sample.advantage for sample in step]
        assert sum(advantages) == pytest.approx(0, abs=1e-9)
        assert sum(a * a for a in advantages) / len(advantages) == pytest.approx(1)
