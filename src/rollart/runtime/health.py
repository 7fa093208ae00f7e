"""Whether the control loop keeps up: how late it wakes, and what it stood still in when it did.

Owns a heartbeat in the loop and a thread that looks when a beat is overdue. Invariants: an idle loop is woken 10 times a
second and no more; a standstill is told with the place where it was seen, never guessed; a process that the machine gave
no time is told as that, not as a call that blocks; at most one advisory per report.

One call that computes or waits inside the loop delays every trajectory, engine and deadline at once, and nothing else
shows it. A call that keeps the interpreter's lock all the while (`json.dumps` of much) keeps the watching thread from
looking as well; but the lock is handed over in the instant in which that call returns, with its caller's line still on the
stack. (`faulthandler`'s watchdog would not wait for the lock, and now and then ends the process: it walks a stack that
moves under it.)
"""

from __future__ import annotations

import asyncio
import linecache
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

BEAT_S = 0.1
"""Between two heartbeats: 10 wake-ups a second beside the thousands of a busy loop."""
LIMIT_S = 0.25
"""How late a beat may be before it is looked into: longer than what collecting a poll of many finished turns takes."""
REPORT_S = 10.0
"""Between two `loop_lag` events, and at least between two advisories."""
LOOK_S = 0.05
"""Between two looks at a loop that stands still."""
FEW_LOOKS = 2
"""As many fit between a suspended process waking and its loop coming round."""
MAX_LOOKS = 100
"""Looks that are kept of one standstill: the place is known after a few."""
BUSY_SHARE = 0.5
"""Share of a standstill that a thread must have computed for to be called computing."""
MACHINERY = frozenset({"asyncio", "selectors", "contextlib", "concurrent", "runpy"})
"""Modules that only call what others wrote."""
MAX_CODE_CHARS = 80
"""Of the source line that an advisory shows."""


class Record(Protocol):
    """`core.events.Recorder`."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class Look(NamedTuple):
    """One look at the loop's thread."""

    place: str
    """Empty: it was in the loop's own waiting."""
    runnable: bool
    """The system had it on a core or waiting for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """One time that the loop did not come round. Seconds, all of them."""

    waited_s: float
    loop_cpu_s: float
    """That the loop's thread computed."""
    process_cpu_s: float
    """That all threads of the process computed."""
    watch_late_s: float
    """How much later than asked for the watching thread itself woke, at worst."""
    looks: tuple[Look, ...]


def tell(still: Standstill) -> str:
    """In one line what the loop stood still in, or that the machine gave this process no time."""
    opening = f"the control loop stood still for {still.waited_s:.2g} s"
    places = Counter(look.place for look in still.looks if look.place)
    computed = still.loop_cpu_s >= min(LIMIT_S, BUSY_SHARE * still.waited_s)
    others_computed = still.process_cpu_s - still.loop_cpu_s >= BUSY_SHARE * still.waited_s
    starved = not computed and not others_computed and (not places or _was_kept_waiting(still))
    if starved:
        return (
            f"{opening}, but it was not blocked by a call: the machine gave this process no time (suspended, or its cores "
            f"are shared by too many; the loop computed for {still.loop_cpu_s:.2g} s of it)"
        )
    beside = "; other threads of this process computed meanwhile" if others_computed and not computed else ""
    if computed and still.loop_cpu_s < BUSY_SHARE * still.waited_s:
        beside = f"; it had a core for {still.loop_cpu_s:.2g} s of it"
    if not places:
        return f"{opening}; it was back before the call could be seen{beside}"
    place, times = places.most_common(1)[0]
    share = "" if times == len(still.looks) else f" (seen there in {times} of {len(still.looks)} looks)"
    return f"{opening} in {place}{share}{beside}"


def _was_kept_waiting(still: Standstill) -> bool:
    """The loop would have run, or the watching thread could hardly look because it was as late as the loop."""
    runnable = sum(look.runnable for look in still.looks)
    watch_too = len(still.looks) <= FEW_LOOKS and still.watch_late_s >= BUSY_SHARE * still.waited_s
    return runnable > len(still.looks) / 2 or watch_too


@asynccontextmanager
async def watched(record: Record) -> AsyncIterator[None]:
    """Watch the running loop for as long as the block lasts.

    Records `loop_lag` every 10 s and at the end, and the advisory `loop_blocked` when the loop stood still for longer than
    LIMIT_S. Leave the block before the run's last event is recorded.
    """
    health = _Health(record, asyncio.get_running_loop())
    health.start()
    try:
        yield
    finally:
        health.stop()


@dataclass(slots=True)
class _Seen:
    """A look as it is taken; what it is called costs reading files, and is found out when it is told."""

    stack: list[Spot]
    runnable: bool = False


@dataclass(slots=True)
class _Shared:
    """What loop and watch tell each other. The watch only looks between `due_s` passing and the next beat."""

    thread: int
    """Identifier of the loop's thread."""
    native: int
    """The system's number of it."""
    due_s: float
    seen: list[_Seen] = field(default_factory=list)
    watch_late_s: float = 0.0


