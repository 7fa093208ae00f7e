"""Batching: which rank runs which samples, in which forward pass.

Owns the split of a step into ranks and micro-batches, and what a pass over one computes. Invariants: every sample is in
exactly one micro-batch; every rank runs the same number of them, since each forward and backward of sharded training is a
collective (a rank with less work gets empty ones, which change nothing); the n-th micro-batches of all ranks are alike in
length, so ranks wait little for each other. The split changes speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from rollart.core.types import Segment

MicroBatch = tuple[int, ...]
"""Indexes into the samples; empty for a rank without work in this round."""
Prompt = tuple[Hashable, int]
"""Which prompt a row begins with, and its tokens: all before the first trained one."""

PASS_TOKENS = 256
"""What one more forward and backward pass costs, in tokens: measured on one CPU core with two layers of width 64. Larger
models have a smaller fixed part, and there this only merges micro-batches that would be small anyway."""
SHARED_TOKENS = 8
"""Shortest prompt that is computed once for all rows of a pass that begin with it: it costs attention a block of its own."""


def read_tokens(segment: Segment) -> int:
    """What a forward pass over a segment reads: all tokens before the last trained one."""
    start, end = 0, 0
    for piece in segment.pieces:
        start += piece.n_tokens
        if piece.sampled and start > segment.shared_tokens:
            end = start
    return max(0, end - 1)


def prompt_tokens(segment: Segment) -> int:
    """Tokens before the first trained one."""
    start = 0
    for piece in segment.pieces:
        if piece.sampled and start + piece.n_tokens > segment.shared_tokens:
            return max(start, segment.shared_tokens)
        start += piece.n_tokens
    return start


def computed_tokens(micro_batch: Sequence[int], lengths: Sequence[int], prompts: Sequence[Prompt]) -> int:
    """Tokens that a pass over a micro-batch computes: no padding, and a prompt that rows share once; at least 1, since ranks
    without work run along. (Where the mask of that sharing would be too large, a trainer computes the prompt of each row.)
    """
    once = {prompts[index] for index in micro_batch if prompts[index][1] >= SHARED_TOKENS}
    own = sum(lengths[index] - (prompts[index][1] if prompts[index] in once else 0) for index in micro_batch)
    return max(1, own + sum(n_tokens for _, n_tokens in once))


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


def split_by_prompt(
    lengths: Sequence[int], prompts: Sequence[Prompt], *, ranks: int, micro_batch_tokens: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """`split`, as a trainer does it; on one rank, rows of one prompt stay together where they fit, and count as what they cost.

    On several ranks rows are dealt one by one: that keeps the ranks even.
    """
    units: list[MicroBatch] = [(index,) for index in range(len(lengths))]
    if ranks == 1:
        by_prompt: dict[Prompt, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_prompt.setdefault(prompt, []).append(index)
        units = []
        for rows in by_prompt.values():
            fits = computed_tokens(rows, lengths, prompts) <= micro_batch_tokens
            units += [tuple(rows)] if fits else [(index,) for index in rows]
    sizes = [computed_tokens(unit, lengths, prompts) for unit in units]
    parts = split(sizes, ranks=ranks, micro_batch_tokens=micro_batch_tokens)
    return tuple(
        tuple(tuple(index for unit in batch for index in units[unit]) for batch in of_rank) for of_rank in parts
    )


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
