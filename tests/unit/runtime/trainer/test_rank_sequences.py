"""Losses over whole trajectories, the reference of the KL term and constant normalisation, in a real training rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from naive_loss import Token, naive
from trainer_samples import (
    VOCAB,
    cut,
    gradients,
    random_samples,
    reference_model,
    reference_step,
    rows_of,
    sample,
    sampled,
    spec_with,
    train_step,
    trainer_rank,
    written,
)

from rollart.config.schema import (
    CISPO,
    GSPO,
    KL1,
    KL3,
    Algorithm,
    Decoupled,
    DrGRPO,
    GeometricReject,
    MaskedIS,
    MaxDigitEnv,
    NoCorrection,
    Optimizer,
    PPOClip,
    RunConfig,
    TaskConfig,
    TruncatedIS,
)
from rollart.core.errors import TrainerError
from rollart.core.types import Sample, Span, Tokens
from rollart.runtime.actors import InlineActors
from rollart.runtime.trainer.facade import RemoteTrainer
from rollart.runtime.trainer.rank import TrainerRank, spec_of
from rollart.runtime.trainer.rows import loss_rows

MOVING = Optimizer(lr=0.05)
TIS = TruncatedIS(kind="tis")
GSPO_ALGORITHM = Algorithm(
    loss=GSPO(kind="gspo", eps_clip_low=0.05, eps_clip_high=0.05),
    correction=TIS,
    reject=GeometricReject(kind="geometric", low=0.75, high=1.35),
    kl=KL3(kind="k3", coef=0.2),
)
LAYOUT = {"micro_batches", "computed_tokens"}


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name].double(), tensor.double(), atol=share * float(tensor.abs().max())), name


def weights_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {name: weight.full_tensor().detach().clone() for name, weight in rank.weights.items()}


def take_steps(rank: TrainerRank, micro_batches: Sequence[Sequence[Sample]]) -> tuple[Any, list[dict[str, float]]]:
    """Two steps on one batch, so that in the second the present policy is not the old one; its gradient and both metrics."""
    rank.logprobs(rows_of(rank, micro_batches))
    metrics = [train_step(rank, *micro_batches)]
    found = gradients(rank, *micro_batches)
    metrics.append(rank.finish())
    return found, metrics


@pytest.mark.parametrize(
    "algorithm",
    [
        GSPO_ALGORITHM,
        Algorithm(loss=CISPO(kind="cispo"), reject=GeometricReject(kind="geometric", low=0.75, high=1.35)),
        Algorithm(loss=Decoupled(kind="decoupled"), correction=TIS, kl=KL1(kind="k1", coef=0.1)),
    ],
    ids=lambda algorithm: str(algorithm.loss.kind),
)
def test_segments_of_a_trajectory_in_different_micro_batches_train_as_the_whole(algorithm: Algorithm) -> None:
    spec = spec_with(optimizer=MOVING, algorithm=algorithm)
    samples = random_samples(8, seed=4)
    parts = [part for one in samples for part in cut(one, 2, 4)]
    assert len(parts) > len(samples) + 3
    with trainer_rank(spec) as rank:
        whole, expected = take_steps(rank, [samples])
    with trainer_rank(spec) as rank:
        found, metrics = take_steps(rank, [parts[::3], parts[1::3], [], parts[2::3]])
    close(found, whole)
    for mine, theirs in zip(metrics, expected, strict=True):
        for name in mine.keys() - LAYOUT:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    if algorithm.reject.kind == "geometric":
        assert 0 < metrics[0]["rejected_trajectories"] < 8
    if algorithm.loss.kind == "gspo":
        assert 0 < metrics[1]["clip_frac"] < 1
        assert metrics[1]["reference_kl"] > 0


def test_a_step_of_gspo_with_rejection_and_a_kl_term_equals_plain_loops_in_float64() -> None:
    """Log-probabilities from a plain transformers model, the loss from loops; the second step of a batch."""
    spec = spec_with(optimizer=MOVING, algorithm=GSPO_ALGORITHM)
    samples = random_samples(8, seed=4)
    model = reference_model(spec)
    initial = reference_step(spec_with(), samples, model).logprobs
    with trainer_rank(spec) as rank:
        rank.logprobs(rows_of(rank, [samples]))
        train_step(rank, samples)
        with torch.no_grad():
            for name, weight in rank.weights.items():
                model.get_parameter(name).copy_(weight.full_tensor())
        present = reference_step(spec_with(), samples, model).logprobs
        rows = rows_of(rank, [samples])[0]
        found = train_step(rank, samples)
    tokens = [
        Token(
            traj=one.traj, now=float(now), old=float(old), behaviour=float(drawn), advantage=one.advantage,
            weight=1 / len(row.row.targets), reference=float(old),
        )
        for one, row, nows, olds in zip(samples, rows, present, initial, strict=True)
        for now, old, drawn in zip(nows, olds, row.row.behaviour, strict=True)
    ]  # fmt: skip
    expected = naive(tokens, GSPO_ALGORITHM)
    assert found["loss"] == pytest.approx(expected.loss / len(samples), abs=1e-5)
    assert found["rejected_tokens"] == expected.counts["rejected"] > 0


def test_half_a_trajectory_is_refused_with_its_name_and_the_way_out() -> None:
    with trainer_rank(spec_with(algorithm=GSPO_ALGORITHM)) as rank:
        parts = cut(random_samples(1, seed=3)[0], 2, 4)
        rank.begin(0, total_weight=None)
        with pytest.raises(TrainerError, match="hand over all of its segments together"):
            rank.accumulate(rows_of(rank, [parts[:1]]))


def test_the_only_update_of_a_batch_is_decoupled_ppo_without_a_pass_before_it() -> None:
    """What such a pass would give is what the update computes: the same gradient, and nothing clipped."""
    spec = spec_with(algorithm=Algorithm(loss=Decoupled(kind="decoupled"), correction=TIS))
    samples = random_samples(4)
    with trainer_rank(spec) as rank:
        rank.logprobs(rows_of(rank, [samples]))
        with_pass = gradients(rank, samples)
    with trainer_rank(spec) as rank:
        close(gradients(rank, samples), with_pass)
        assert rank.finish()["clip_frac"] == 0.0


def test_constant_normalisation_weighs_a_token_by_the_longest_response_and_divides_by_trajectories() -> None:
    """Dr.GRPO by hand: two trajectories of 3 tokens and 1, advantages 1 and -1, the longest response of 10 tokens."""
    algorithm = Algorithm(
        advantage=DrGRPO(kind="dr_grpo"), loss=PPOClip(normalize="constant"), correction=NoCorrection(kind="none")
    )
    spec = replace(spec_with(algorithm=algorithm, optimizer=Optimizer(lr=0.0)), longest_response=10)
    long = sample(written([1, 2]), sampled([3, 4, 5], [-3.0] * 3), traj="train/t/0/0/0")
    short = sample(written([1, 2]), sampled([6], [-3.0]), traj="train/t/0/0/1", advantage=-1.0)
    with trainer_rank(spec) as rank:
        rank.begin(0, total_weight=2.0)
        rank.accumulate([loss_rows([long, short], algorithm, spec.sampling, longest=10)])
        metrics = rank.finish()
        rank.begin(1, total_weight=2.0)
        for part in (short, *cut(long, 2)):
            rank.accumulate([loss_rows([part], algorithm, spec.sampling, longest=10)])
        split = rank.finish()
    # ratios are 1: (3 x -1 / 10 + 1 x 1 / 10) / 2
    assert metrics["loss"] == pytest.approx((-3 / 10 + 1 / 10) / 2, abs=1e-7)
    for name in metrics.keys() - LAYOUT:
        assert split[name] == pytest.approx(metrics[name], rel=1e-5), name


def test_the_trainer_divides_by_the_longest_response_of_the_configured_tasks() -> None:
    tasks = {"t": TaskConfig(env=MaxDigitEnv(kind="max_digit"), max_turns=5, max_tokens=4)}
    config = RunConfig(tasks=tasks, algorithm=Algorithm(loss=PPOClip(normalize="constant")))
    spec = spec_of(config, VOCAB)
    trainer = RemoteTrainer(spec, InlineActors(), [])
    ((rows,),) = pickle.loads(trainer._blobs([sample(written([1]), sampled([2, 3], [-1.0, -1.0]))])[0])
    assert rows.token_weight == 1 / 20


def test_tokens_older_than_the_mask_leave_the_loss_and_the_others_stay_as_they_were() -> None:
    """A turn that two versions sampled: its first two tokens are of version 3, its last of version 5."""
    made = sampled([3, 4, 5], [-3.0, -2.0, -1.0])
    spans = (Span(version=3, n_tokens=2), Span(version=5, n_tokens=1))
    one = sample(written([1, 2]), Tokens(n_tokens=3, spans=spans, payload=made.payload))
    spec = spec_with(optimizer=Optimizer(lr=0.0), algorithm=Algorithm(correction=NoCorrection(kind="none")))
    fresh = {version: loss_rows([replace(one, min_version=version)], spec.algorithm, spec.sampling)[0].fresh
             for version in (0, 3, 4, 6)}  # fmt: skip
    assert fresh[0] is None
    assert fresh[3] is None
    assert fresh[4] is not None
    assert fresh[6] is not None
    assert (fresh[4].tolist(), fresh[6].tolist()) == ([False, False, True], [False] * 3)
    with trainer_rank(spec) as rank:
        masked = gradients(rank, [replace(one, min_version=4)])
        metrics = rank.finish()
        # the last token alone, with the weight that it has among three
        last = replace(one, segment=replace(one.segment, shared_tokens=4), weight=1 / 3)
        alone = gradients(rank, [last])
    close(masked, alone)
    assert metrics["old_tokens"] == 2
    assert metrics["tokens"] == 3


def test_the_reference_is_the_policy_of_the_first_step_and_survives_a_checkpoint(tmp_path: Path) -> None:
    algorithm = Algorithm(kl=KL3(kind="k3", coef=0.1))
    spec = spec_with(optimizer=MOVING, algorithm=algorithm)
    samples, path = random_samples(6), str(tmp_path / "trainer.safetensors")
    with trainer_rank(spec) as rank:
        rank.publish(0)
        first = train_step(rank, samples)
        assert first["reference_kl"] == pytest.approx(0, abs=1e-9)
        before = weights_of(rank)
        rank.checkpoint(path, "save")
        second = train_step(rank, samples)
        assert second["reference_kl"] > 1e-6
        moved = weights_of(rank)
    with trainer_rank(spec) as rank:
        rank.checkpoint(path, "load")
        close(weights_of(rank), before, share=0)
        again = train_step(rank, samples)
        assert again["reference_kl"] == pytest.approx(second["reference_kl"], rel=1e-6)
        close(weights_of(rank), moved, share=1e-6)
    with trainer_rank(spec_with(optimizer=MOVING)) as rank:
        rank.checkpoint(path, "load")
        assert "reference_kl" not in train_step(rank, samples)


def test_a_failing_pass_under_the_reference_leaves_the_present_weights_in_place() -> None:
    with trainer_rank(spec_with(optimizer=MOVING, algorithm=Algorithm(kl=KL3(kind="k3")))) as rank:
        train_step(rank, random_samples(4))
        before = weights_of(rank)
        bad = rows_of(rank, [random_samples(1)])
        broken = replace(bad[0][0], row=replace(bad[0][0].row, ids=np.full(len(bad[0][0].row.ids), 10**6)))
        rank.begin(1, total_weight=None)
        with pytest.raises(IndexError):
            rank.accumulate([[broken]])
        close(weights_of(rank), before, share=0)


def test_masked_importance_sampling_counts_what_it_takes_out_of_a_step() -> None:
    spec = spec_with(
        optimizer=Optimizer(lr=0.0), algorithm=Algorithm(correction=MaskedIS(kind="masked", low=0.8, high=1.25))
    )
    with trainer_rank(spec) as rank:
        metrics = train_step(rank, random_samples(10))
    assert 0 < metrics["masked_tokens"] < metrics["tokens"]
    assert metrics["rejected_tokens"] == metrics["old_tokens"] == 0
