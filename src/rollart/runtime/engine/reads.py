"""Which keys and values each row, or token of its newest chunk, reads: its own, and what siblings have alike from one of them.

Owns the choice. Invariants: what a row reads from its leader's slot are tokens that both have, compared id by id in the same
step, so they are what the row would have computed; its newest token is always its own. Decoding is bound by reading memory:
eight siblings with a long prompt read it once from there and seven times from the CPU's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollart.runtime.engine.cache import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Of n rows, arrays (n,) of int64: tokens 0 to `shared` from slot `lead`, from there to `ends` from slot `slots`."""

    slots: Ints
    lead: Ints
    shared: Ints
    ends: Ints


def reads_of(token_table: np.ndarray, families: Ints | None, slots: Ints, ends: Ints) -> Reads:
    """`families` (all slots) names by equal numbers those that may begin alike; None: every row reads its own."""
    if families is None:
        return Reads(slots=slots, lead=slots, shared=np.zeros_like(slots), ends=ends)
    _, leading, member_of = np.unique(families[slots], return_index=True, return_inverse=True)
    leaders = leading[member_of]
    most = np.minimum(ends - 1, ends[leaders])
    followers = np.flatnonzero(leaders != np.arange(len(slots)))
    shared = np.zeros(len(slots), np.int64)
    if len(followers) and (widest := int(most[followers].max())):
        table = token_table[:, :widest]
        unlike = table[slots[followers]] != table[slots[leaders[followers]]]
        alike = np.where(unlike.any(1), unlike.argmax(1), widest)
        shared[followers] = np.minimum(alike, most[followers])
    return Reads(slots=slots, lead=slots[leaders], shared=shared, ends=np.ascontiguousarray(ends))


def by_token(reads: Reads, widths: Ints, positions: Ints) -> Reads:
    """The same for each of a row's newest `widths` tokens, at `positions` (sum of widths,): none looks past itself."""
    if len(positions) == len(widths):
        return reads
    row = np.repeat(np.arange(len(widths)), widths)
    shared = np.minimum(reads.shared[row], positions)
    return Reads(slots=reads.slots[row], lead=reads.lead[row], shared=shared, ends=positions + 1)
