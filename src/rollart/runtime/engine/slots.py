"""Who sits in which slot: the state of every row of the cache as arrays, one entry per slot.

Owns the book of the cache, not its tensors. Invariants: of a slot's `length` tokens the first `computed` have valid keys and
values under the served weights; the first `known` were computed at some time, so computing them again is a rebuild; a live row
has `computed` < `length`. An idle slot keeps the tokens of a trajectory between its turns and is found again by the
trajectory's key; what is matched is the longest common prefix of token ids, so a changed history is never reused.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollart.core.types import Sampling, Span, TrajId, TurnRequest, Version
from rollart.runtime.engine.cache import Ints
from rollart.runtime.engine.sampler import Special, stream_key, uniforms

FREE, IDLE, LIVE = 0, 1, 2
GHOST_RATIO = 4
"""Token ids of evicted slots are remembered for up to 4x the cache's tokens, to tell a rebuild from a first computation;
4 bytes each beside kilobytes of keys and values."""
MAX_STOP_IDS = 8
"""Columns of the stop table; more stop ids than that are refused."""


class SlotKey(NamedTuple):
    """Whose tokens a slot keeps."""

    traj: TrajId
    attempt: int


@dataclass(slots=True, kw_only=True)
class Row:
    """One request. Its tokens are here while it waits, in its slot while it is live."""

    request: TurnRequest
    key: SlotKey
    arrival: int
    """Rises with every request: first in, first out within a priority."""
    ids: NDArray[np.int32]
    """Context and what was sampled so far."""
    n_context: int
    slot: int | None = None
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    log_kept: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[Span] = field(default_factory=list)
    """Closed runs of one version; the open run began after their tokens."""
    prefilled: int = 0
    rebuilt: int = 0

    def close_span(self, n_sampled: int, version: Version) -> None:
        """What was sampled since the last closed span was sampled under `version`."""
        run = n_sampled - sum(span.n_tokens for span in self.spans)
        if run and self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version=version, n_tokens=self.spans[-1].n_tokens + run)
        elif run:
            self.spans.append(Span(version=version, n_tokens=run))


@dataclass(slots=True)
class Work:
    """What all steps together computed so far: from this a cost per step, row and token is fitted."""

    steps: int = 0
    rows: int = 0
    """Of all steps; a row that reads a prompt counts as one that decodes."""
    tokens: int = 0
    """Positions that were computed."""
    context: int = 0
    """Tokens that the rows attended to, each row's own included."""


