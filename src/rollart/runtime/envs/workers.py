"""Foreign code in threads, each call under its own deadline: the boundary where exceptions and hangs become failures.

Invariant: every job is answered exactly once, with its value or a Failure, at its deadline at the latest (plus one tick).
A thread cannot be stopped from outside, so one that overruns is abandoned: its job is answered as timed out, another
thread takes its place, and what it returns later goes nowhere. `freed` is called once, when no thread is in the job.
Abandoned threads count against `max_threads`: where all hang, jobs time out waiting, until a thread comes back.

A thread per call would cost more than the call itself for an environment that answers in microseconds. So one thread
serves a queue; more are started while calls wait behind slow ones, and retired when calls have long been fast. Never are there
more than calls: on a busy machine threads that were started get their turn later than the watch looks again.

What this cannot see: native code that keeps the interpreter's lock stops the whole process, and so the watch; the
caller's own deadline finds that. An abandoned thread that computes for ever takes its share of the process.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from queue import SimpleQueue

from rollart.core.errors import EnvError, RollartError, failure
from rollart.core.types import Boundary, Failure

TICK_S = 0.02
"""How often waiting calls are looked at: long beside a microsecond step, short beside a tool call."""
SLOW_CALL_S = 0.002
"""Mean time in a call from which on threads pay: below it, handing the interpreter's lock around costs more than it gains."""
KEEP_LOOKS = 50
"""Threads outlive slow calls by so many looks at waiting ones, a second of work or more, idle time aside: resets come in waves,
and between two of them steps that wait for something. To start a thread costs as much as a call or two; one that waits costs
nothing."""
COMPUTING_SHARE = 0.75
"""Share of a core from which on the process counts as busy: more threads would only queue for the interpreter's lock."""
MAX_DETAIL_CHARS = 500
"""A failure's detail is read by people and written to the event log."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One call: `run` in a thread, then `answer` with its value or a Failure, from that thread or from the watch's."""

    what: str
    """Names the call in a failure's detail."""
    where: Boundary
    budget_s: float
    """From being submitted to being answered."""
    run: Callable[[], object]
    answer: Callable[[object], None]
    freed: Callable[[bool], None] = lambda ran: None
    """Told, with whether `run` was called, that no thread is in it: before `answer`, or when an abandoned one returns."""
    deadline_s: float = 0.0
    started: bool = False
    answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    threads: int
    """That serve the queue."""
    abandoned: int
    """That overran and have not come back."""
    live: int
    """Jobs waiting or running."""
    timeouts: int
    late: int
    """Timed-out jobs that came back after all."""


