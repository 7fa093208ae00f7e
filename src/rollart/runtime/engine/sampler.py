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

from rollart.runtime.engine.cache import on_device

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1
_ONE, _GOLDEN, _MIX_1, _MIX_2 = np.array([1, GOLDEN, MIX_1, MIX_2], np.uint64)
_SHIFTS = np.array([30, 27, 31, 12], np.uint64)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """Parameters of n rows of which at least one is not plain, arrays of shape (n,)."""

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
    z = (positions.view(np.uint64) + _ONE) * _GOLDEN
    z += keys
    z ^= z >> _SHIFTS[0]
    z *= _MIX_1
    z ^= z >> _SHIFTS[1]
    z *= _MIX_2
    z ^= z >> _SHIFTS[2]
    # 52 bits and a half: with 53 the largest value would round to 1 and fall past the last token.
    uniform: NDArray[np.float64] = ((z >> _SHIFTS[3]) + 0.5) * 2.0**-52
    return uniform


def draw(
    logits: Tensor, uniform: NDArray[np.float64], special: Special | None = None
) -> tuple[NDArray[np.int64], Floats, Floats | None]:
    """Token ids, log-probabilities (after temperature, before truncation) and log kept mass, each (n,).

    `uniform` is (n,), in (0, 1). Without `special` every row is plain: temperature 1, nothing truncated. Kept mass is None
    when no row truncates, and 0 (log of 1) for rows that do not. A row whose logits are not finite gets a log-probability
    that is not finite; its id is then meaningless.
    """
    logits, drawn = logits.float(), on_device(uniform, logits.device)[:, None]
    if special is not None:
        logits = logits / on_device(special.temperature, logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    below = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(below, drawn * below[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    log_kept = None if special is None else _apply_special(tokens, logits, logprobs, drawn, special)
    chosen, scores = _to_host(tokens, logprobs.gather(1, tokens))
    return chosen, scores, log_kept


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int64], Floats]:
    """Both (n, 1) as (n,) arrays; from a device in one transfer, the one wait of a step."""
    if tokens.device.type == "cpu":
        return tokens[:, 0].numpy(), logprobs[:, 0].numpy()
    # float64 holds every token id and every float32 exactly.
    both = torch.cat([tokens.double(), logprobs.double()], 1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1].astype(np.float32)


def _apply_special(
    tokens: Tensor, logits: Tensor, logprobs: Tensor, uniform: Tensor, special: Special
) -> Floats | None:
    """Draw greedy and truncated rows again, into `tokens` (n, 1); log kept mass if any row truncates."""
    greedy, truncated = np.flatnonzero(special.greedy), np.flatnonzero(special.truncates)
    if len(greedy):
        rows = on_device(greedy, tokens.device)
        tokens[rows] = logits[rows].argmax(-1, keepdim=True)
    if not len(truncated):
        return None
    rows = on_device(truncated, tokens.device)
    tokens[rows], kept = _draw_truncated(logprobs[rows], uniform[rows], special, truncated)
    log_kept = np.zeros(len(tokens), np.float32)
    log_kept[truncated] = kept.cpu().numpy()
    return log_kept


def _draw_truncated(
    logprobs: Tensor, uniform: Tensor, special: Special, rows: NDArray[np.intp]
) -> tuple[Tensor, Tensor]:
    """Tokens (n, 1) and log kept mass (n,) of the `rows` that truncate; the tensors hold these rows only.

    In the order of falling probability (ties by lower id) each limit keeps a prefix, and the shortest one is kept: the k most
    likely; of these the fewest that hold top_p of their mass; those of at least min_p times the likeliest.
    """
    device, vocab = logprobs.device, logprobs.shape[1]
    top_k = np.where(special.top_k[rows] > 0, np.minimum(special.top_k[rows], vocab), vocab)
    limit_k = on_device(top_k, device)[:, None]
    top_p = on_device(special.top_p[rows], device)[:, None]
    min_p = on_device(special.min_p[rows], device)[:, None]
    ranked, ids = logprobs.sort(stable=True, dim=-1, descending=True)
    mass = ranked.double().exp_()
    below = mass.cumsum(-1)
    kept_by_p = (below - mass < top_p * below.gather(1, limit_k - 1)).sum(-1, keepdim=True)
    kept_by_min = (mass >= min_p * mass[:, :1]).sum(-1, keepdim=True)
    # At least one token stays, also when the mass is not a number.
    kept = torch.minimum(torch.minimum(limit_k, kept_by_p), kept_by_min).clamp_(min=1)
    kept_mass = below.gather(1, kept - 1)
    place = torch.minimum(torch.searchsorted(below, uniform * kept_mass, right=True), kept - 1)
    log_kept = (kept_mass / below[:, -1:]).log().clamp_(max=0.0)[:, 0]
    return ids.gather(1, place), log_kept.float()
