"""Samples with payloads, and the training step worked out in float64 from the definitions alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rollart.config.schema import Algorithm, Optimizer, SamplingConfig, ScratchModel, TrainerConfig
from rollart.core.types import Sample, Segment, Span, Tokens, TrajId
from rollart.learn.credit import loss_tokens
from rollart.runtime.models import build_model, hf_config
from rollart.runtime.payload import TokenPayload
from rollart.runtime.trainer.rank import TrainerRank, TrainerSpec
from rollart.runtime.trainer.rows import LossRow, loss_rows

VOCAB = 23
MODEL = ScratchModel(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)

torch.set_num_threads(1)


def spec_with(
    *,
    model: ScratchModel = MODEL,
    algorithm: Algorithm | None = None,
    optimizer: Optimizer | None = None,
    sampling: SamplingConfig | None = None,
    trainer: TrainerConfig | None = None,
    vocab: int = VOCAB,
) -> TrainerSpec:
    return TrainerSpec(
        model=model,
        vocab_size=vocab,
        seed=5,
        algorithm=algorithm or Algorithm(),
        optimizer=optimizer or Optimizer(),
        sampling=sampling or SamplingConfig(),
        trainer=trainer or TrainerConfig(),
        total_steps=8,
        timeout_s=60.0,
    )


@contextmanager
def trainer_rank(spec: TrainerSpec | None = None) -> Iterator[TrainerRank]:
    rank = TrainerRank(spec or spec_with())
    try:
        yield rank
    finally:
        rank.close()


def written(ids: Sequence[int]) -> Tokens:
    return Tokens(n_tokens=len(ids), payload=TokenPayload(ids=np.array(ids, np.int32)))


def sampled(
    ids: Sequence[int], logprobs: Sequence[float] | None, kept: Sequence[float] | None = None, version: int = 0
) -> Tokens:
    return Tokens(
        n_tokens=len(ids),
        spans=(Span(version=version, n_tokens=len(ids)),),
        payload=TokenPayload(
            ids=np.array(ids, np.int32),
            logprobs=None if logprobs is None else np.array(logprobs, np.float32),
            log_kept_mass=None if kept is None else np.array(kept, np.float32),
        ),
    )


def sample(
    *pieces: Tokens,
    traj: str = "train/t/0/0/0",
    advantage: float = 1.0,
    weight: float = 1.0,
    index: int = 0,
    shared: int = 0,
) -> Sample:
    segment = Segment(pieces=pieces, shared_tokens=shared, parent=0 if shared else None)
    return Sample(traj=TrajId(traj), index=index, task="t", segment=segment, advantage=advantage, weight=weight)


def random_samples(n: int, seed: int = 0, *, drift: float = 0.3) -> list[Sample]:
    """Multi-turn samples of unlike lengths; rollout log-probabilities `drift` around those of a uniform policy."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(n):
        pieces = []
        for _ in range(int(rng.integers(1, 4))):
            pieces.append(written(rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()))
            size = int(rng.integers(1, 4))
            logprobs = -math.log(VOCAB) + rng.normal(0, drift, size)
            pieces.append(sampled(rng.integers(0, VOCAB, size).tolist(), logprobs.tolist()))
        pieces.append(written([1, 2]))
        samples.append(sample(*pieces, traj=f"train/t/0/{number}/0", advantage=float(rng.normal())))
    return samples


def split_in(samples: Sequence[Sample], n_micro_batches: int) -> list[list[Sample]]:
    return [list(samples[start::n_micro_batches]) for start in range(n_micro_batches)]


def rows_of(rank: TrainerRank, micro_batches: Sequence[Sequence[Sample]]) -> list[list[LossRow]]:
    return [loss_rows(samples, rank.spec.algorithm, rank.spec.sampling) for samples in micro_batches]


def train_step(rank: TrainerRank, *micro_batches: Sequence[Sample]) -> dict[str, float]:
    rank.begin(0, total_weight=None)
    rank.accumulate(rows_of(rank, micro_batches))
    return rank.finish()


