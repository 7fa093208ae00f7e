"""One training rank against a step worked out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_samples import (
    MODEL,
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
    split_in,
    train_step,
    trainer_rank,
    written,
)

from rollart.config.schema import (
    Algorithm,
    NoCorrection,
    Optimizer,
    PPOClip,
    SamplingConfig,
    TrainerConfig,
    TruncatedIS,
)
from rollart.core.errors import TrainerError
from rollart.learn.credit import total_weight
from rollart.runtime.models import named_weights
from rollart.runtime.trainer.rank import Publication, TrainerRank
from rollart.runtime.weights import fingerprint, unpack

FROZEN = Optimizer(lr=0.0)
LAYOUT = {"micro_batches", "computed_tokens"}
"""Metrics that say how a step was cut, and so depend on it."""


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name].double(), tensor.double(), atol=share * float(tensor.abs().max())), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("normalize", ["trajectory", "sequence", "token"])
def test_the_gradient_is_the_same_for_1_2_4_and_8_micro_batches_and_equals_float64(family: Any, normalize: Any) -> None:
    """Field case 19: micro-batches of 1, 2, 4 and 8."""
    spec = spec_with(
        model=MODEL.model_copy(update={"family": family}),
        algorithm=Algorithm(loss=PPOClip(normalize=normalize), correction=TruncatedIS(kind="tis", cap=1.5)),
        sampling=SamplingConfig(temperature=0.8),
        optimizer=FROZEN,
    )
    samples = [
        part for number, one in enumerate(random_samples(12)) for part in (cut(one, 2) if number % 3 == 0 else [one])
    ]
    reference = reference_step(spec, samples)
    metrics: dict[str, float] = {}
    with trainer_rank(spec) as rank:
        for n_micro_batches in (1, 2, 4, 8):
            found = gradients(rank, *split_in(samples, n_micro_batches))
            close({name: one / reference.total_weight for name, one in found.items()}, reference.gradients)
            now = {name: value for name, value in rank.finish().items() if name not in LAYOUT}
            assert now == pytest.approx(metrics or now, rel=1e-5)
            metrics = now
    assert metrics["loss"] == pytest.approx(reference.loss, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(reference.entropy, rel=1e-6)
    assert metrics["trajectories"] == pytest.approx(12)
    exact_norm = float(sum(one.square().sum() for one in reference.gradients.values())) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(exact_norm, rel=1e-5)


@pytest.mark.parametrize("normalize", ["trajectory", "token"])
def test_splitting_a_trajectory_into_segments_changes_no_gradient_and_no_metric(normalize: Any) -> None:
    spec = spec_with(algorithm=Algorithm(loss=PPOClip(normalize=normalize)), optimizer=FROZEN)
    samples = random_samples(5, seed=3)
    split = [part for one in samples for part in cut(one, 2, 4)]
    assert len(split) > len(samples)
    with trainer_rank(spec) as rank:
        whole, whole_metrics = gradients(rank, samples), rank.finish()
        parts, parts_metrics = gradients(rank, split[::2], split[1::2]), rank.finish()
    close(parts, whole)
    for name in whole_metrics.keys() - LAYOUT:
        assert parts_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-5), name


def test_steps_equal_those_of_adamw_in_float64_with_clipping_warm_up_and_decay() -> None:
    optimizer = Optimizer(lr=0.02, grad_clip=0.5, warmup_steps=2, weight_decay=0.1, decay="linear")
    spec = spec_with(optimizer=optimizer)
    model = reference_model(spec)
    exact = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
    )
    norms = []
    with trainer_rank(spec) as rank:
        for step in range(4):
            samples = random_samples(6, seed=step)
            metrics = train_step(rank, samples[:2], samples[2:])
            reference_step(spec, samples, model)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.grad_clip))
            exact.param_groups[0]["lr"] = 0.02 * [1 / 2, 1, 1, 5 / 6][step]  # of 8 steps in all
            exact.step()
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
            assert metrics["lr"] == pytest.approx(exact.param_groups[0]["lr"])
            assert metrics["weights_changed"] == 1.0
            norms.append(norm)
        found = rank.publish(0)
    assert found is not None
    assert max(norms) > optimizer.grad_clip, "clipping was not put to the test"
    close(unpack(found.index, found.buckets), named_weights(model), share=1e-3)


def test_begin_again_discards_an_unfinished_step() -> None:
    samples = random_samples(8)
    with trainer_rank() as rank:
        clean = gradients(rank, samples)
        rank.begin(0, total_weight=None)
        rank.accumulate(rows_of(rank, [random_samples(8, seed=9)]))
        again = gradients(rank, samples)
        assert rank.finish()["trajectories"] == 8
    close(again, clean, share=1e-7)


def test_accumulate_may_be_called_many_times_a_step() -> None:
    samples = random_samples(8)
    with trainer_rank(spec_with(optimizer=FROZEN)) as rank:
        at_once = train_step(rank, samples)
        rank.begin(1, total_weight=total_weight(samples))
        for one in samples:
            assert rank.accumulate(rows_of(rank, [[one]]))["trajectories"] == 1
        one_by_one = rank.finish()
    for name in at_once.keys() - LAYOUT:
        assert one_by_one[name] == pytest.approx(at_once[name], rel=1e-5), name


def test_a_step_outside_its_order_and_an_empty_one_are_refused() -> None:
    with trainer_rank() as rank:
        with pytest.raises(TrainerError, match="call begin first"):
            rank.accumulate(rows_of(rank, [random_samples(1)]))
        with pytest.raises(TrainerError, match="call begin first"):
            rank.finish()
        rank.begin(3, total_weight=None)
        rank.accumulate([[]])
        with pytest.raises(TrainerError, match="step 3 has no sample"):
            rank.finish()


def test_lost_and_repeated_samples_are_noticed_when_the_step_was_announced() -> None:
    samples = random_samples(4)
    with trainer_rank() as rank:
        for sent in (samples[:3], [*samples, samples[0]]):
            rank.begin(5, total_weight=total_weight(samples))
            rank.accumulate(rows_of(rank, [sent]))
            with pytest.raises(TrainerError, match="announced with 4 trajectories and got"):
                rank.finish()
        rank.begin(5, total_weight=total_weight(samples))
        rank.accumulate(rows_of(rank, [samples]))
        assert rank.finish()["trajectories"] == 4


@pytest.mark.parametrize(("lr", "changed"), [(0.0, 0.0), (1e-30, 0.0), (1e-3, 1.0)])
def test_unchanged_master_weights_are_reported(lr: float, changed: float) -> None:
    """A learning rate that fp32 rounds away moves nothing although gradient and rate are above 0: control stops on it."""
    with trainer_rank(spec_with(optimizer=Optimizer(lr=lr))) as rank:
        metrics = train_step(rank, random_samples(4))
    assert metrics["grad_norm"] > 0
    assert (metrics["lr"], metrics["weights_changed"]) == (lr, changed)


def test_a_gradient_that_is_not_finite_raises_and_leaves_the_weights_as_they_were() -> None:
    broken = [replace(one, advantage=float("inf")) for one in random_samples(2)]
    with trainer_rank() as rank:
        before = digest_of(rank, 0)
        with pytest.raises(TrainerError, match="gradient norm of optimiser step 1 is"):
            train_step(rank, broken)
        assert digest_of(rank, 1) == before
        assert train_step(rank, random_samples(2))["weights_changed"] == 1


def digest_of(rank: TrainerRank, version: int) -> str:
    return published(rank, version).digest


def published(rank: TrainerRank, version: int) -> Publication:
    offer = rank.publish(version)
    assert offer is not None
    return offer


def test_zero_advantages_train_nothing_and_are_counted() -> None:
    samples = [replace(one, advantage=0.0) for one in random_samples(4)]
    with trainer_rank() as rank:
        metrics = train_step(rank, samples)
    assert metrics["grad_norm"] == 0
    assert metrics["zero_advantage_frac"] == 1
    assert metrics["weights_changed"] == 0


def test_recomputed_logprobs_are_the_old_ones_until_the_next_publish() -> None:
    """Two optimiser steps on one batch: the second one's ratios are against the policy before the first."""
    spec = spec_with(optimizer=Optimizer(lr=0.05), algorithm=Algorithm(correction=TruncatedIS(kind="tis", cap=1.5)))
    samples = random_samples(6)
    model = reference_model(spec)
    with trainer_rank(spec) as rank:
        kept = rank.logprobs(rows_of(rank, split_in(samples, 2)))
        old = [kept[one.traj, one.index].astype(np.float64) for one in samples]
        first_reference = reference_step(spec, samples, model, old)
        assert np.concatenate(old) == pytest.approx(np.concatenate(first_reference.logprobs), abs=1e-5)
        first = train_step(rank, samples[:3], samples[3:])
        assert first["ratio_mean"] == pytest.approx(1, abs=1e-5)

        with torch.no_grad():
            for name, weight in rank.weights.items():
                model.get_parameter(name).copy_(weight.full_tensor())
        second_reference = reference_step(spec, samples, model, old)
        second = train_step(rank, *split_in(samples, 3))
        assert second["loss"] == pytest.approx(second_reference.loss, abs=1e-5)
        assert abs(second["ratio_mean"] - 1) > 1e-3
        assert second["clip_frac"] > 0

        rank.publish(0)
        assert train_step(rank, samples)["ratio_mean"] == 1


