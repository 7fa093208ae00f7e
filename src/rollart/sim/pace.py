"""How fast requests in a simulated engine come by their tokens: each at a rate of its own, or all in one batch.

Owns the seam between an engine's port (versions, book, applies) and its time. Invariants: `tokens` never falls while a request
is in, and is what `stop` returns; `done` is called in the instant in which the last wanted token is there, once, unless the
request was stopped before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

ROUNDING = 1e-7
"""Of a token: what sums of floating-point seconds may lack of a whole one."""


class Stopped(NamedTuple):
    """What a request came by since it was started."""

    tokens: int
    reread: int = 0
    """Tokens that were computed again in between, because a preemption threw their cache away."""
    unread: int = 0
    """Tokens that have no cache because their reading was cut short: of `Work.read` before anything is sampled; later, of a
    request that was preempted, of its context and its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request, as a device sees it."""

    read: int
    """Tokens of the context to be computed first."""
    context: int
    """Tokens of the context, cached ones included."""
    wanted: int
    """Tokens to be sampled."""
    slowness: float = 1.0
    priority: int = 0


class Pace(Protocol):
    def start(self, key: Hashable, work: Work, done: Callable[[], None]) -> None: ...

    def tokens(self, key: Hashable) -> int:
        """Tokens sampled since the start."""
        ...

    def stop(self, key: Hashable) -> Stopped:
        """Take a request out; one that is not in has nothing."""
        ...


class _Own(NamedTuple):
    since_s: float
    """When all is read."""
    token_s: float
    wanted: int
    timer: asyncio.TimerHandle


class EachAlone:
    """A fixed time per token, whatever else is in the engine: exact, and enough where only order and faults matter."""

    def __init__(self, token_s: float, read_token_s: float) -> None:
        self._token_s = token_s
        self._read_token_s = read_token_s
        self._own: dict[Hashable, _Own] = {}

    def start(self, key: Hashable, work: Work, done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        token_s = self._token_s * work.slowness
        since_s = loop.time() + work.read * self._read_token_s
        timer = loop.call_at(since_s + work.wanted * token_s, self._done, key, done)
        self._own[key] = _Own(since_s, token_s, work.wanted, timer)

    def _done(self, key: Hashable, done: Callable[[], None]) -> None:
        own = self._own[key]
        self._own[key] = own._replace(since_s=-float("inf"), token_s=1.0)  # all of them, whatever rounding says
        done()

    def tokens(self, key: Hashable) -> int:
        own = self._own.get(key)
        if own is None:
            return 0
        elapsed = asyncio.get_running_loop().time() - own.since_s
        if own.token_s == 0 or elapsed <= 0:
            return 0  # without a rate all of them come in the instant in which the turn ends
        return int(min(own.wanted, elapsed / own.token_s + ROUNDING))

    def stop(self, key: Hashable) -> Stopped:
        tokens = self.tokens(key)
        own = self._own.pop(key, None)
        if own is None:
            return Stopped(0)
        own.timer.cancel()
        left_s = own.since_s - asyncio.get_running_loop().time()
        return Stopped(tokens, unread=math.ceil(left_s / self._read_token_s - ROUNDING) if left_s > 0 else 0)