def gradients(rank: TrainerRank, *micro_batches: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Summed gradients before normalisation, whole; the step stays open."""
    rank.begin(0, total_weight=None)
    rank.accumulate(rows_of(rank, micro_batches))
    return {name: cast(DTensor, weight.grad).full_tensor().clone() for name, weight in rank.weights.items()}


@dataclass(frozen=True)
class Reference:
    """A step in float64."""

    loss: float
    gradients: dict[str, torch.Tensor]
    total_weight: float
    entropy: float
    logprobs: list[NDArray[np.float64]]


def reference_model(spec: TrainerSpec) -> torch.nn.Module:
    return build_model(hf_config(spec.model, spec.vocab_size), seed=spec.seed).double()


def reference_step(
    spec: TrainerSpec,
    samples: Sequence[Sample],
    model: torch.nn.Module | None = None,
    old: Sequence[NDArray[np.float64]] | None = None,
) -> Reference:
    """One sample, one token at a time, from full logits of the plain transformers model; no code of the trainer."""
    model = model or reference_model(spec)
    algorithm, clip = spec.algorithm, spec.algorithm.loss
    model.zero_grad()
    loss, total, entropy, n_tokens = torch.zeros((), dtype=torch.float64), 0.0, 0.0, 0
    all_logprobs = []
    for number, one in enumerate(samples):
        ids: list[int] = []
        behaviour: dict[int, tuple[float, float]] = {}
        for piece in one.segment.pieces:
            payload = piece.payload
            assert isinstance(payload, TokenPayload)
            for offset, token in enumerate(payload.ids.tolist()):
                if piece.sampled and len(ids) >= one.segment.shared_tokens:
                    assert payload.logprobs is not None
                    kept = 0.0 if payload.log_kept_mass is None else float(payload.log_kept_mass[offset])
                    behaviour[len(ids)] = float(payload.logprobs[offset]), kept
                ids.append(token)
        logits = model(torch.tensor([ids])).logits[0] / spec.sampling.temperature
        table = torch.log_softmax(logits, -1)
        mine = []
        for place, (position, (sampled_at, kept)) in enumerate(behaviour.items()):
            now = table[position - 1, ids[position]]
            mine.append(float(now.detach()))
            before = mine[-1] if old is None else float(old[number][place])
            if algorithm.correction.kind == "clip":
                before = sampled_at
            ratio = torch.exp(now - before)
            low, high = 1 - clip.eps_clip_low, 1 + clip.eps_clip_high
            term = torch.minimum(ratio * one.advantage, torch.clamp(ratio, low, high) * one.advantage)
            correction = algorithm.correction
            if correction.kind == "clip" and one.advantage < 0 and float(ratio.detach()) > correction.cap:
                term = torch.tensor(correction.cap * one.advantage)
            apart = math.exp(before - sampled_at + kept)
            tis = (
                min(correction.cap, apart) if correction.kind == "tis" else apart if correction.kind == "clip" else 1.0
            )
            weight = 1.0 if clip.normalize == "token" else one.weight / len(behaviour)
            loss = loss - weight * tis * term
            total += weight
            row = table[position - 1].detach()
            entropy -= float((row.exp() * row).sum())
            n_tokens += 1
        all_logprobs.append(np.array(mine))
    (loss / total).backward()  # type: ignore[no-untyped-call]
    return Reference(
        loss=float(loss.detach()) / total,
        gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        total_weight=total,
        entropy=entropy / n_tokens,
        logprobs=all_logprobs,
    )


def cut(one: Sample, *places: int) -> list[Sample]:
    """The same trajectory in several segments: each reads all before it and trains the tokens up to the next place."""
    pieces = one.segment.pieces
    whole = loss_tokens(one.segment)
    bounds = [0, *places, len(pieces)]
    parts = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        shared = sum(piece.n_tokens for piece in pieces[:start])
        segment = Segment(pieces=pieces[:stop], shared_tokens=shared, parent=index - 1 if index else None)
        if loss_tokens(segment):
            parts.append(replace(one, index=index, segment=segment, weight=one.weight * loss_tokens(segment) / whole))
    return parts
