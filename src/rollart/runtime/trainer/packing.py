"""A micro-batch without padding, each prompt once: what a forward pass computes, and who attends to what.

Owns the way from padded rows to packed tokens. Invariant: a token's hidden state is a function of the tokens up to it, so
rows that begin alike share what they begin with; nothing else is shared, and no result changes but in rounding. The samples
of a group have one prompt, which is computed once in place of once a sample (the idea of Prefix Grouper, Liu et al. 2025).

    packed tokens   | prompt of rows 0..7 | prompt of rows 8..15 | rest of row 0 | rest of row 1 | .. | whole row 40 | ..

With torch, attention is computed in blocks of sequences that are alike: whole sequences (prompts, and rows that share nothing)
under the causal kernel; queries that begin within a sequence under a mask, which bounds how much of that there may be. With the
kernels (`kernels`), sequence by sequence, as `Runs` has them: no bound, and few queries cost as little as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.learn.batching import SHARED_TOKENS, Prompt, split_by_prompt
from rollart.runtime.trainer.rows import LossRow, Rows

PRUNED_SHARE = 0.7
"""Largest share of the tokens that may be trained for the last layer to be computed at those alone; above it, the causal
kernel over all positions is the faster one."""
MASK_CELLS = 16 << 20
"""Largest mask (sequences x queries x keys) of a block; long contexts take the causal kernel and share nothing."""
ALIKE = 0.8
"""Sequences shorter than this share of a block's longest begin a block of their own .."""
ALIKE_AT_LEAST = 4
""".. once the block has this many."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Attention of b sequences, at most `O` queries and `K` keys each."""

    queries: torch.Tensor
    """(b, O) index into the packed tokens that ask; padding asks as the first."""
    keys: torch.Tensor
    """(b, K) index into the packed tokens, in the order of the sequence; padding lies behind all that is looked at."""
    mask: torch.Tensor | None
    """(b, 1, O, K) bool, true where a query looks; None: causal, queries and keys are the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Attention of s sequences by the kernels; int64. A sequence is two runs of packed tokens."""

    lead: Ints
    """(s,) the first token."""
    shared: Ints
    """(s,) tokens in the run that begins there."""
    own: Ints
    """(s,) where the run of the others begins."""
    begins: Ints
    """(s + 1,) of each sequence's queries among the Q; the last is Q."""
    asked: Ints
    """(Q,) the row of each query."""
    places: Ints
    """(Q,) its place in its sequence, ascending within it: it looks at the tokens up to there."""
    longest: int
    """Tokens that the longest sequence reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Attention of one layer for `Q` of the packed tokens: by `runs`, or where there are none by `blocks`."""

    blocks: tuple[Block, ...] = ()
    back: torch.Tensor | None = None
    """(Q,) where the result of each asking token lies among the concatenated (b * O) results of the blocks."""
    runs: Runs | None = None
    asking: torch.Tensor | None = None
    """(Q,) the packed tokens that ask, ascending; None: all, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """P tokens, N of them counted as often as they predict a trained one."""

    ids: torch.Tensor
    """(P,) int64."""
    places: torch.Tensor
    """(P,) int64, place of each token in its row."""
    whole: Plan
    """For all layers but the last."""
    last: Plan
    trained: torch.Tensor
    """(N,) index into what the last layer gives, in the order of `Rows.targets`."""


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Prompts or rows: what they read, and which of it asks."""

    tokens: Ints
    """(b, K) packed index; 0 behind the end."""
    asks: NDArray[np.bool_]
    """(b, K) false behind the end."""


