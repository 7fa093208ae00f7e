"""How published versions get into the store: one at a time, and of those that wait the newest.

Invariant: at most two versions are of use to anyone, the one that is pushed and the newest behind it. A version that was
overtaken while it waited is never there, and whoever waits for it is told when the push before it ends, so that engines stay at
most two pushes behind a trainer that nothing holds up. Source: RollArt (arXiv 2512.22560), which keeps two published versions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Bytes:
    """Where a published version's bytes are."""

    gone: bool = False
    """Lost with whoever published them."""
    overtaken: bool = False
    """They never come into the store: a newer version went before them."""
    there: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all of them are in the store, and when they never will be."""

    def lose(self) -> None:
        self.gone = True
        self.there.set()


class Pushes:
    """Of one trainer; a push takes `push_s`."""

    def __init__(self, push_s: float) -> None:
        self._push_s = push_s
        self._waiting: list[tuple[float, Bytes]] = []
        """When it was published, in that order."""
        self._under_way = False

    def begin(self) -> Bytes:
        """Another version is published; returns where its bytes are."""
        published = Bytes()
        if self._push_s <= 0:
            published.there.set()
            return published
        self._waiting.append((asyncio.get_running_loop().time(), published))
        if not self._under_way:
            self._next()
        return published

    def _next(self) -> None:
        """Push the newest that waits. One of this very instant overtakes nobody yet: who follows does not know of it."""
        loop = asyncio.get_running_loop()
        known = sum(at_s < loop.time() for at_s, _ in self._waiting)
        first = max(0, known - 1)
        for _, late in self._waiting[:first]:
            late.overtaken = True
            late.there.set()
        _, newest = self._waiting[first]
        del self._waiting[: first + 1]
        self._under_way = True
        loop.call_later(self._push_s, self._pushed, newest)

    def _pushed(self, version: Bytes) -> None:
        version.there.set()
        self._under_way = False
        if self._waiting:
            self._next()
