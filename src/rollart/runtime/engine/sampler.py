"""Drawing tokens: temperature, top-k, top-p, min-p for each row of a batch at once.

Invariant: a draw is a function of the row's logits, its sampling parameters and one uniform number, which is a hash of
(seed, position in the sequence); neighbours in the batch, the step and the number of draws before do not enter.
The inverse of the distribution function is taken in float64, so rare tokens keep their share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Parameters of n rows, arrays of shape (n,)."""

    uniform: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    temperature: Floats
    """1 for greedy rows: their log-probabilities are those at temperature 1."""
    truncates: NDArray[np.bool_]
    top_k: NDArray[np.int64]
    """0: no limit."""
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


def stream_key(seed: int) -> int:
    """The 64-bit key of a request's stream of uniforms."""
    z = (seed + GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK_64
    return z ^ (z >> 31)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) per row: splitmix64 of (key, position), its upper 52 bits."""
    z = keys + (positions.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    # 52 bits and a half: with 53 the largest value would round to 1 and fall past the last token.
    uniform: NDArray[np.float64] = ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return uniform


def draw(logits: Tensor, draws: Draws) -> tuple[NDArray[np.int64], Floats, Floats | None]:
    """Token ids, log-probabilities (after temperature, before truncation) and log kept mass, each (n,).

    Kept mass is None when no row truncates, and 0 (log of 1) for rows that do not. A row whose logits are not finite
    gets a log-probability that is not finite; its id is then meaningless.
    """
    device = logits.device
    logits = logits.float()
    if (draws.temperature != 1.0).any():
        logits = logits / torch.from_numpy(draws.temperature).to(device)[:, None]
    logprobs = logits.log_softmax(-1)
    if draws.greedy.all():
        tokens = logits.argmax(-1, keepdim=True)
    else:
        below = logprobs.exp().cumsum(-1, dtype=torch.float64)
        uniform = torch.from_numpy(draws.uniform).to(device)[:, None]
        tokens = torch.searchsorted(below, uniform * below[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
        if draws.greedy.any():
            greedy = torch.from_numpy(draws.greedy).to(device)[:, None]
            tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    log_kept = None
    if draws.truncates.any():
        log_kept = np.zeros(len(draws.uniform), np.float32)
        rows = np.flatnonzero(draws.truncates)
        index = torch.from_numpy(rows).to(device)
        chosen, kept = _draw_truncated(logprobs.index_select(0, index), draws, rows)
        tokens[index] = chosen
        log_kept[rows] = kept.cpu().numpy()
    return tokens[:, 0].cpu().numpy(), logprobs.gather(1, tokens)[:, 0].cpu().numpy(), log_kept


def _draw_truncated(logprobs: Tensor, draws: Draws, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
    """Tokens (n, 1) and log kept mass (n,) of rows that truncate.

    In the order of falling probability (ties by lower id) each limit keeps a prefix, and the shortest one is kept: the k most
    likely; of these the fewest that hold top_p of their mass; those of at least min_p times the likeliest.
    """
    device, vocab = logprobs.device, logprobs.shape[1]
    top_k = torch.from_numpy(np.where(draws.top_k[rows] > 0, np.minimum(draws.top_k[rows], vocab), vocab)).to(device)
    top_p = torch.from_numpy(draws.top_p[rows]).to(device)[:, None]
    min_p = torch.from_numpy(draws.min_p[rows]).to(device)[:, None]
    uniform = torch.from_numpy(draws.uniform[rows]).to(device)[:, None]
    ranked, ids = logprobs.sort(stable=True, dim=-1, descending=True)
    mass = ranked.double().exp_()
    below = mass.cumsum(-1)
    before = below - mass
    kept_by_p = (before < top_p * below.gather(1, top_k[:, None] - 1)).sum(-1)
    kept_by_min = (mass >= min_p * mass[:, :1]).sum(-1)
    # At least one token stays, also when the mass is not a number.
    kept = torch.minimum(torch.minimum(top_k, kept_by_p), kept_by_min).clamp_(min=1)[:, None]
    kept_mass = below.gather(1, kept - 1)
    place = torch.minimum(torch.searchsorted(below, uniform * kept_mass, right=True), kept - 1)
    log_kept = (kept_mass / below[:, -1:]).log().clamp_(max=0.0)[:, 0]
    return ids.gather(1, place), log_kept.float()