def pack(rows: Rows, *, by_runs: bool = False) -> Packed:
    """Lay a padded micro-batch out without padding; `by_runs`: plans for the kernels."""
    ids, positions, valid = rows.ids.numpy(), rows.positions.numpy(), rows.valid.numpy()
    lengths = rows.lengths.numpy()
    if not lengths.any():
        lengths = np.eye(1, len(lengths), dtype=np.int64)[0]  # a pass without a token would leave other ranks waiting
    shared, owner = _prompts(ids, lengths, positions, valid, bounded=not by_runs)
    at = np.arange(ids.shape[1])
    read, in_prompt = at < lengths[:, None], at < shared[:, None]
    first_of = np.unique(owner[owner >= 0], return_index=True)[1]
    first_of = np.flatnonzero(owner >= 0)[first_of]
    prompt_lengths, own = shared[first_of], lengths - shared
    prompt_starts, own_starts = _starts(prompt_lengths), int(prompt_lengths.sum()) + _starts(own)
    tokens = (own_starts - shared)[:, None] + at
    if len(first_of):
        tokens = np.where(in_prompt, prompt_starts[owner][:, None] + at, tokens)
    tokens = np.where(read, tokens, 0)
    n_tokens = int(prompt_lengths.sum() + own.sum())
    packed_ids, places = np.zeros(n_tokens, np.int64), np.zeros(n_tokens, np.int64)
    packed_ids[tokens[read]], places[tokens[read]] = ids[read], np.broadcast_to(at, ids.shape)[read]
    sharing, alone, longest = owner >= 0, owner < 0, int(prompt_lengths.max(initial=0))
    kinds = [
        (_Sequences(tokens[first_of, :longest], at[:longest] < prompt_lengths[:, None]), True),
        (_Sequences(tokens[sharing], read[sharing] & ~in_prompt[sharing]), False),
        (_Sequences(tokens[alone], read[alone]), True),
    ]
    trained = tokens[np.nonzero(valid)[0], positions[valid]]
    whole = _runs_plan(kinds) if by_runs else _plan(kinds)
    last = _pruned(kinds, trained, n_tokens, by_runs=by_runs) or whole
    if last.asking is not None:
        trained = np.searchsorted(last.asking.numpy(), trained)
    return Packed(
        ids=torch.from_numpy(packed_ids),
        places=torch.from_numpy(places),
        whole=whole,
        last=last,
        trained=torch.from_numpy(trained),
    )


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _prompts(
    ids: Ints, lengths: Ints, positions: Ints, valid: NDArray[np.bool_], *, bounded: bool
) -> tuple[Ints, Ints]:
    """(B,) tokens that a row shares, and the number of its prompt; 0 and -1 for a row that shares nothing. `bounded`: nothing
    is shared where that would need too large a mask."""
    n_rows, n_tokens = ids.shape
    shared, owner = np.zeros(n_rows, np.int64), np.full(n_rows, -1, np.int64)
    members: dict[bytes, list[int]] = {}
    for row in range(n_rows):
        if valid[row].any() and positions[row, 0] + 1 >= SHARED_TOKENS:
            members.setdefault(ids[row, : positions[row, 0] + 1].tobytes(), []).append(row)
    found = [who for who in members.values() if len(who) > 1]
    rest = max((int(lengths[b] - positions[b, 0] - 1) for who in found for b in who), default=0)
    if bounded and sum(map(len, found)) * rest * n_tokens > MASK_CELLS:
        return shared, owner
    for number, who in enumerate(found):
        shared[who], owner[who] = positions[who[0], 0] + 1, number
    return shared, owner


def _pruned(kinds: Sequence[tuple[_Sequences, bool]], trained: Ints, n_tokens: int, *, by_runs: bool) -> Plan | None:
    """The plan in which only tokens ask that predict a trained one; None where asking for all is the cheaper way."""
    wanted = np.zeros(n_tokens, np.bool_)
    wanted[trained] = True
    if not len(trained) or wanted.sum() > PRUNED_SHARE * n_tokens:
        return None
    pruned = [(_Sequences(one.tokens, one.asks & wanted[one.tokens]), False) for one, _ in kinds]
    if by_runs:
        return _runs_plan(pruned, np.flatnonzero(wanted))
    cells = [one.tokens.size * int(one.asks.sum(1).max(initial=0)) for one, _ in pruned]
    return None if max(cells) > MASK_CELLS else _plan(pruned, np.flatnonzero(wanted))


