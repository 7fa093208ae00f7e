"""Drawing tokens: temperature, top-k, top-p, min-p for each row of a batch at once.

Invariant: a draw is a function of the row's logits, its sampling parameters and one uniform number, which is a hash of
(seed, position in the sequence); neighbours in the batch, the step and the number of draws before do not enter.
The inverse of the distribution function is taken in float64, so rare tokens keep their share; in large vocabularies first over
blocks of ids, whose masses torch sums in float32, then within one: the same function up to 1e-7 of the mass.
"""

from __future__ import annotations

from collections.abc import Callable
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

WHOLE_VOCAB, BLOCK = 4096, 128
"""Larger vocabularies are looked through by blocks of this many ids."""
BELOW_ONE = 1.0 - 2.0**-53
"""The largest float64 below 1; times any sum it is below that sum."""

Floats = NDArray[np.float32]
Plain = Callable[[Tensor, NDArray[np.float64]], tuple[NDArray[np.int64], Floats]]
"""Ids and log-probabilities for logits (n, vocab) in float32 at uniforms (n,)."""


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
    logits: Tensor, uniform: NDArray[np.float64], special: Special | None = None, *, plain: Plain | None = None
) -> tuple[NDArray[np.int64], Floats, Floats | None]:
    """Token ids, log-probabilities (after temperature, before truncation) and log kept mass, each (n,).

    `uniform` is (n,), in (0, 1). Without `special` every row is plain: temperature 1, nothing truncated. Kept mass is None
    when no row truncates, and 0 (log of 1) for rows that do not. A row whose logits are not finite gets a log-probability
    that is not finite; its id is then meaningless. `plain`: what draws rows that neither truncate nor are greedy, if not torch.
    """
    logits = logits.float()
    if special is not None:
        logits = logits / on_device(special.temperature, logits.device)[:, None]
    if plain is not None:
        return _drawn_by(plain, logits, uniform, special)
    masses, drawn = logits.softmax(-1), on_device(uniform, logits.device)[:, None]
    tokens = (_drawn if logits.shape[1] <= WHOLE_VOCAB else _drawn_by_blocks)(masses, drawn)
    log_kept = None if special is None else _apply_special(tokens, logits, masses, drawn, special)
    chosen, scores = _to_host(tokens, masses.gather(1, tokens).log_())
    return chosen, scores, log_kept


def _drawn_by(
    plain: Plain, logits: Tensor, uniform: NDArray[np.float64], special: Special | None
) -> tuple[NDArray[np.int64], Floats, Floats | None]:
    """Of logits on the CPU, after temperature."""
    ids, logprobs = plain(logits, uniform)
    if special is None:
        return ids, logprobs, None
    again = special.greedy | special.truncates
    if not again.any():
        return ids, logprobs, None
    tokens, masses = torch.from_numpy(ids)[:, None], logits.softmax(-1)
    log_kept = _apply_special(tokens, logits, masses, torch.from_numpy(uniform)[:, None], special)
    logprobs[again] = masses.gather(1, tokens).log_()[:, 0].numpy()[again]
    return ids, logprobs, log_kept


def _drawn(masses: Tensor, uniform: Tensor) -> Tensor:
    """The inverse of the distribution function at `uniform` (n, 1), for masses (n, vocab) of any sum: ids (n, 1)."""
    below = masses.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(below, uniform * below[:, -1:], right=True).clamp_(max=masses.shape[1] - 1)


def _drawn_by_blocks(masses: Tensor, uniform: Tensor) -> Tensor:
    """The same with two looks: which block of ids, then which id of the block by what is left of `uniform`.

    A block's mass is a sum in float32 (an error of 1e-7 of it), all else float64, of which there are far
    fewer so over a large vocabulary.
    """
    vocab, device = masses.shape[1], masses.device
    whole = vocab // BLOCK * BLOCK
    blocks = masses[:, :whole].view(len(masses), whole // BLOCK, BLOCK).sum(-1)
    if whole < vocab:
        blocks = torch.cat([blocks, masses[:, whole:].sum(-1, keepdim=True)], 1)
    below = blocks.cumsum(-1, dtype=torch.float64)
    wanted = uniform * below[:, -1:]
    block = torch.searchsorted(below, wanted, right=True).clamp_(max=blocks.shape[1] - 1)
    mass = blocks.gather(1, block).double()
    left = ((wanted - below.gather(1, block) + mass) / mass).clamp_(0.0, BELOW_ONE)
    ids = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = masses.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, 0.0)
    return (block * BLOCK + _drawn(inside, left)).clamp_(max=vocab - 1)


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int64], Floats]:
    """Both (n, 1) as (n,) arrays; from a device in one transfer, the one wait of a step."""
    if tokens.device.type == "cpu":
        return tokens[:, 0].numpy(), logprobs[:, 0].numpy()
    # float64 holds every token id and every float32 exactly.
    both = torch.cat([tokens.double(), logprobs.double()], 1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1].astype(np.float32)


def _apply_special(tokens: Tensor, logits: Tensor, masses: Tensor, uniform: Tensor, special: Special) -> Floats | None:
    """Draw greedy and truncated rows again, into `tokens` (n, 1); log kept mass if any row truncates."""
    greedy, truncated = np.flatnonzero(special.greedy), np.flatnonzero(special.truncates)
    if len(greedy):
        rows = on_device(greedy, tokens.device)
        tokens[rows] = logits[rows].argmax(-1, keepdim=True)
    if not len(truncated):
        return None
    rows = on_device(truncated, tokens.device)
    tokens[rows], kept = _draw_truncated(masses[rows], uniform[rows], special, truncated)
    log_kept = np.zeros(len(tokens), np.float32)
    log_kept[truncated] = kept.cpu().numpy()
    return log_kept


def _draw_truncated(masses: Tensor, uniform: Tensor, special: Special, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
    """Tokens (n, 1) and log kept mass (n,) of the `rows` that truncate; the tensors hold these rows only.

    In the order of falling probability (ties by lower id) each limit keeps a prefix, and the shortest one is kept: the k most
    likely; of these the fewest that hold top_p of their mass; those of at least min_p times the likeliest.
    """
    device, vocab = masses.device, masses.shape[1]
    top_k = np.where(special.top_k[rows] > 0, np.minimum(special.top_k[rows], vocab), vocab)
    limit_k = on_device(top_k, device)[:, None]
    top_p = on_device(special.top_p[rows], device)[:, None]
    min_p = on_device(special.min_p[rows], device)[:, None]
    ranked, ids = masses.sort(stable=True, dim=-1, descending=True)
    mass = ranked.double()
    below = mass.cumsum(-1)
    kept_by_p = (below - mass < top_p * below.gather(1, limit_k - 1)).sum(-1, keepdim=True)
    kept_by_min = (mass >= min_p * mass[:, :1]).sum(-1, keepdim=True)
    # At least one token stays, also when the mass is not a number.
    kept = torch.minimum(torch.minimum(limit_k, kept_by_p), kept_by_min).clamp_(min=1)
    kept_mass = below.gather(1, kept - 1)
    place = torch.minimum(torch.searchsorted(below, uniform * kept_mass, right=True), kept - 1)
    log_kept = (kept_mass / below[:, -1:]).log().clamp_(max=0.0)[:, 0]
    return ids.gather(1, place), log_kept.float()
