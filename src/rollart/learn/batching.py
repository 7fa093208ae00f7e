"""Batching: which rank runs which samples, in which forward pass.

Owns the split of a step into ranks and micro-batches. Invariants: every sample is in exactly one micro-batch; every rank
runs the same number of them, since each forward and backward of sharded training is a collective (a rank with less work
gets empty ones, which change nothing); the n-th micro-batches of all ranks are alike in length, so ranks wait little for
each other. The split changes speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollart.core.types import Segment

MicroBatch = tuple[int, ...]
"""Indexes into the samples; empty for a rank without work in this round."""

PASS_TOKENS = 256
"""What one more forward and backward pass costs, in tokens: measured on one CPU core with two layers of width 64. Larger
models have a smaller fixed part, and there this only merges micro-batches that would be small anyway."""


def read_tokens(segment: Segment) -> int:
    """What a forward pass over a segment reads: all tokens before the last trained one."""
    start, end = 0, 0
    for piece in segment.pieces:
        start += piece.n_tokens
        if piece.sampled and start > segment.shared_tokens:
            end = start
    return max(0, end - 1)


def split(lengths: Sequence[int], *, ranks: int, micro_batch_tokens: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches per rank, for samples of these lengths in tokens.

    A micro-batch holds at most `micro_batch_tokens` padded tokens (rows x longest row) unless a single row is longer. Rows
    are sorted by length, longest first, dealt to the ranks back and forth, and cut where padded tokens plus `PASS_TOKENS`
    per micro-batch are fewest. Result: `ranks` tuples of equal length.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    per_rank = [_cut(hand, lengths, micro_batch_tokens) for hand in _deal(order, ranks)]
    rounds = max(len(micro_batches) for micro_batches in per_rank)
    return tuple(tuple(micro_batches) + ((),) * (rounds - len(micro_batches)) for micro_batches in per_rank)


def _deal(order: Sequence[int], ranks: int) -> list[list[int]]:
    """0 1 2 2 1 0 0 1 2 ..: going back and forth keeps the ranks' tokens within one longest row of each other."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for turn, index in enumerate(order):
        lap, place = divmod(turn, ranks)
        hands[ranks - 1 - place if lap % 2 else place].append(index)
    return hands


def _cut(order: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cut rows, longest first, at the least cost: shortest path over the places of the cuts."""
    n = len(order)
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    came_from = np.zeros(n + 1, np.int64)
    for start in range(n):
        longest = max(1, lengths[order[start]])
        rows = np.arange(1, min(n - start, max(1, micro_batch_tokens // longest)) + 1)
        new = cost[start] + longest * rows + PASS_TOKENS
        better = start + rows[new < cost[start + rows]]
        cost[better] = new[better - start - 1]
        came_from[better] = start
    micro_batches: list[MicroBatch] = []
    stop = n
    while stop:
        start = int(came_from[stop])
        micro_batches.append(tuple(order[start:stop]))
        stop = start
    return micro_batches[::-1]