class _Health:
    def __init__(self, record: Record, loop: asyncio.AbstractEventLoop) -> None:
        self._record = record
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._shared = _Shared(threading.get_ident(), threading.get_native_id(), math.inf)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lags: list[float] = []
        self._since_s = loop.time()
        self._told_s = -math.inf
        self._untold: list[Standstill] = []
        self._cpu_s = (0.0, 0.0)

    def start(self) -> None:
        self._next()
        threading.Thread(
            target=_watch, args=(self._shared, self._lock, self._ended), name="loop-health", daemon=True
        ).start()

    def stop(self) -> None:
        """Idempotent."""
        if self._handle is None:
            return
        self._handle.cancel()
        # a block that ends with the watched code has delayed a beat that now never comes
        self._measure(self._loop.time())
        self._handle = None
        self._ended.set()
        self._report(self._loop.time())
        self._advise(self._loop.time(), last=True)

    def _next(self) -> None:
        self._cpu_s = (time.thread_time(), time.process_time())
        due_s = self._loop.time() + BEAT_S
        with self._lock:
            self._shared.due_s = time.monotonic() + BEAT_S
            self._shared.seen.clear()
            self._shared.watch_late_s = 0.0
        self._due_s = due_s
        self._handle = self._loop.call_at(due_s, self._beat)

    def _beat(self) -> None:
        now = self._loop.time()
        self._measure(now)
        if now - self._since_s >= REPORT_S:
            self._report(now)
        self._advise(now)
        self._next()

    def _measure(self, now: float) -> None:
        lag = max(0.0, now - self._due_s)
        self._lags.append(lag)
        if lag < LIMIT_S:
            return
        with self._lock:
            looks = tuple(Look(place_of(one.stack), one.runnable) for one in self._shared.seen)
            late = self._shared.watch_late_s
        if not looks:
            late = lag  # the watching thread has not come to look at all
        self._untold.append(
            Standstill(
                waited_s=lag, loop_cpu_s=time.thread_time() - self._cpu_s[0],
                process_cpu_s=time.process_time() - self._cpu_s[1], watch_late_s=late, looks=looks,
            )
        )  # fmt: skip

    def _report(self, now: float) -> None:
        lags = sorted(self._lags)
        if lags:
            p99 = lags[math.ceil(0.99 * len(lags)) - 1]
            self._record(
                "loop_lag", worst_s=round(lags[-1], 6), p99_s=round(p99, 6), seconds=round(now - self._since_s, 3)
            )
        self._lags, self._since_s = [], now

    def _advise(self, now: float, *, last: bool = False) -> None:
        """The longest standstill since the last advisory; the end waits for no rate."""
        if not self._untold or (now - self._told_s < REPORT_S and not last):
            return
        worst = max(self._untold, key=lambda still: still.waited_s)
        others = len(self._untold) - 1
        more = f"; {others} shorter one{'s' * (others > 1)} since the last word of this" if others else ""
        self._record("advisory", code="loop_blocked", text=tell(worst) + more)
        self._untold, self._told_s = [], now


# --- the thread that looks -----------------------------------------------------------------------------------------------


def _watch(shared: _Shared, lock: threading.Lock, ended: threading.Event) -> None:
    """Sleeps until the next beat would be overdue; looks, again and again, while one is."""
    while True:
        with lock:
            until_s = shared.due_s + LIMIT_S
        asked_s = time.monotonic()
        wait_s = max(until_s - asked_s, LOOK_S)
        if ended.wait(wait_s):
            return
        now_s = time.monotonic()
        # nothing from here to the look gives the interpreter's lock away, or a call that kept it would be back in the loop
        stack = live_stack(sys._current_frames().get(shared.thread))
        with lock:
            if now_s < shared.due_s + LIMIT_S:  # beats came meanwhile
                continue
            seen = _Seen(stack)
            shared.watch_late_s = max(shared.watch_late_s, now_s - asked_s - wait_s)
            if len(shared.seen) < MAX_LOOKS:
                shared.seen.append(seen)
        seen.runnable = _runnable(shared.native)


def _runnable(native: int) -> bool:
    with suppress(OSError):
        text = Path(f"/proc/self/task/{native}/stat").read_text(encoding="utf-8", errors="replace")
        return text[text.rindex(")") + 2] == "R"
    return False


class Spot(NamedTuple):
    """One call of a stack."""

    path: str
    """As it is imported, so that the record is the same on every machine."""
    line: int
    function: str
    file: str

    @property
    def package(self) -> str:
        return self.path.partition("/")[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


def place_of(stack: Sequence[Spot]) -> str:
    """`file:line in function: source line`, and by whom in this package it was called where that is not the same.

    `stack`: the innermost call first. Empty where it holds nothing but the loop's own machinery.
    """
    inner = next((spot for spot in stack if spot.package not in MACHINERY), None)
    # in the loop's own wait for whatever comes next, or between two callbacks
    if inner is None or stack[0].package == "selectors" or stack[0].function.endswith("_run_once"):
        return ""
    ours = next((spot for spot in stack if spot.package == "rollart"), None)
    code = linecache.getline(inner.file, inner.line).strip()[:MAX_CODE_CHARS]
    where = f"{inner}: `{code}`" if code else str(inner)
    return where if ours is None or ours is inner else f"{where} (called by {ours})"


def live_stack(frame: FrameType | None) -> list[Spot]:
    """The calls from `frame` outwards."""
    stack: list[Spot] = []
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        depth = len(module.split(".")) + (Path(code.co_filename).stem == "__init__")
        path = "/".join(Path(code.co_filename).parts[-depth:])
        # some instructions belong to no line
        stack.append(Spot(path, frame.f_lineno or code.co_firstlineno, code.co_qualname, code.co_filename))
        frame = frame.f_back
    return stack