class SlotTable:
    """State of `slots` rows of `capacity` tokens. Starts empty; `repack` gives it size, together with the cache."""

    def __init__(self, purposes: tuple[str, ...], kv_tokens: int) -> None:
        self._purposes = purposes
        self._ghost_limit = GHOST_RATIO * kv_tokens
        self._ghost_tokens = 0
        self._ghosts: OrderedDict[SlotKey, NDArray[np.int32]] = OrderedDict()
        self._idle: dict[SlotKey, int] = {}
        self._groups: dict[str, set[int]] = {}
        """Slots, live or idle, of the trajectories of a group."""
        self._tick = 0
        self.n_live = 0
        self.work = Work()
        self.rows: list[Row | None] = []
        self.keys: list[SlotKey | None] = []
        self._allocate(0, 0)

    def _allocate(self, slots: int, capacity: int) -> None:
        def ints() -> Ints:
            return np.zeros(slots, np.int64)

        self.ids = np.zeros((slots, capacity), np.int32)
        self.logprobs = np.zeros((slots, capacity), np.float32)
        self.log_kept = np.zeros((slots, capacity), np.float32)
        self.state = np.zeros(slots, np.int8)
        self.length, self.computed, self.known = ints(), ints(), ints()
        self.n_context, self.limit, self.used = ints(), ints(), ints()
        self.prefilled, self.rebuilt = ints(), ints()
        self.priority, self.arrival, self.purpose = ints(), ints(), ints()
        self.family = ints()
        """Equal for slots of one group, a number of its own for one without; what is equal by chance does no harm."""
        self.stream = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.plain = np.ones(slots, np.bool_)
        """Temperature 1 and nothing truncated."""
        self.greedy, self.truncates = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
        self.top_k, self.top_p, self.min_p = ints(), np.ones(slots), np.zeros(slots)
        self.stop = np.full((slots, MAX_STOP_IDS), -1, np.int32)

    @property
    def capacity(self) -> int:
        return self.ids.shape[1]

    def live(self) -> Ints:
        """Live slots, rising."""
        slots: Ints = (self.state == LIVE).nonzero()[0]
        return slots

    def has_room(self) -> bool:
        return self.n_live < len(self.state)

    def uniforms(self, slots: Ints) -> NDArray[np.float64]:
        """One number in (0, 1) for the next token of each slot."""
        return uniforms(self.stream[slots], self.length[slots])

    def special(self, slots: Ints) -> Special | None:
        """Sampling parameters of slots; None when all are plain."""
        if self.plain[slots].all():
            return None
        return Special(
            greedy=self.greedy[slots],
            temperature=self.temperature[slots],
            truncates=self.truncates[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
        )

    def siblings(self, slot: int) -> Ints:
        """Other slots of the same group, rising; empty for a trajectory that belongs to none."""
        key = self.keys[slot]
        group = self._groups.get(_group(key), set()) if key is not None else set()
        return np.array(sorted(group - {slot}), np.int64)

    def common(self, slot: int, others: Ints) -> Ints:
        """How many leading tokens of a slot each of the others has too; the slot's last token is not counted."""
        n = int(self.length[slot]) - 1
        unlike = self.ids[others, :n] != self.ids[slot, :n]
        first: Ints = np.where(unlike.any(1), unlike.argmax(1), n)
        return np.minimum(first, self.length[others])

    # --- rows come and go ---------------------------------------------------------------------------------------

    def admit(self, row: Row) -> None:
        """Give a waiting row a slot: the one that kept its trajectory, a free one, or the one unused for longest."""
        slot = self._idle.pop(row.key, None)
        n = len(row.ids)
        if slot is not None:
            common = _common_prefix(self.ids[slot, : self.length[slot]], row.ids)
            computed, known = min(int(self.computed[slot]), common), min(int(self.known[slot]), common)
        else:
            slot = self._take_slot()
            ghost = self._drop_ghost(row.key)
            computed, known = 0, 0 if ghost is None else _common_prefix(ghost, row.ids)
        if computed == n:
            # The last token is computed again for its logits only: it counts as cached, so one less is prefilled.
            computed, known, row.prefilled = n - 1, n - 1, row.prefilled - 1
        self.ids[slot, :n] = row.ids
        self.logprobs[slot, row.n_context : n] = row.logprobs
        self.log_kept[slot, row.n_context : n] = row.log_kept
        self.state[slot], self.length[slot], self.computed[slot], self.known[slot] = LIVE, n, computed, known
        self.n_context[slot], self.limit[slot] = row.n_context, row.n_context + row.request.max_tokens
        self.prefilled[slot], self.rebuilt[slot] = row.prefilled, row.rebuilt
        self.priority[slot], self.arrival[slot] = row.request.priority, row.arrival
        self.purpose[slot] = self._purposes.index(row.request.purpose)
        self._set_sampling(slot, row.request.sampling)
        self.rows[slot], self.keys[slot], row.slot = row, row.key, slot
        self._join(slot)
        self.n_live += 1

    def release(self, row: Row) -> None:
        """Take a row out of its slot, tokens and all; the slot keeps them for the trajectory's next turn."""
        slot = row.slot
        assert slot is not None
        n = int(self.length[slot])
        sampled = slice(row.n_context, n)
        row.ids = self.ids[slot, :n].copy()
        row.logprobs, row.log_kept = self.logprobs[slot, sampled].copy(), self.log_kept[slot, sampled].copy()
        row.prefilled, row.rebuilt, row.slot = int(self.prefilled[slot]), int(self.rebuilt[slot]), None
        self._tick += 1
        self.n_live -= 1
        self.rows[slot], self.state[slot], self.used[slot] = None, IDLE, self._tick
        older = self._idle.pop(row.key, None)
        if older is not None:
            self._free(older)
        self._idle[row.key] = slot

    def forget(self, key: SlotKey) -> None:
        """The trajectory has ended: its slot is free, its ghost gone."""
        self._drop_ghost(key)
        slot = self._idle.pop(key, None)
        if slot is not None:
            self._free(slot)

    def invalidate(self) -> None:
        """New weights: no key or value is valid any more; all of them are known."""
        self.computed[:] = 0

    def repack(self, slots: int, capacity: int) -> Ints:
        """Change size. Keeps live rows, then the idle ones used last; returns the old slots that were kept, in order."""
        live = self.live()
        idle = np.flatnonzero((self.state == IDLE) & (self.length <= capacity))
        idle = idle[np.argsort(-self.used[idle])][: slots - len(live)]
        kept = np.sort(np.concatenate([live, idle])).astype(np.int64)
        for slot in set(self._idle.values()) - set(kept.tolist()):
            self._evict(slot)
        old = {name: array for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        self._allocate(slots, capacity)
        for name, array in old.items():
            new = getattr(self, name)
            if array.ndim == 2 and name != "stop":
                shared = min(capacity, array.shape[1])
                new[: len(kept), :shared] = array[kept, :shared]
            else:
                new[: len(kept)] = array[kept]
        self.rows = [self.rows[slot] for slot in kept] + [None] * (slots - len(kept))
        self.keys = [self.keys[slot] for slot in kept] + [None] * (slots - len(kept))
        moved = {int(before): after for after, before in enumerate(kept)}
        self._idle = {key: moved[slot] for key, slot in self._idle.items()}
        for slot, row in enumerate(self.rows):
            if row is not None:
                row.slot = slot
        self._groups = {}
        for slot in range(len(kept)):
            self._join(slot)
        return kept

    def _join(self, slot: int) -> None:
        key = self.keys[slot]
        self.family[slot] = -1 - slot
        if key is not None and (group := _group(key)):
            self._groups.setdefault(group, set()).add(slot)
            self.family[slot] = zlib.crc32(group.encode())

    def _take_slot(self) -> int:
        free = np.flatnonzero(self.state == FREE)
        if len(free):
            return int(free[0])
        idle = np.flatnonzero(self.state == IDLE)
        slot = int(idle[self.used[idle].argmin()])
        self._evict(slot)
        return slot

    def _evict(self, slot: int) -> None:
        """Lose an idle slot's cache; remember which tokens it held."""
        key = self.keys[slot]
        assert key is not None
        del self._idle[key]
        self._drop_ghost(key)
        self._ghosts[key] = self.ids[slot, : self.known[slot]].copy()
        self._ghost_tokens += int(self.known[slot])
        while self._ghost_tokens > self._ghost_limit:
            self._ghost_tokens -= len(self._ghosts.popitem(last=False)[1])
        self._free(slot)

    def _drop_ghost(self, key: SlotKey) -> NDArray[np.int32] | None:
        ghost = self._ghosts.pop(key, None)
        self._ghost_tokens -= 0 if ghost is None else len(ghost)
        return ghost

    def _free(self, slot: int) -> None:
        key = self.keys[slot]
        if key is not None and (members := self._groups.get(_group(key))):
            members.discard(slot)
            if not members:
                del self._groups[_group(key)]
        self.state[slot], self.keys[slot] = FREE, None
        self.length[slot] = self.computed[slot] = self.known[slot] = 0

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        greedy = sampling.temperature == 0.0
        self.stream[slot] = stream_key(sampling.seed)
        self.greedy[slot], self.temperature[slot] = greedy, 1.0 if greedy else sampling.temperature
        self.truncates[slot] = sampling.truncates and not greedy
        self.plain[slot] = sampling.temperature == 1.0 and not sampling.truncates
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = sampling.top_k, sampling.top_p, sampling.min_p
        self.stop[slot] = -1
        self.stop[slot, : len(sampling.stop_ids)] = sampling.stop_ids


def _group(key: SlotKey) -> str:
    """The trajectory's id without its member; empty for one that belongs to no group."""
    return key.traj.rpartition("/")[0]


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading ids are equal."""
    shared = min(len(a), len(b))
    different = np.flatnonzero(a[:shared] != b[:shared])
    return int(different[0]) if len(different) else shared