def test_without_a_correction_the_engine_s_logprobs_change_nothing() -> None:
    spec = spec_with(algorithm=Algorithm(correction=NoCorrection(kind="none")), optimizer=FROZEN)
    with_them = sample(written([1, 2]), sampled([3, 4], [-9.0, -0.1]))
    without = sample(written([1, 2]), sampled([3, 4], None))
    with trainer_rank(spec) as rank:
        one, other = gradients(rank, [with_them]), gradients(rank, [without])
    close(one, other, share=1e-7)


@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_after_each_of_three_steps_what_is_published_is_what_the_trainer_holds(bucket_bytes: int) -> None:
    spec = spec_with(trainer=TrainerConfig(bucket_bytes=bucket_bytes))
    digests = set()
    with trainer_rank(spec) as rank:
        for version in range(3):
            train_step(rank, random_samples(4, seed=version))
            offer = published(rank, version)
            served = unpack(offer.index, offer.buckets)
            assert fingerprint(served) == offer.digest
            assert fingerprint({name: weight.full_tensor() for name, weight in rank.weights.items()}) == offer.digest
            assert len(offer.buckets) == offer.index.n_buckets
            assert "lm_head.weight" not in served, "tied embeddings travel once"
            digests.add(offer.digest)
    assert len(digests) == 3


def test_published_weights_are_those_of_a_transformers_model_by_name_and_shape() -> None:
    spec = spec_with()
    model = reference_model(spec)
    with trainer_rank(spec) as rank:
        offer = published(rank, 0)
    served = unpack(offer.index, offer.buckets)
    close(served, named_weights(model), share=0)
    model.load_state_dict(served | {"lm_head.weight": served["model.embed_tokens.weight"]})


def test_a_version_number_is_never_reused() -> None:
    with trainer_rank() as rank:
        rank.publish(0)
        rank.publish(4)
        for version in (4, 3):
            with pytest.raises(TrainerError, match=f"version {version} is not above 4"):
                rank.publish(version)


def test_all_logprobs_of_a_long_row_are_right_at_the_edges_of_the_vocabulary() -> None:
    ids = [0, VOCAB - 1] * 30
    one = sample(written(ids[:1]), sampled(ids[1:], [-3.0] * 59))
    spec = spec_with()
    with trainer_rank(spec) as rank:
        found = rank.logprobs(rows_of(rank, [[one]]))
    assert found[one.traj, 0] == pytest.approx(reference_step(spec, [one]).logprobs[0], abs=1e-5)
