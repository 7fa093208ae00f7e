"""Which prefixes a simulated engine has keys and values of: those of attempts between their turns, and prompts of groups.

Invariant: what is taken is counted once, as cached, as known before (a rebuild) or as new; `idle_tokens` is the sum over what
is kept and valid. What was computed once is remembered by length, to tell a rebuild from a first computation. Siblings of a
group share their prompt and no more, as long as one of them holds it: what follows it is each one's own. A prompt that
siblings share is held by each of them: a little more cache is taken than a real engine needs.
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


NOTHING = Taken(new=0, rebuilt=0)


class Prefixes:
    def __init__(self, *, shares: bool = False) -> None:
        """`shares`: siblings of a group find its prompt, once one of them has begun to read it."""
        self._shares = shares
        self._valid: OrderedDict[Key, int] = OrderedDict()
        self._computed: dict[Key, int] = {}
        """The most of each attempt that was ever computed here."""
        self._prompts: dict[str, dict[Key, int]] = {}
        """Group -> who of it holds how many tokens of its prompt."""
        self.idle_tokens = 0

    def take(self, key: Key, n_tokens: int, *, prompt: int = 0) -> Taken:
        """An attempt goes on with a context of `n_tokens`: what of it has to be computed.

        `prompt`: how many of them come before the first that it sampled, which are its siblings' as well.
        """
        valid = self._valid.pop(key, 0)
        self.idle_tokens -= valid
        computed = min(n_tokens, self._computed.get(key, 0))
        shared = 0
        if self._shares and prompt:
            holders = self._prompts.setdefault(key[0].rpartition("/")[0], {})
            if valid < prompt:
                shared = min(prompt, max(holders.values(), default=0))
            holders[key] = prompt
        known = min(n_tokens, max(valid, shared))
        return Taken(new=n_tokens - max(known, computed), rebuilt=max(0, computed - known))

    def keep(self, key: Key, n_tokens: int) -> None:
        """Nothing is computed for the attempt any more; so many of its tokens stay while there is room."""
        self.idle_tokens += n_tokens - self._valid.pop(key, 0)
        self._computed[key] = max(n_tokens, self._computed.get(key, 0))
        if n_tokens:
            self._valid[key] = n_tokens
        self._hold(key, n_tokens)

    def _hold(self, key: Key, n_tokens: int) -> None:
        """So much of the attempt is there: of its group's prompt no more than that, and nothing once it is gone."""
        group = key[0].rpartition("/")[0]
        holders = self._prompts.get(group)
        if holders is None or key not in holders:
            return
        holders[key] = min(holders[key], n_tokens)
        if not n_tokens:
            del holders[key]
        if not holders:
            del self._prompts[group]

    def drop(self, key: Key) -> None:
        """Keep nothing of it but its length."""
        self.idle_tokens -= self._valid.pop(key, 0)
        self._hold(key, 0)

    def invalidate(self) -> None:
        """Other weights: nothing is valid, all of it is known."""
        self._valid.clear()
        self._prompts.clear()
        self.idle_tokens = 0

    def evict(self, tokens: float) -> float:
        """Give up what was unused for longest, until so many tokens are free; returns how many are."""
        freed = 0
        while freed < tokens and self._valid:
            key, n_tokens = self._valid.popitem(last=False)
            freed += n_tokens
            self._hold(key, 0)
        self.idle_tokens -= freed
        return freed

    def forget(self, key: Key) -> None:
        self.idle_tokens -= self._valid.pop(key, 0)
        self._computed.pop(key, None)
        self._hold(key, 0)