def _plan(kinds: Sequence[tuple[_Sequences, bool]], asking: Ints | None = None) -> Plan:
    blocks, order, results, size = list[Block](), list[Ints](), list[Ints](), 0
    for one, causal in ((part, causal) for kind, causal in kinds for part in _alike(kind)):
        rows, at = np.nonzero(one.asks)
        counts = one.asks.sum(1)
        width, reach = int(counts.max()), int(at.max()) + 1
        nth = np.arange(len(rows)) - np.repeat(_starts(counts), counts)
        places, queries = np.zeros((len(counts), width), np.int64), np.zeros((len(counts), width), np.int64)
        places[rows, nth], queries[rows, nth] = at, one.tokens[rows, at]
        order.append(one.tokens[rows, at])
        results.append(size + rows * width + nth)
        size += len(counts) * width
        if asking is not None:
            queries = np.searchsorted(asking, queries).clip(max=len(asking) - 1)
        mask = None if causal else torch.from_numpy((np.arange(reach) <= places[:, :, None])[:, None])
        keys = np.ascontiguousarray(one.tokens[:, :reach])
        blocks.append(Block(queries=torch.from_numpy(queries), keys=torch.from_numpy(keys), mask=mask))
    back = np.concatenate(results)[np.argsort(np.concatenate(order))]
    return Plan(
        blocks=tuple(blocks),
        back=torch.from_numpy(back),
        asking=None if asking is None else torch.from_numpy(asking),
    )


def _runs_plan(kinds: Sequence[tuple[_Sequences, bool]], asking: Ints | None = None) -> Plan:
    parts = list[tuple[Ints, ...]]()
    for one, _ in kinds:
        counts = one.asks.sum(1)
        tokens, asks, counts = one.tokens[counts > 0], one.asks[counts > 0], counts[counts > 0]
        if not len(counts):
            continue
        rows, places = np.nonzero(asks)
        at = np.arange(tokens.shape[1])
        reach = places[np.cumsum(counts) - 1] + 1
        # the first token that does not follow the one before begins the second run
        breaks = (at[1:] < reach[:, None]) & (np.diff(tokens) != 1)
        shared = np.where(breaks.any(1), breaks.argmax(1) + 1 if breaks.size else 0, reach)
        own = tokens[np.arange(len(tokens)), np.minimum(shared, len(at) - 1)]
        parts.append((tokens[:, 0], shared, own, counts, reach, tokens[rows, places], places))
    lead, shared, own, counts, reach, asked, places = (
        np.ascontiguousarray(np.concatenate(field), np.int64) for field in zip(*parts, strict=True)
    )
    runs = Runs(
        lead=lead,
        shared=shared,
        own=own,
        begins=np.append(_starts(counts), counts.sum()).astype(np.int64),
        asked=asked if asking is None else np.searchsorted(asking, asked).astype(np.int64),
        places=places,
        longest=int(reach.max()),
    )
    return Plan(runs=runs, asking=None if asking is None else torch.from_numpy(asking))


def _alike(kind: _Sequences) -> list[_Sequences]:
    """The sequences of which anything asks, in parts of similar length: attention of a part costs what its longest asks."""
    reach = np.where(kind.asks, np.arange(1, kind.asks.shape[1] + 1), 0).max(1, initial=0)
    order = [int(row) for row in np.argsort(-reach, kind="stable") if reach[row]]
    parts = list[list[int]]()
    for row in order:
        if not parts or (len(parts[-1]) >= ALIKE_AT_LEAST and reach[row] < ALIKE * reach[parts[-1][0]]):
            parts.append([])
        parts[-1].append(row)
    return [_Sequences(kind.tokens[part], kind.asks[part]) for part in parts]


def micro_batches(rows: Sequence[LossRow], *, ranks: int, micro_batch_tokens: int) -> list[list[list[LossRow]]]:
    """The micro-batches of each rank, as `learn.batching.split_by_prompt` has them."""
    parts = split_by_prompt(
        [len(one.row.ids) for one in rows],
        [_prompt(one) for one in rows],
        ranks=ranks,
        micro_batch_tokens=micro_batch_tokens,
    )
    return [[[rows[index] for index in batch] for batch in of_rank] for of_rank in parts]


def _prompt(one: LossRow) -> Prompt:
    n_tokens = int(one.row.positions[0]) + 1
    return one.row.ids[:n_tokens].tobytes(), n_tokens
