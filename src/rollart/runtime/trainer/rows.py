"""Rows: a micro-batch of samples as padded tensors.

Owns the step from opaque payloads to what the model reads. Invariants: what is trained is exactly what the engine read and
sampled (ids are copied, never made again); only sampled tokens are trained, each predicted from everything before it;
padding is never looked at, because rows are padded on the right and attention is causal. A micro-batch without samples
is one row of padding that trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.config.schema import Algorithm, SamplingConfig
from rollart.core.errors import TrainerError
from rollart.core.types import Sample, TrajId
from rollart.learn.credit import token_weight
from rollart.runtime.payload import TokenPayload

PAD_ID = 0
"""Any id would do: no trained position ever attends to padding."""

SampleKey = tuple[TrajId, int]
"""Trajectory and segment: names a sample in whatever split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence with the places to train."""

    ids: NDArray[np.int64]
    """(read,) every token before the last trained one; what follows it is not needed."""
    positions: NDArray[np.int64]
    """(trained,) index of the token from which each trained token is predicted; ascending."""
    targets: NDArray[np.int64]
    """(trained,) the trained tokens."""
    behaviour: NDArray[np.float32]
    """(trained,) log-probability under which each was drawn, after truncation; NaN where it is not known."""
    log_kept: NDArray[np.float32] | None = None
    """(trained,) logarithm of the mass that truncation kept, which `behaviour` was divided by; None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """A sample as it travels to its training rank: what the forward pass and the loss read, and nothing else."""

    key: SampleKey
    row: Row
    advantage: float
    token_weight: float
    """Of each trained token in the loss (`learn.credit`)."""
    share: float
    """Of its trajectory; sums to 1 over a trajectory's samples."""
    fresh: NDArray[np.bool_] | None = None
    """(trained,) false for tokens that are too old for the loss; None: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A padded micro-batch: B rows of T tokens, at most S trained tokens in a row, N trained tokens in all."""

    ids: torch.Tensor
    """(B, T) int64."""
    lengths: torch.Tensor
    """(B,) int64, tokens of each row without padding; 0 for a row of padding."""
    positions: torch.Tensor
    """(B, S) int64; 0 where `valid` is false."""
    valid: torch.Tensor
    """(B, S) bool; N of them true. All (N,) tensors are in the row-major order of `valid`."""
    targets: torch.Tensor
    """(N,) int64."""
    behaviour: torch.Tensor
    """(N,) float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What the loss needs beside the rows, per trained token, (N,) float32 each."""

    advantages: torch.Tensor
    weights: torch.Tensor
    old: torch.Tensor | None
    """`old_logprobs`; None: they were not recomputed."""
    fresh: torch.Tensor | None = None
    """bool; false for tokens that are too old for the loss; None: none is."""
    reference: torch.Tensor | None = None
    """Log-probabilities under the reference; set where the loss has a KL term."""
    move: torch.Tensor | None = None
    """Mean of present - old over the token's whole trajectory; set where `sequences.needed`."""
    log_kept: torch.Tensor | None = None
    """Logarithm of the mass that truncated sampling kept; None: all of it."""
    gap: torch.Tensor | None = None
    """Mean of old - behaviour over the token's whole trajectory; set where `sequences.needed`."""


def loss_rows(
    samples: Sequence[Sample], algorithm: Algorithm, sampling: SamplingConfig, *, longest: int = 1
) -> list[LossRow]:
    """Read all samples of a call. `longest`: tokens of the longest response, for `normalize=constant`.

    Raises TrainerError naming the trajectory that lacks what the loss needs.
    """
    need_behaviour = algorithm.needs_behaviour
    return [
        LossRow(
            key=(sample.traj, sample.index),
            row=row_of(sample, need_behaviour=need_behaviour, truncates=sampling.truncates),
            advantage=sample.advantage,
            token_weight=token_weight(sample, algorithm.loss.normalize, longest),
            share=sample.weight,
            fresh=_fresh(sample),
        )
        for sample in samples
    ]


def row_of(sample: Sample, *, need_behaviour: bool, truncates: bool) -> Row:
    """Read one sample's payloads.

    `need_behaviour`: the loss cannot do without the engine's log-probabilities. `truncates`: sampling was truncated, so
    they are not the ones that were drawn from without `log_kept_mass`.
    Raises TrainerError naming the trajectory when something that is needed is missing or does not fit.
    """
    ids: list[NDArray[np.int32]] = []
    trained: list[NDArray[np.int64]] = []
    behaviour: list[NDArray[np.float32]] = []
    kept: list[NDArray[np.float32] | None] = []
    start = 0
    for piece in sample.segment.pieces:
        payload = piece.payload
        if not isinstance(payload, TokenPayload) or len(payload.ids) != piece.n_tokens:
            raise TrainerError(f"{_name(sample)}: a piece of {piece.n_tokens} tokens does not carry their ids")
        ids.append(payload.ids)
        first = max(0, sample.segment.shared_tokens - start)
        if piece.sampled and first < piece.n_tokens:
            trained.append(np.arange(start + first, start + piece.n_tokens))
            behaviour.append(_behaviour(sample, payload, need_behaviour=need_behaviour, truncates=truncates)[first:])
            kept.append(None if payload.log_kept_mass is None else payload.log_kept_mass[first:])
        start += piece.n_tokens
    if not trained:
        raise TrainerError(f"{_name(sample)} has no token to train; such segments give no sample")
    places = np.concatenate(trained)
    if places[0] == 0:
        raise TrainerError(f"{_name(sample)} begins with a sampled token; there is nothing to predict it from")
    all_ids = np.concatenate(ids).astype(np.int64)
    return Row(
        ids=all_ids[: places[-1]],
        positions=places - 1,
        targets=all_ids[places],
        behaviour=np.concatenate(behaviour),
        log_kept=_joined(kept, [len(part) for part in behaviour]),
    )