class DeadlineWorkers:
    """At most max_threads daemon threads that serve one queue or hang, and one that watches them."""

    def __init__(self, name: str, *, max_threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._max_threads = max_threads
        self._clock = clock
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._live: dict[Job, None] = {}
        self._queued = self._threads = self._abandoned = self._timeouts = self._late = 0
        self._finished = 0
        self._spent_s = 0.0
        self._fast_looks = 0
        """In a row."""
        self._earliest_s = float("inf")
        self._wake_s = 0.0
        self._closed = False
        self._grow(1)
        threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True).start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue `jobs`. Never blocks; each is answered within its budget, at once when the workers are closed."""
        now = self._clock()
        with self._lock:
            closed = self._closed
            if not closed:
                for job in jobs:
                    job.deadline_s = now + job.budget_s
                    self._live[job] = None
                    self._earliest_s = min(self._earliest_s, job.deadline_s)
                self._queued += len(jobs)
                # the watch sleeps until it is needed; to wake it for every batch would cost more than the batch
                if min(now + TICK_S, self._earliest_s) < self._wake_s:
                    self._wake.notify()
        for job in jobs:
            if closed:
                _answer(job, _closing(job))
            else:
                self._queue.put(job)

    def renew(self, job: Job, *, what: str, where: Boundary, budget_s: float) -> None:
        """Called within `job.run` where it makes several foreign calls: what comes next, with `budget_s` from now on.

        Raises EnvError when the job's deadline has passed, so that a thread that was given up goes no further.
        """
        with self._lock:
            if job.answered:
                raise EnvError(f"{what}: given up, its deadline has passed")
            job.what, job.where, job.budget_s = what, where, budget_s
            job.deadline_s = self._clock() + budget_s
            self._earliest_s = min(self._earliest_s, job.deadline_s)
            if self._earliest_s < self._wake_s:
                self._wake.notify()

    def facts(self) -> WorkerFacts:
        with self._lock:
            return WorkerFacts(
                threads=self._threads,
                abandoned=self._abandoned,
                live=len(self._live),
                timeouts=self._timeouts,
                late=self._late,
            )

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Answer what waits or runs as lost; threads end after the job that they are in. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
            lost = self._give_up(list(self._live))
            idle = self._threads
        for job in lost:
            _answer(job, _closing(job))
        for _ in range(idle):
            self._queue.put(None)

    def _grow(self, n: int) -> None:
        for _ in range(n):
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._threads + 1}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # the system has no more: calls wait for those that there are
            self._threads += 1

    def _give_up(self, jobs: list[Job]) -> list[Job]:
        """Mark `jobs` as answered, and the threads that are in one as abandoned."""
        for job in jobs:
            job.answered = True
            del self._live[job]
        running = sum(job.started for job in jobs)
        self._queued -= len(jobs) - running
        self._abandoned += running
        self._threads -= running
        return jobs

    def _serve(self) -> None:
        ended = False
        try:
            self._serve_queue()
            ended = True
        finally:
            if not ended:
                # whoever was to be told could not take it; the next look starts another thread where one is needed
                with self._lock:
                    self._threads -= 1

    def _serve_queue(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.answered:
                    continue
                job.started = True
                self._queued -= 1
            began_s = self._clock()
            needed = True
            try:
                value = job.run()
            # boundary: whatever foreign code raises, SystemExit too, is that one call's failure
            except BaseException as error:  # noqa: BLE001
                value = raised(job.where, error)
            with self._lock:
                overran, job.answered = job.answered, True
                if overran:
                    self._abandoned -= 1
                    self._late += 1
                    needed = self._threads == 0
                    self._threads += needed
                else:
                    self._finished += 1
                    self._spent_s += self._clock() - began_s
                    del self._live[job]
            job.freed(True)
            if not overran:
                job.answer(value)
            elif not needed:
                return

    def _watch(self) -> None:
        """Answer overdue jobs at their deadlines and fit the number of threads to the work, a tick apart at least."""
        waiting = False
        computed_s, looked_s = time.process_time(), self._clock()
        while True:
            now = self._clock()
            for job in self._take_overdue(now):
                _answer(job, failure(job.where, "timeout", self._overdue(job)))
            if now - looked_s >= TICK_S:
                idle = time.process_time() - computed_s < COMPUTING_SHARE * (now - looked_s)
                waiting = self._fit(waiting, idle)
                computed_s, looked_s = time.process_time(), now
            with self._lock:
                if self._closed:
                    return
                self._wake_s = min(self._earliest_s, now + TICK_S if self._queued else float("inf"))
                pause_s = self._wake_s - self._clock()
                self._wake.wait(None if pause_s == float("inf") else max(0.0, pause_s))
                self._wake_s = 0.0

    def _overdue(self, job: Job) -> str:
        if job.started:
            return f"{job.what} ran longer than {job.budget_s:g} s"
        hung = f"; {self._abandoned} of {self._max_threads} hang in calls that overran" if self._abandoned else ""
        return f"{job.what} waited for a free thread longer than {job.budget_s:g} s{hung}"

    def _fit(self, waited: bool, idle: bool) -> bool:
        """Start or retire threads, from what was done since the last look. Returns whether jobs wait now.

        Where jobs have waited for a whole tick behind slow ones, twice as many threads serve them; only one more if the
        process computes all the time, since they may well wait for the interpreter's lock. Where jobs have long been fast,
        half.
        """
        with self._lock:
            slow = self._finished == 0 or self._spent_s > SLOW_CALL_S * self._finished
            waiting = self._queued > 0
            retired = 0
            if self._closed:
                return False
            self._fast_looks = 0 if slow else self._fast_looks + 1
            if slow and waited and waiting:
                wanted = max(1, self._threads) if idle else 1
                room = self._max_threads - self._threads - self._abandoned
                self._grow(min(wanted, len(self._live) - self._threads, room))
            elif self._fast_looks > KEEP_LOOKS:
                retired = self._threads // 2
                self._threads -= retired
            self._finished, self._spent_s = 0, 0.0
        for _ in range(retired):
            self._queue.put(None)
        return waiting

    def _take_overdue(self, now: float) -> list[Job]:
        with self._lock:
            if now < self._earliest_s:
                return []
            overdue = self._give_up([job for job in self._live if job.deadline_s <= now])
            self._timeouts += len(overdue)
            if self._threads == 0 and self._abandoned < self._max_threads:
                self._grow(1)
            self._earliest_s = min((job.deadline_s for job in self._live), default=float("inf"))
            return overdue


def _answer(job: Job, value: Failure) -> None:
    if not job.started:
        job.freed(False)
    job.answer(value)


def _closing(job: Job) -> Failure:
    return failure(job.where, "lost", f"{job.what}: its host is closing")


def raised(where: Boundary, error: BaseException) -> Failure:
    """What foreign code raised, as a value: type, message and the frame that raised it.

    Our own errors report a broken contract, which a second attempt would only break again.
    """
    message = "".join(traceback.format_exception_only(error)).strip()[:MAX_DETAIL_CHARS]
    at = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        at = f" ({PurePath(code.co_filename).name}:{line} in {code.co_name})"
    return failure(where, "raised", message + at, retryable=not isinstance(error, RollartError))
