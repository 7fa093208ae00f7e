"""An asyncio event loop on virtual time: sleeping costs nothing, and the same program gives the same interleaving.

Invariants: time moves only when nothing is ready; equal deadlines wake in the order in which they were set; nothing from
outside the loop (thread, executor, socket) can reach it. When nothing is scheduled and nobody can wake, it raises
`DeadlockError` with the names of the waiting tasks instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar

from rollart.core.errors import DeadlockError

T = TypeVar("T")

CANCELLED_TIMERS_KEPT = 512
"""Cancelled timers tolerated in the heap before it is rebuilt; nearly every deadline is cancelled before it is due."""


class _Timer(asyncio.TimerHandle):
    """A timer that breaks ties by the order in which it was set; stock asyncio leaves that to the heap's whims."""

    __slots__ = ("seq",)
    seq: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.seq) < (other.when(), other.seq)


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded, closed world. `time()` starts at 0.0 seconds."""

    # attributes of asyncio.BaseEventLoop that typeshed does not list
    _ready: Any
    _scheduled: list[_Timer]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers = 0
        self._cancelled = 0

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.seq = self._timers
        self._timers += 1
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > CANCELLED_TIMERS_KEPT and self._cancelled * 2 > len(self._scheduled):
            self._scheduled = [timer for timer in self._scheduled if not timer.cancelled()]
            heapq.heapify(self._scheduled)
            self._cancelled = 0

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        """Move time to the next deadline and make everything due then ready, in the order in which it was set."""
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)
            self._cancelled -= 1
        if not scheduled:
            raise DeadlockError([_waiting(task) for task in sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name)])
        self._now_s = max(self._now_s, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now_s:
            timer = heapq.heappop(scheduled)
            if timer.cancelled():
                self._cancelled -= 1
            else:
                self._ready.append(timer)

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no other threads: call_soon_threadsafe is not available")

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no executor: do the work in the loop, or give it to a port")

    def _make_socket_transport(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("virtual time has no sockets")

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


def _waiting(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=8)
    where = f" at {frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else ""
    return f"{task.get_name()}{where}"


def run(main: Coroutine[Any, Any, T], *, loop: VirtualLoop | None = None) -> T:
    """Run `main` on virtual time to its end, cancel what it left behind, and return its result.

    Raises DeadlockError when nobody can wake, and RuntimeError when tasks refuse to end on cancellation.
    """
    loop = loop or VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
