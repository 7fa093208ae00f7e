"""Which prefixes a simulated engine has keys and values of: those of attempts between their turns, and prompts of groups.

Invariant: what is taken is counted once, as cached, as known before (a rebuild) or as new; `idle_tokens` is the sum over what
is kept and valid. Kept prefixes that were evicted or are of older weights are remembered by length, to tell a rebuild from a
first computation. A prompt that siblings share is held by each of them: a little more cache is taken than a real engine needs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from rollart.core.types import TrajId

Key = tuple[TrajId, int]
"""Trajectory and attempt."""


class Taken(NamedTuple):
    """Of a context's tokens."""

    new: int
    """To be computed for the first time."""
    rebuilt: int
    """To be computed again."""


class Prefixes:
    def __init__(self, *, shares: bool = False) -> None:
        """`shares`: siblings of a group find its prompt, once one of them has begun to read it."""
        self._shares = shares
        self._valid: OrderedDict[Key, int] = OrderedDict()
        self._past: dict[Key, int] = {}
        self._prompts: dict[str, int] = {}
        self.idle_tokens = 0

    def take(self, key: Key, n_tokens: int) -> Taken:
        """An attempt goes on with a context of `n_tokens`: what of it has to be computed."""
        valid = self._valid.pop(key, 0)
        self.idle_tokens -= valid
        past = min(n_tokens, self._past.pop(key, 0)) if not valid else 0
        shared = 0
        if self._shares and not valid:
            group = key[0].rpartition("/")[0]
            shared = self._prompts.get(group, 0)
            self._prompts.setdefault(group, n_tokens)
        known = min(n_tokens, max(valid, shared))
        return Taken(new=n_tokens - max(known, past), rebuilt=max(0, past - known))

    def keep(self, key: Key, n_tokens: int) -> None:
        """Nothing is computed for the attempt any more; its tokens stay while there is room."""
        self.idle_tokens += n_tokens - self._valid.pop(key, 0)
        self._valid[key] = n_tokens

    def drop(self, key: Key) -> None:
        """Keep nothing of it but its length."""
        valid = self._valid.pop(key, 0)
        if valid:
            self.idle_tokens -= valid
            self._past[key] = valid

    def invalidate(self) -> None:
        """Other weights: nothing is valid, all of it is known."""
        self._past.update(self._valid)
        self._valid.clear()
        self._prompts.clear()
        self.idle_tokens = 0

    def evict(self, tokens: float) -> float:
        """Give up what was unused for longest, until so many tokens are free; returns how many are."""
        freed = 0
        while freed < tokens and self._valid:
            key, n_tokens = self._valid.popitem(last=False)
            self._past[key] = n_tokens
            freed += n_tokens
        self.idle_tokens -= freed
        return freed

    def forget(self, key: Key) -> None:
        self.idle_tokens -= self._valid.pop(key, 0)
        self._past.pop(key, None)
