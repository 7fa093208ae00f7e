"""One step's tokens, laid out for the forward pass.

Owns the layout: tokens of all rows packed one after another, and attention cut into groups of rows that are alike, one call
each. Invariant: a token at position p of a row attends to positions 0..p of that row and to nothing else, whatever
shares the batch. Masks are made from absolute positions, so a chunk that starts at position > 0 needs no special case.

    packed tokens   |d|d|d|d| row 4 ... | row 5 .. | row 6 ....... |      one matrix product for all
    groups          |decode | width <= 8           | width <= 16   |      padded to the group's width and reach
    last            the final token of every row that is complete: the last layer and the output matrix see only these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollart.runtime.engine.cache import Ints, KVCache, on_device
from rollart.runtime.engine.reads import Reads, by_token, reads_of

WIDTH_WASTE = 2
"""Chunks shorter than 1/2 of a group's widest start a new group: padding costs at most as much as the work itself."""
SLICE_SPAN = 1.5
"""Rows spread over up to 1.5x as many slots are attended as one slice with holes: copying them out costs memory traffic that
attention over a hole does not."""
REACH_WASTE = 0.67
"""Rows that are copied anyway and are shorter than 2/3 of the longest form a group of their own."""
ALONE_WIDTH, ALONE_REACH = 32, 512
"""Where all of a step's chunks that are left have at most so many tokens, and no row reads more, the kernel attends token by
token in float32: it reads a chunk's keys once for each, which many small calls of torch cost more than."""
MIN_QUERIES = 16
MIN_ROWS = 4
"""Groups of fewer queries or rows cost more in calls than they save in padding."""

Part = tuple[Ints, int]
"""Rows of one group, sorted by slot, and the width of the widest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows whose attention is one call. `rows` x `width` queries over `reach` keys each."""

    tokens: slice
    """Of the packed tokens."""
    rows: int
    width: int
    reach: int
    memory: slice | Tensor
    """Slots in the cache, `rows` of them."""
    spread: Tensor | None
    """(rows * width,) which of the group's tokens stands at each place of the grid; None: they fill it in order."""
    collect: Tensor | None
    """(tokens,) place of each token in the grid."""
    mask: Tensor | None
    """(rows, 1, width, reach), 0 or -inf, added to the scores; None: all is visible."""
    reads: Reads | None
    """What each token reads, where they are attended one by one, as rows of width 1; `memory` is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of a forward pass over n packed tokens."""

    ids: Tensor
    positions: Tensor
    write: Tensor
    """`KVCache.write_index` of every token."""
    groups: tuple[Group, ...]
    last: Tensor | None
    """Packed index of the final token of each complete row; None: every token is one."""
    last_groups: tuple[Group, ...]
    """Over the tokens of `last`; empty: no row is complete, there are no logits."""
    complete: Ints
    """Slots in the order of the logits."""


