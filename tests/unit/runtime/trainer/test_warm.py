"""The supervised warm start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trainer_samples import VOCAB, random_samples, reference_model, spec_with, train_step, trainer_rank

from rollart.config.schema import SamplingConfig, TrainerConfig
from rollart.core.errors import TrainerError
from rollart.runtime.trainer.warm import Transcript, warm_start


def transcript(ids: list[int], sampled: list[int]) -> Transcript:
    mask = np.zeros(len(ids), np.bool_)
    mask[sampled] = True
    return Transcript(np.array(ids), mask)


def test_masked_tokens_are_learned_and_others_are_not() -> None:
    """After 3 comes 4 (trained) and after 5 comes 6 (written): only the first is learned."""
    transcripts = [transcript([2, 3, 4, 5, 6], [2]), transcript([7, 3, 4], [2])]
    with trainer_rank(spec_with(sampling=SamplingConfig(temperature=0.5))) as rank:
        before = reference_model(rank.spec)
        done = warm_start(rank, transcripts, steps=40, batch=4, lr=1e-2, seed=0)
        offer = rank.publish(0)
    assert done["tokens"] == 40 * 4
    assert done["loss"] < 0.1 * math.log(VOCAB)
    assert offer is not None
    from rollart.runtime.weights import unpack

    after = reference_model(spec_with())
    weights = {name: tensor.double() for name, tensor in unpack(offer.index, offer.buckets).items()}
    after.load_state_dict(weights, strict=False)
    with torch.no_grad():
        probs = [model(torch.tensor([[2, 3, 4, 5]])).logits[0].softmax(-1) for model in (before, after)]
    assert probs[1][1, 4] > 0.9
    assert probs[1][3, 6] < 0.5
    assert probs[0][1, 4] < 0.5


def test_the_warm_start_leaves_no_moments_steps_or_versions_behind() -> None:
    """Its effect is in the weights alone: a step after it equals the step of a fresh trainer with the same weights."""
    transcripts = [transcript([2, 3, 4], [1, 2])]
    samples = random_samples(4)
    with trainer_rank() as rank:
        warm_start(rank, transcripts, steps=3, batch=2, lr=1e-3, seed=0)
        assert (rank.steps, rank.version) == (0, -1)
        warm = {name: weight.full_tensor().clone() for name, weight in rank.weights.items()}
        after = train_step(rank, samples)
        stepped = rank.publish(0)
    with trainer_rank() as fresh:
        with torch.no_grad():
            for name, weight in fresh.weights.items():
                weight.to_local().copy_(warm[name])
        assert train_step(fresh, samples) == after
        offer = fresh.publish(0)
    assert stepped is not None
    assert offer is not None
    assert stepped.digest == offer.digest


def test_micro_batches_change_no_warm_start() -> None:
    transcripts = [transcript(list(range(1, n)), list(range(2, n - 1, 2))) for n in range(5, 20)]
    found = []
    for tokens in (16, 4096):
        with trainer_rank(spec_with(trainer=TrainerConfig(micro_batch_tokens=tokens))) as rank:
            found.append(warm_start(rank, transcripts, steps=5, batch=8, lr=1e-3, seed=1))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["tokens"] == found[1]["tokens"]


def test_transcripts_without_a_sampled_token_are_refused() -> None:
    with trainer_rank() as rank:
        with pytest.raises(TrainerError, match="none of the 2 warm-start transcripts"):
            warm_start(rank, [transcript([1, 2], []), transcript([1, 2], [0])], steps=1, batch=1, lr=1e-3, seed=0)
        assert warm_start(rank, [], steps=0, batch=1, lr=1e-3, seed=0)["tokens"] == 0
