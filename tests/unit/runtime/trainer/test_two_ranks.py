"""Two training ranks over gloo, in processes of their own, against one rank here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from trainer_samples import cut, gradients, random_samples, rows_of, spec_with, trainer_rank

from rollart.config.schema import GSPO, KL3, Algorithm, GeometricReject, Optimizer, TrainerConfig
from rollart.core.types import Sample
from rollart.learn.batching import split
from rollart.runtime.trainer.rank import TrainerRank
from rollart.runtime.trainer.warm import Transcript, warm_start
from rollart.runtime.weights import unpack

JOIN_S = 120
MICRO_BATCH_TOKENS = 40
SAMPLES = 9
STEPS = 2


def spec_for(ranks: int) -> Any:
    return spec_with(
        trainer=TrainerConfig(ranks=ranks, micro_batch_tokens=MICRO_BATCH_TOKENS), optimizer=Optimizer(lr=0.01)
    )


def sequences_spec_for(ranks: int) -> Any:
    algorithm = Algorithm(
        loss=GSPO(kind="gspo", eps_clip_low=0.05, eps_clip_high=0.05),
        reject=GeometricReject(kind="geometric", low=0.75, high=1.35),
        kl=KL3(kind="k3", coef=0.2),
    )
    return spec_with(
        trainer=TrainerConfig(ranks=ranks, micro_batch_tokens=MICRO_BATCH_TOKENS),
        optimizer=Optimizer(lr=0.05),
        algorithm=algorithm,
    )


def share(samples: Sequence[Sample], rank: TrainerRank, *, uneven: bool = False) -> list[list[Sample]]:
    """The rank's micro-batches; `uneven`: rank 0 has all the samples and the others only empty micro-batches."""
    ranks = rank.spec.trainer.ranks
    if uneven:
        return [list(samples[::2]), list(samples[1::2])] if rank.rank == 0 else [[], []]
    lengths = [one.segment.n_tokens for one in samples]
    parts = split(lengths, ranks=ranks, micro_batch_tokens=MICRO_BATCH_TOKENS)
    return [[samples[index] for index in one] for one in parts[rank.rank]]


def run(rank: TrainerRank, folder: Path) -> dict[str, Any]:
    """The same calls whatever the number of ranks."""
    found: dict[str, Any] = {}
    transcripts = [Transcript(torch.arange(1, n).numpy(), (torch.arange(1, n) % 2 == 0).numpy()) for n in range(5, 15)]
    found["warm"] = warm_start(rank, transcripts, steps=3, batch=4, lr=1e-3, seed=0)["loss"]
    samples = random_samples(SAMPLES)
    found["uneven"] = gradients(rank, *share(samples, rank, uneven=True))
    found["gradients"] = gradients(rank, *share(samples, rank))
    found["metrics"] = [rank.finish()]
    # Old log-probabilities are computed in one split and used in another.
    found["old"] = rank.logprobs(rows_of(rank, share(samples[::-1], rank)))
    for step in range(STEPS):
        rank.begin(step, total_weight=float(SAMPLES))
        rank.accumulate(rows_of(rank, share(samples, rank)))
        found["metrics"].append(rank.finish())
    offer = rank.publish(3)
    found["weights"] = None if offer is None else unpack(offer.index, offer.buckets)
    found["digest"] = None if offer is None else offer.digest
    rank.checkpoint(str(folder / f"of-{rank.spec.trainer.ranks}.safetensors"), "save")
    return found


def run_sequences(rank: TrainerRank) -> dict[str, Any]:
    """Losses over whole trajectories, whose segments different ranks train, and a KL term."""
    samples = [part for one in random_samples(SAMPLES, seed=4) for part in cut(one, 2, 4)]
    found: dict[str, Any] = {"metrics": []}
    rank.logprobs(rows_of(rank, share(samples[::-1], rank)))
    for _ in range(STEPS):
        found["gradients"] = gradients(rank, *share(samples, rank))
        found["metrics"].append(rank.finish())
    return found


def work(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = TrainerRank(spec_for(2), rank=number, store=FileStore(str(folder / "store"), 2))
    try:
        sequences = run_sequences(TrainerRank(sequences_spec_for(2), rank=number))  # in the same group
        torch.save(run(rank, folder) | {"sequences": sequences}, folder / f"rank{number}.pt")
        rank.checkpoint(str(folder / "of-1.safetensors"), "load")
        offer = rank.publish(4)
        if offer is not None:
            (folder / "loaded-digest").write_text(offer.digest)
    finally:
        rank.close()


def same_step(of_two: Mapping[str, torch.Tensor], of_one: Mapping[str, torch.Tensor], *, share: float) -> None:
    for name, gradient in of_one.items():
        # Sharded training averages over the two ranks what one rank sums; `finish` takes that back.
        assert torch.allclose(of_two[name] * 2, gradient, atol=share * float(gradient.abs().max())), name


def same_metrics(of_two: Sequence[Mapping[str, float]], of_one: Sequence[Mapping[str, float]]) -> None:
    for mine, theirs in zip(of_one, of_two, strict=True):
        for name in mine.keys() - {"micro_batches", "computed_tokens"}:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Field case 19: split over ranks. Gradients, metrics, old log-probabilities, weights after steps, and
    checkpoints across different numbers of ranks."""
    with trainer_rank(spec_for(1)) as rank:
        one = run(rank, tmp_path)
    with trainer_rank(sequences_spec_for(1)) as rank:
        alone = run_sequences(rank)
    assert 0 < alone["metrics"][0]["rejected_trajectories"] < SAMPLES
    assert alone["metrics"][1]["clip_frac"] > 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(number, tmp_path)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_S)
        assert process.exitcode == 0, "a rank failed or did not end"
    ranks = [torch.load(tmp_path / f"rank{number}.pt", weights_only=False) for number in range(2)]

    for found in ranks:
        assert found["warm"] == pytest.approx(one["warm"], rel=1e-4)
        for split_in in ("gradients", "uneven"):
            same_step(found[split_in], one[split_in], share=2e-5)
        same_step(found["sequences"]["gradients"], alone["gradients"], share=1e-3)
        same_metrics(found["sequences"]["metrics"], alone["metrics"])
        assert found["old"].keys() == one["old"].keys()
        for key, logprobs in one["old"].items():
            assert found["old"][key] == pytest.approx(logprobs, abs=1e-4)
        same_metrics(found["metrics"], one["metrics"])
    assert ranks[1]["weights"] is None, "rank 0 alone offers what all have"
    for name, weight in one["weights"].items():
        assert torch.allclose(ranks[0]["weights"][name], weight, atol=1e-3), name

    assert (tmp_path / "loaded-digest").read_text() == one["digest"], "one rank's checkpoint, loaded by two"
    with trainer_rank(spec_for(1)) as rank:
        rank.checkpoint(str(tmp_path / "of-2.safetensors"), "load")
        offer = rank.publish(4)
    assert offer is not None
    assert offer.digest == ranks[0]["digest"], "two ranks' checkpoint, loaded by one"
