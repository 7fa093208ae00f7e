"""An asyncio event loop on virtual time: sleeping costs nothing, and the same program gives the same interleaving.

Invariants: time moves only when nothing is ready; equal deadlines wake in the order in which they were set; no order depends
on an address in memory; nothing from outside the loop (thread, executor, socket, process) can reach it. When nothing is
scheduled and nobody can wake, it raises `DeadlockError` with the names of the waiting tasks instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar

from rollart.core.errors import DeadlockError

T = TypeVar("T")

CANCELLED_TIMERS_KEPT = 512
"""Cancelled timers tolerated in the heap before it is rebuilt; nearly every deadline is cancelled before it is due."""


class _Handle(asyncio.Handle):
    """What asyncio's own does, made without its questions about debugging: millions are made."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    __slots__ = ()
    _scheduled: bool
    """In the heap and wanted: neither due nor cancelled yet."""

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True


_Entry = tuple[float, int, _Timer]
"""Ties are broken by the order in which timers were set; stock asyncio leaves that to the heap's whims."""


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number. Sets of tasks (a task group keeps one, and cancels it) are walked in the order of
    hashes; by default those are addresses, which differ from run to run."""

    __slots__ = ("seq",)

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None = None, **options: Any) -> None:
        self.seq = loop.tasks_made = loop.tasks_made + 1
        super().__init__(coro, loop=loop, name=name or f"Task-{self.seq}", **options)

    def __hash__(self) -> int:
        return self.seq


def _numbered(loop: Any, coro: Any, **options: Any) -> _Task:
    return _Task(coro, loop=loop, **options)


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded, closed world. `time()` starts at 0.0 seconds."""

    # attributes of asyncio.BaseEventLoop that typeshed does not list
    _ready: Any
    _scheduled: list[_Entry]
    _stopping: bool
    _closed: bool
    _asyncgens: Any
    _check_closed: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers = 0
        self._cancelled = 0
        self.tasks_made = 0
        self.set_task_factory(_numbered)

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            self._check_closed()
        if math.isnan(when):
            raise ValueError("a timer cannot be set for NaN seconds: it would never be due nor let others be")
        timer = _Timer(when, callback, args, self, context)
        self._timers += 1
        heapq.heappush(self._scheduled, (when, self._timers, timer))
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            self._check_closed()
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: _Timer) -> None:  # called before the handle is marked as cancelled
        if not handle._scheduled:  # already due: asyncio.sleep cancels its timer after every sleep
            return
        handle._scheduled = False
        self._cancelled += 1
        if self._cancelled > CANCELLED_TIMERS_KEPT and self._cancelled * 2 > len(self._scheduled):
            self._scheduled = [entry for entry in self._scheduled if entry[2]._scheduled]
            heapq.heapify(self._scheduled)
            self._cancelled = 0

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> None:
        """Move time to the next deadline and make everything due then ready, in the order in which it was set."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2]._cancelled:
            heapq.heappop(scheduled)
            self._cancelled -= 1
        if not scheduled or scheduled[0][0] == float("inf"):
            raise DeadlockError([_waiting(task) for task in _living(self)])
        self._now_s = now = max(self._now_s, scheduled[0][0])
        while scheduled and scheduled[0][0] <= now:
            timer = heapq.heappop(scheduled)[2]
            if timer._cancelled:
                self._cancelled -= 1
            else:
                timer._scheduled = False
                self._ready.append(timer)

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no other threads: call_soon_threadsafe is not available")

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no executor: do the work in the loop, or give it to a port")

    def _no_outside(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("virtual time has no sockets and no processes: reach the outside through a port")

    # what BaseEventLoop would do on real sockets and pipes; everything else of that kind it leaves to its subclasses
    create_connection = _no_outside
    create_server = _no_outside
    create_datagram_endpoint = _no_outside
    connect_accepted_socket = _no_outside
    subprocess_exec = _no_outside
    subprocess_shell = _no_outside

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Close a generator that was left half-way; asyncio's own hook comes from a thread for all it knows."""
        self._asyncgens.discard(agen)
        if not self.is_closed():
            self.call_soon(self.create_task, agen.aclose())

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


def _living(loop: VirtualLoop) -> list[asyncio.Task[Any]]:
    """The tasks of a loop that have not ended, in the order in which they were made."""
    return sorted(asyncio.all_tasks(loop), key=hash)


def _waiting(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=8)
    where = f" at {frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else ""
    return f"{task.get_name()}{where}"


def run(main: Coroutine[Any, Any, T], *, loop: VirtualLoop | None = None) -> T:
    """Run `main` on virtual time to its end, cancel what it left behind, and return its result.

    Raises DeadlockError when nobody can wake, also when a task that was left behind does not end on its cancellation. What
    such tasks raise goes to the loop's exception handler, as with `asyncio.run`.
    """
    loop = loop or VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(_living(loop), loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_all(tasks: list[asyncio.Task[Any]], loop: VirtualLoop) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            message = f"{task.get_name()} was left behind and failed when it was cancelled"
            loop.call_exception_handler({"message": message, "exception": error, "task": task})
