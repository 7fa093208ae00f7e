"""Requests and their answers over any wire: each request is answered once, duplicates and late answers are counted.

Worlds build their engine, environment and scorer ports on it. Invariant: an answer reaches the first asker only; what
comes twice, or for a request that nobody waits for any more, goes to `on_orphan` and is otherwise ignored.

Answers are handed out in slices, so that a burst of thousands (one poll of a large engine) cannot hold the loop: between
two slices every other ready coroutine gets its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")

SLICE = 8
"""Answers handed out per turn of the loop. A waking trajectory costs about 0.1 ms until it waits again, and there is an
exchange for every engine and host: a slice of each must not hold the loop for long."""


class Exchange(Generic[K, A]):
    def __init__(self, on_orphan: Callable[[K, A], None]) -> None:
        self._waiting: dict[K, asyncio.Future[A]] = {}
        self._pending: dict[K, A] = {}
        self._queue: deque[K] = deque()
        self._on_orphan = on_orphan
        self._delivering = False

    async def ask(self, key: K) -> A:
        """Wait for the answer to `key`. Cancelling it makes a later answer an orphan."""
        if key in self._waiting:
            raise RuntimeError(f"request {key!r} is already waited for; a request id is unique for ever")
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await future
        except asyncio.CancelledError:
            if key in self._pending:
                self._on_orphan(key, self._pending.pop(key))
            raise
        finally:
            del self._waiting[key]
        return self._pending.pop(key)

    def answer(self, answers: Iterable[tuple[K, A]]) -> None:
        """Answers have come in; hand them out, a slice now and the rest in the loop's next turns."""
        for key, answer in answers:
            if key not in self._waiting or key in self._pending:
                self._on_orphan(key, answer)
            else:
                self._pending[key] = answer
                self._queue.append(key)
        if self._queue and not self._delivering:
            self._delivering = True
            self._deliver()

    def _deliver(self) -> None:
        for _ in range(min(SLICE, len(self._queue))):
            key = self._queue.popleft()
            future = self._waiting.get(key)
            if future is not None and not future.done() and key in self._pending:
                future.set_result(self._pending[key])
        if self._queue:
            asyncio.get_running_loop().call_soon(self._deliver)
        else:
            self._delivering = False

    @property
    def pending(self) -> Mapping[K, A]:
        """Answers that have come in and have not reached their asker yet."""
        return self._pending

    @property
    def waiting(self) -> tuple[K, ...]:
        """Requests without an answer."""
        return tuple(key for key in self._waiting if key not in self._pending)
