"""What each live row computes in the next step, and what it takes over from a sibling instead.

Owns the division of a step: decoding rows compute their one token, prompts share the rest of the budget, by priority and
then arrival. Invariant: a row takes keys and values over only from positions whose whole history of token ids is the same as
its own, so they are what it would have computed; and its last token is always its own work, for its logits.

Siblings of a group begin alike. The first in order computes the common start; the others wait until it has, take it over
and compute what is theirs. After new weights they do the same: a group's start is rebuilt once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollart.runtime.engine.cache import Ints
from rollart.runtime.engine.slots import SlotTable

WORTH_WAITING_TOKENS = 8
"""A row sits a step out for a sibling only if they begin with this many tokens alike: a step costs about what these do."""


class Part(NamedTuple):
    """Tokens `start` to `stop` of a slot."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Rows that compute, as arrays of one length: `widths` tokens of each of `slots` from position `starts`."""

    slots: Ints
    starts: Ints
    widths: Ints
    complete: NDArray[np.bool_]
    """Whose next token can be sampled."""
    rebuilt_tokens: int


def take_over(table: SlotTable) -> dict[Part, list[int]]:
    """What rows that still have a prompt to compute can have from siblings: part -> the slots that get a copy of it, to be
    copied in this order. The table is changed as if it were done."""
    taken: dict[Part, list[int]] = {}
    for slot in _prompts(table):
        siblings = table.siblings(slot)
        if not len(siblings):
            continue
        ready = np.minimum(table.common(slot, siblings), table.computed[siblings])
        best, start = int(ready.argmax()), int(table.computed[slot])
        if ready[best] > start:
            stop = int(ready[best])
            taken.setdefault(Part(int(siblings[best]), start, stop), []).append(slot)
            table.computed[slot] = stop
            table.known[slot] = max(int(table.known[slot]), stop)
    return taken


def next_step(table: SlotTable, prefill_tokens: int, *, share: bool) -> Step:
    """Divide the next step and enter it into the table as computed. There is at least one live row."""
    slots = table.live()
    starts = table.computed[slots]
    todo = table.length[slots] - starts
    widths = todo
    prompts = (todo > 1).nonzero()[0]
    if len(prompts) and (share or todo[prompts].sum() > prefill_tokens):
        prompts = prompts[np.lexsort((table.arrival[slots[prompts]], -table.priority[slots[prompts]]))]
        waits = _waits(table, slots[prompts]) if share else np.zeros(len(prompts), np.bool_)
        wanted = np.where(waits, 0, todo[prompts])
        before = np.cumsum(wanted) - wanted
        widths = todo.copy()
        widths[prompts] = np.minimum(np.maximum(prefill_tokens - before, 0), wanted)
        chosen = widths > 0
        if not chosen.all():
            slots, starts, todo, widths = slots[chosen], starts[chosen], todo[chosen], widths[chosen]
    ends = starts + widths
    known = table.known[slots]
    again = np.maximum(np.minimum(ends, known) - starts, 0)
    table.rebuilt[slots] += again
    table.prefilled[slots] += np.maximum(np.minimum(ends, table.n_context[slots]) - np.maximum(starts, known), 0)
    table.known[slots] = np.maximum(known, ends)
    table.computed[slots] = ends
    work = table.work
    work.steps, work.rows = work.steps + 1, work.rows + len(slots)
    work.tokens, work.context = work.tokens + int(widths.sum()), work.context + int(ends.sum())
    return Step(slots=slots, starts=starts, widths=widths, complete=widths == todo, rebuilt_tokens=int(again.sum()))


def _prompts(table: SlotTable) -> list[int]:
    """Live slots with more to compute than one token."""
    slots = table.live()
    prompts: list[int] = slots[table.length[slots] - table.computed[slots] > 1].tolist()
    return prompts


def _waits(table: SlotTable, prompts: Ints) -> NDArray[np.bool_]:
    """Which of the prompts, in the order of their turn, wait for one before them that will have more of their tokens."""
    waits = np.zeros(len(prompts), np.bool_)
    turn = {slot: at for at, slot in enumerate(prompts.tolist())}
    for slot, at in turn.items():
        ahead = [sibling for sibling in table.siblings(slot).tolist() if turn.get(sibling, at) < at]
        if ahead:
            common = table.common(slot, np.array(ahead))
            # What is ready was taken over before; the rest of what is common is still to come.
            waits[at] = ((common > table.computed[slot]) & (common >= WORTH_WAITING_TOKENS)).any()
    return waits