def staircase(max_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for `max_positions` entries, then -inf for as many: every row of every causal mask is a window of it."""
    steps = torch.zeros(2 * max_positions, dtype=dtype, device=device)
    steps[max_positions:] = float("-inf")
    return steps


class Layout(NamedTuple):
    """What batches are made with besides their rows."""

    cache: KVCache
    token_table: np.ndarray
    """(slots, capacity)"""
    stairs: Tensor
    """The `staircase` that masks are cut from."""
    alone: int
    """Tokens of chunks up to this width are attended one by one, each over its own length: one group, no mask; 0: none."""
    families: Ints | None
    """Equal numbers for slots that may begin alike, for reading that once; None: every row reads its own."""


def pack(layout: Layout, slots: Ints, starts: Ints, widths: Ints, complete: np.ndarray) -> Batch:
    """Lay out `widths` tokens from position `starts` of each of `slots`. `complete` says whose next token is to be sampled."""
    if layout.alone > 1 and int((starts + widths).max()) > ALONE_REACH:
        layout = layout._replace(alone=1)
    parts = _alike(slots, starts, widths, layout.alone)
    order = _joined(parts)
    slots, starts, widths, complete = slots[order], starts[order], widths[order], complete[order]
    ends = starts + widths
    first = widths.cumsum() - widths
    n_tokens = int(first[-1] + widths[-1])
    if n_tokens == len(slots):
        rows, positions = np.arange(n_tokens), starts
    else:
        rows = np.repeat(np.arange(len(slots)), widths)
        positions = np.arange(n_tokens) - (first - starts)[rows]
    token_slots, device = slots[rows], layout.stairs.device
    groups = _groups(parts, slots, ends, widths, positions, layout)
    last, done, last_groups = None, slots, groups
    if n_tokens != len(slots) or not complete.all():
        last, done, last_groups = _last(slots[complete], ends[complete], (first + widths - 1)[complete], layout)
    return Batch(
        ids=on_device(layout.token_table[token_slots, positions], device),
        positions=on_device(positions, device),
        write=on_device(layout.cache.write_index(token_slots, positions), device),
        groups=groups,
        last=last,
        last_groups=last_groups,
        complete=done,
    )


def _last(slots: Ints, ends: Ints, tokens: Ints, layout: Layout) -> tuple[Tensor | None, Ints, tuple[Group, ...]]:
    """The final tokens of complete rows as groups of width 1: (packed index, slots, groups)."""
    if not len(slots):
        return None, slots, ()
    ones = np.ones(len(slots), np.int64)
    parts = _by_reach(np.arange(len(slots)), slots, ends, 1, layout.alone)
    order = _joined(parts)
    slots, ends = slots[order], ends[order]
    groups = _groups(parts, slots, ends, ones, ends - 1, layout)
    return on_device(tokens[order], layout.stairs.device), slots, groups


def _alike(slots: Ints, starts: Ints, widths: Ints, alone: int) -> list[Part]:
    """Cut rows into parts of similar width, and of similar reach where they will be copied; each sorted by slot."""
    ends = starts + widths
    by_width = np.argsort(-widths, kind="stable")
    falling = -widths[by_width]
    parts: list[Part] = []
    start = 0
    while start < len(widths):
        widest = -int(falling[start])
        # Rows of width 1 are never padded to 2: they are the decoding rows, the many.
        narrowest = 1 if widest <= max(alone, 1) else max(2, -(-widest // WIDTH_WASTE))
        stop = int(np.searchsorted(falling, -narrowest, side="right"))
        parts += _by_reach(by_width[start:stop], slots, ends, widest, alone)
        start = stop
    return parts


def _by_reach(part: Ints, slots: Ints, ends: Ints, width: int, alone: int) -> list[Part]:
    part = part[np.argsort(slots[part])]
    fewest = max(MIN_ROWS, MIN_QUERIES // width)
    if width <= alone or len(part) < 2 * fewest or _span(slots[part]) <= SLICE_SPAN * len(part):
        return [(part, width)]
    by_reach = part[np.argsort(-ends[part], kind="stable")]
    falling = -ends[by_reach]
    parts, start = [], 0
    while True:
        cut = int(np.searchsorted(falling, REACH_WASTE * falling[start], side="right"))
        cut = max(cut, start + fewest)
        if len(part) - cut < fewest:
            break
        parts.append(by_reach[start:cut])
        start = cut
    parts.append(by_reach[start:])
    return [(piece[np.argsort(slots[piece])], width) for piece in parts]


def _joined(parts: list[Part]) -> Ints:
    return np.concatenate([rows for rows, _ in parts]) if len(parts) > 1 else parts[0][0]


def _span(slots: Ints) -> int:
    """Slots from the lowest to the highest of a sorted array."""
    return int(slots[-1] - slots[0]) + 1


def _groups(
    parts: list[Part], slots: Ints, ends: Ints, widths: Ints, positions: Ints, layout: Layout
) -> tuple[Group, ...]:
    """Rows and packed tokens are in the order of `parts`; `positions` is per token."""
    groups: list[Group] = []
    row = token = 0
    for part, width in parts:
        rows = slice(row, row + len(part))
        tokens = slice(token, token + (len(part) if width == 1 else int(widths[rows].sum())))
        groups.append(_group(tokens, slots[rows], ends[rows], widths[rows], width, positions[tokens], layout))
        row, token = rows.stop, tokens.stop
    return tuple(groups)


def _group(tokens: slice, slots: Ints, ends: Ints, widths: Ints, width: int, positions: Ints, layout: Layout) -> Group:
    n_rows, n_tokens, reach, stairs = len(slots), len(positions), int(ends.max()), layout.stairs
    if width <= layout.alone:
        reads = by_token(reads_of(layout.token_table, layout.families, slots, ends), widths, positions)
        return Group(
            tokens=tokens, rows=n_tokens, width=1, reach=reach, memory=slice(0, 0), spread=None, collect=None, mask=None,
            reads=reads,
        )  # fmt: skip
    memory: slice | Tensor
    if _span(slots) <= SLICE_SPAN * n_rows:
        rows, place = _span(slots), slots - slots[0]
        memory = slice(int(slots[0]), int(slots[0]) + rows)
    else:
        rows, place = n_rows, np.arange(n_rows)
        memory = on_device(slots, stairs.device)
    spread = collect = None
    if rows * width != n_tokens:
        # Holes of a slice, and places past a row's end, stand for a token that exists; their output is not collected.
        grid = np.zeros((rows, width), np.int64)
        if width == 1:
            grid[place, 0] = np.arange(n_rows)
            collect = place
        else:
            first = widths.cumsum() - widths
            grid[place] = first[:, None] + np.minimum(np.arange(width), widths[:, None] - 1)
            collect = np.repeat(place * width - first, widths) + np.arange(n_tokens)
        spread = grid.reshape(-1)
        positions = positions[spread]
    mask = None
    if width > 1 or positions.min() != reach - 1:
        windows = stairs.unfold(0, reach, 1)
        chosen = windows.index_select(0, on_device(len(stairs) // 2 - 1 - positions, stairs.device))
        mask = chosen.view(rows, 1, width, reach)
    return Group(
        tokens=tokens,
        rows=rows,
        width=width,
        reach=reach,
        memory=memory,
        spread=None if spread is None else on_device(spread, stairs.device),
        collect=None if collect is None else on_device(collect, stairs.device),
        mask=mask,
        reads=None,
    )