def pad(rows: Sequence[Row], *, min_rows: int = 1, min_tokens: int = 1, min_trained: int = 1) -> Rows:
    """Stack rows, padded on the right. Padding beyond the given minima is only what the longest row asks for."""
    n_rows = max([min_rows, len(rows)])
    ids = np.full((n_rows, max([min_tokens, *(len(row.ids) for row in rows)])), PAD_ID, np.int64)
    positions = np.zeros((n_rows, max([min_trained, *(len(row.positions) for row in rows)])), np.int64)
    valid, lengths = np.zeros(positions.shape, np.bool_), np.zeros(n_rows, np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        lengths[place] = len(row.ids)
        positions[place, : len(row.positions)] = row.positions
        valid[place, : len(row.positions)] = True
    return Rows(
        ids=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths),
        positions=torch.from_numpy(positions),
        valid=torch.from_numpy(valid),
        targets=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(row.targets for row in rows)])),
        behaviour=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *(row.behaviour for row in rows)])),
    )


def loss_terms(rows: Sequence[LossRow], old: Mapping[SampleKey, NDArray[np.float32]]) -> LossTerms:
    """Spread advantage and weight of each row over its trained tokens, and look up the old log-probabilities.

    Raises TrainerError when only some rows have old log-probabilities: their ratios would mean two different things.
    """
    known = [one.key in old for one in rows]
    if any(known) and not all(known):
        traj, index = rows[known.index(False)].key
        raise TrainerError(
            f"trajectory {traj} segment {index} has no old log-probabilities, others of its step have; recompute them for "
            "all samples of a batch or for none"
        )
    counts = [len(one.row.targets) for one in rows]
    kept = _joined([one.row.log_kept for one in rows], counts)
    return LossTerms(
        advantages=_spread([one.advantage for one in rows], counts),
        weights=_spread([one.token_weight for one in rows], counts),
        old=torch.from_numpy(np.concatenate([old[one.key] for one in rows])) if any(known) else None,
        fresh=_all_fresh(rows),
        log_kept=None if kept is None else torch.from_numpy(kept),
    )


def _spread(values: Sequence[float], counts: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.array(values, np.float32), counts))


def _fresh(sample: Sample) -> NDArray[np.bool_] | None:
    """Which trained tokens were sampled under `min_version` or a newer one; None: all."""
    fresh: list[NDArray[np.bool_]] = []
    start = 0
    for piece in sample.segment.pieces:
        if piece.spans:
            by_span = [span.version >= sample.min_version for span in piece.spans]
            tokens = np.repeat(by_span, [span.n_tokens for span in piece.spans])
            fresh.append(tokens[max(0, sample.segment.shared_tokens - start) :])
        start += piece.n_tokens
    together = np.concatenate([np.empty(0, np.bool_), *fresh])
    return None if together.all() else together


def _all_fresh(rows: Sequence[LossRow]) -> torch.Tensor | None:
    if all(one.fresh is None for one in rows):
        return None
    parts = [np.ones(len(one.row.targets), np.bool_) if one.fresh is None else one.fresh for one in rows]
    return torch.from_numpy(np.concatenate(parts))


def _joined(parts: Sequence[NDArray[np.float32] | None], counts: Sequence[int]) -> NDArray[np.float32] | None:
    """Logarithms of kept mass one after another, where `counts` says how long each part is; None: nothing was cut off."""
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(n, np.float32) if part is None else part for part, n in zip(parts, counts, strict=True)]
    )


def _behaviour(sample: Sample, payload: TokenPayload, *, need_behaviour: bool, truncates: bool) -> NDArray[np.float32]:
    """Log-probability of each token under the distribution that it was drawn from: the kept mass is divided out."""
    n_tokens = len(payload.ids)
    if payload.logprobs is None:
        if need_behaviour:
            raise TrainerError(
                f"{_name(sample)}: {n_tokens} sampled tokens lack their rollout log-probabilities, which the correction "
                "needs; let the engine return them, or train synchronously with algorithm.correction.kind=none"
            )
        return np.full(n_tokens, np.nan, np.float32)
    if payload.log_kept_mass is None and truncates and need_behaviour:
        raise TrainerError(
            f"{_name(sample)}: sampling is truncated, but {n_tokens} tokens lack the mass that truncation kept; let the "
            "engine return log_kept_mass"
        )
    behaviour = payload.logprobs if payload.log_kept_mass is None else payload.logprobs - payload.log_kept_mass
    if behaviour.shape != (n_tokens,):
        raise TrainerError(
            f"{_name(sample)}: {n_tokens} sampled tokens with log-probabilities of shape {behaviour.shape}"
        )
    return behaviour


def _name(sample: Sample) -> str:
    return f"trajectory {sample.traj} segment {sample.index}"
