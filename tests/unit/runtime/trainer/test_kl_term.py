"""The KL term is on sampled tokens only, and in the loss only."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_samples import (
    VOCAB,
    gradients,
    random_samples,
    reference_step,
    rows_of,
    sample,
    sampled,
    spec_with,
    train_step,
    trainer_rank,
    written,
)

from rollart.config.schema import KL1, KL3, Algorithm, NoCorrection, Optimizer
from rollart.core.types import Sample, Segment, TaskInstance, Trajectory
from rollart.learn.advantages import build_samples

PLAIN = NoCorrection(kind="none")
PULL = Algorithm(kl=KL1(kind="k1", coef=0.5), correction=PLAIN)


def local(weight: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.to_local().detach()


def group(segment: Segment) -> list[Trajectory]:
    instance = TaskInstance(task="t", epoch=0, index=0, seed=0)
    return [
        Trajectory(
            id=instance.traj_id(member), attempt=0, group_id=instance.group_id, instance=instance, member=member,
            segments=(segment,), status="done", finish_cause="env_done", reward=float(member % 2),
        )
        for member in range(4)
    ]  # fmt: skip


def test_a_kl_term_on_tokens_of_the_environment_never_changes_a_return() -> None:
    """Field case 14: rewards and advantages are what they are without the term, whatever the environment wrote."""
    returns = []
    for algorithm in (Algorithm(correction=PLAIN), PULL):
        for n_written in (1, 50):
            turn = sample(written([1] * n_written), sampled([3, 4], [-3.0, -3.0]), written([2] * n_written)).segment
            returns.append([one.advantage for one in build_samples([group(turn)], algorithm, Random(0))])
    assert all(one == returns[0] == [-1.0, 1.0, -1.0, 1.0] for one in returns)


def test_the_kl_term_sums_over_sampled_tokens_and_no_others() -> None:
    """Field case 14: with advantages of 0 nothing but the term is left; it equals a sum over the sampled tokens alone, and
    what the environment wrote behind them changes no gradient and no metric."""
    rng = np.random.default_rng(1)
    drawn = sampled([3, 4], [-3.0, -3.0])
    turn = sampled([7], [-3.0])

    def made(behind: int) -> Sample:
        after = written(np.random.default_rng(behind).integers(0, VOCAB, behind).tolist())
        return sample(written([1, 2, 9]), drawn, written([5, 6, 5, 6]), turn, after, advantage=0.0)

    spec = spec_with(algorithm=PULL, optimizer=Optimizer(lr=0.05))
    initial = reference_step(spec_with(), [made(0)]).logprobs[0]
    with trainer_rank(spec) as rank:
        rank.begin(0, total_weight=None)  # the reference is kept here
        for weight in rank.weights.values():
            shard = local(weight)
            shard += 0.1 * shard.new_tensor(rng.normal(size=shard.shape))
        now = rank.logprobs(rows_of(rank, [[made(0)]]))[made(0).traj, 0]
        rank.publish(0)
        results = []
        for behind in (0, 1, 30):
            slopes = gradients(rank, [made(behind)])
            before = {name: local(weight).clone() for name, weight in rank.weights.items()}
            results.append((slopes, rank.finish()))
            for name, weight in rank.weights.items():
                local(weight).copy_(before[name])
            rank.reshard()
    for slopes, metrics in results:
        assert metrics["tokens"] == 3
        assert metrics["reference_kl"] == pytest.approx(float(np.mean(now - initial)), abs=1e-5)
        assert metrics["loss"] == pytest.approx(0.5 * float(np.mean(now - initial)), abs=1e-5)
        assert metrics["reference_kl"] == pytest.approx(results[0][1]["reference_kl"], rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-5)
        for name, slope in slopes.items():
            assert slope.numpy() == pytest.approx(results[0][0][name].numpy(), rel=1e-4, abs=1e-6)
    assert abs(results[0][1]["reference_kl"]) > 1e-3
    assert results[0][1]["grad_norm"] > 0


def test_a_stronger_kl_term_keeps_a_policy_nearer_to_where_it_began() -> None:
    distances = []
    for coef in (1e-6, 1.0, 30.0):
        algorithm = Algorithm(kl=KL3(kind="k3", coef=coef), correction=PLAIN)
        with trainer_rank(spec_with(algorithm=algorithm, optimizer=Optimizer(lr=0.02))) as rank:
            for _ in range(6):
                metrics = train_step(rank, random_samples(8, seed=2))
        distances.append(metrics["reference_kl"])
    assert distances[0] > 2 * distances[1] > 4 * distances[2] > 0
