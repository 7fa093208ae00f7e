"""Many environment sessions, and scorers, in one process: batches of calls in, finished calls out, no call awaited.

    submit([Open, Reset, Step, Close, Score, ..])      returns at once
    wake()                                             given by the owner; called from any thread when `take` has something
    take() -> [Done, ..]                               all that has finished since

Invariant: every accepted call gives exactly one `Done`, within its budget; a call that arrives again while it is known gives
none. After a
failure a session is dead: it takes only `Close`. Its slot stays taken until no thread is in its environment any more
and the environment is closed, so hung calls cannot pile up beyond `sessions_per_host`.

Calls of one session come one at a time, not always from the same thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rollart.config.schema import EnvHostConfig, TaskConfig
from rollart.core.errors import failure
from rollart.core.types import Failure, Observation
from rollart.runtime.envs.scorers import ScoreFn, build_scorer
from rollart.runtime.envs.session import TextSession
from rollart.runtime.envs.tasks import build_env
from rollart.runtime.envs.workers import DeadlineWorkers, Job
from rollart.runtime.tokenizers import Ids, Tokenizer

CLOSE_S = 30.0
"""Budget of a close that nobody waits for: an environment whose last call came back after its session was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    session: str
    """Unique for ever: one attempt at one trajectory."""
    seq: int
    """Rises with every call of a session; a call whose number is not above the last one is a duplicate."""
    budget_s: float
    """Seconds from now to its `Done`, waiting for a thread included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(_Call):
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(_Call):
    seed: int
    """Decides the problem."""
    chance_seed: int
    """Decides what is random within the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(_Call):
    ids: Ids
    """What the policy sampled in this turn, shape (n,), the stop token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(_Call):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(_Call):
    """Needs no open session."""

    task: str
    text: str
    metrics: Mapping[str, float] = field(default_factory=dict)


Call = Open | Reset | Step | Close | Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer to the call (session, seq)."""

    session: str
    seq: int
    result: Observation | float | Failure | None
    """Reset, Step: an Observation; Score: a reward; Open, Close: None; a Failure instead of any of them."""
    seconds: float
    """From submit to this answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    sessions: int
    held: int
    """Slots taken: sessions, and closed ones whose environment a thread is still in."""
    hung: int
    """Threads in a call that was answered as timed out."""
    threads: int
    live_calls: int
    duplicates: int
    failures: Mapping[str, int]
    """By `boundary kind`, since the host started."""


@dataclass(slots=True, eq=False)
class _Slot:
    seq: int
    session: TextSession | None = None
    busy: bool = True
    closing: bool = False
    failure: Failure | None = None

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class EnvHost:
    """The state of one env host process. Thread-safe; nothing in it blocks except `close`."""

    def __init__(
        self,
        tasks: Mapping[str, TaskConfig],
        tokenizer: Tokenizer,
        config: EnvHostConfig,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._limit = config.sessions_per_host
        self._wake = wake
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._slots: dict[str, _Slot] = {}
        self._held = 0
        self._scoring: set[tuple[str, int]] = set()
        self._scorers: dict[str, ScoreFn] = {}
        self._done: list[Done] = []
        self._failures: Counter[str] = Counter()
        self._duplicates = 0
        self._workers = DeadlineWorkers("env", max_threads=config.sessions_per_host)
        self._score_workers = DeadlineWorkers("score", max_threads=config.score_concurrency)

    def submit(self, calls: Sequence[Call]) -> None:
        """Start all of `calls`; their answers come through `take`, in the order in which they finish."""
        now = time.monotonic()
        jobs: list[Job] = []
        scores: list[Job] = []
        answered: list[tuple[Call, Failure | None]] = []
        with self._lock:
            for call in calls:
                if self._seen(call):
                    self._duplicates += 1
                elif isinstance(call, Score):
                    scores.append(self._score_job(call, now))
                elif isinstance(made := self._job(call, now), Job):
                    jobs.append(made)
                else:
                    answered.append((call, made))
        for call, answer in answered:
            self._answer(call, now, answer)
        if jobs:
            self._workers.submit(jobs)
        if scores:
            self._score_workers.submit(scores)

    def take(self) -> list[Done]:
        """All calls that have finished since the last `take`."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def facts(self) -> HostFacts:
        env, score = self._workers.facts(), self._score_workers.facts()
        with self._lock:
            return HostFacts(
                sessions=len(self._slots),
                held=self._held,
                hung=env.abandoned + score.abandoned,
                threads=env.threads + score.threads,
                live_calls=env.live + score.live,
                duplicates=self._duplicates,
                failures=dict(self._failures),
            )

    def close(self, budget_s: float = 5.0) -> None:
        """Close every environment that no call is in, waiting at most `budget_s` for them; then take no more calls."""
        with self._lock:
            idle = [slot for slot in self._slots.values() if not slot.busy]
            for slot in self._slots.values():
                slot.closing = True
            self._slots.clear()
        self._workers.submit([self._close_job(slot, budget_s) for slot in idle])
        with self._lock:
            self._released.wait_for(lambda: self._held == 0, budget_s)
        self._workers.close()
        self._score_workers.close()

    # --- what becomes of a call; the lock is held ------------------------------------------------------------------

    def _seen(self, call: Call) -> bool:
        """Whether this very call has been taken before. A repeated `Close` is answered again instead."""
        if isinstance(call, Score):
            return (call.session, call.seq) in self._scoring
        slot = self._slots.get(call.session)
        return slot is not None and call.seq <= slot.seq and not isinstance(call, Close)

    def _job(self, call: Open | Reset | Step | Close, now: float) -> Job | Failure | None:
        """The job of a call, or its answer where there is nothing to run."""
        if isinstance(call, Open):
            return self._open_job(call, now)
        if isinstance(call, Close):
            slot = self._slots.pop(call.session, None)
            if slot is None:
                return None
            slot.closing = True
            # a thread is in it: it is closed when that one comes back, and nobody waits for that
            return None if slot.busy else self._close_job(slot, call.budget_s, partial(self._answer, call, now))
        return self._turn_job(call, now)

    def _turn_job(self, call: Reset | Step, now: float) -> Job | Failure:
        slot = self._slots.get(call.session)
        verb = "reset" if isinstance(call, Reset) else "step"
        if slot is None:
            return failure("env", "refused", f"{verb}: no session {call.session!r} is open on this host")
        slot.seq = call.seq
        session = slot.session
        if slot.failure is not None or slot.busy or session is None:
            why = f"the session is dead ({slot.failure.detail})" if slot.failure else "another call of it is running"
            return failure("env", "refused", f"{verb}: {why}", retryable=False)
        slot.busy = True
        if isinstance(call, Reset):
            return self._session_job(verb, slot, call, now, partial(session.reset, call.seed, call.chance_seed))
        return self._session_job(verb, slot, call, now, partial(session.step, call.ids))

    def _open_job(self, call: Open, now: float) -> Job | Failure:
        task = self._tasks.get(call.task)
        if task is None:
            return failure("env", "refused", f"open: task {call.task!r} is not known here", retryable=False)
        if call.session in self._slots:
            return failure("env", "refused", f"open: session {call.session!r} is open already", retryable=False)
        if self._held >= self._limit:
            return failure(
                "env",
                "refused",
                f"open: all {self._limit} sessions are taken ({self._held - len(self._slots)} of them by hung or closing "
                "environments); raise envs.sessions_per_host or envs.hosts",
            )
        self._held += 1
        slot = self._slots[call.session] = _Slot(seq=call.seq)

        def run() -> None:
            slot.session = TextSession(build_env(task), self._tokenizer)

        return self._session_job("open", slot, call, now, run)

    def _session_job(
        self, verb: str, slot: _Slot, call: Open | Reset | Step, now: float, run: Callable[[], object]
    ) -> Job:
        return Job(
            what=verb,
            where="env",
            budget_s=call.budget_s,
            run=run,
            answer=partial(self._settle, slot, call, now),
            freed=partial(self._freed, slot),
        )

    def _close_job(self, slot: _Slot, budget_s: float, answer: Callable[[object], None] = lambda result: None) -> Job:
        return Job(
            what="close",
            where="env",
            budget_s=budget_s,
            run=slot.close,
            answer=answer,
            freed=partial(self._closed, slot),
        )

    def _score_job(self, call: Score, now: float) -> Job:
        self._scoring.add((call.session, call.seq))
        return Job(
            what="score",
            where="scorer",
            budget_s=call.budget_s,
            run=partial(self._score, call),
            answer=partial(self._scored, call, now),
        )

    # --- called from the workers' threads; the lock is not held ----------------------------------------------------

    def _score(self, call: Score) -> float | Failure:
        scorer = self._scorers.get(call.task)
        if scorer is None:
            config = self._tasks[call.task].scorer
            if config is None:
                return failure("scorer", "raised", f"task {call.task!r} names no scorer", retryable=False)
            scorer = self._scorers[call.task] = build_scorer(config)
        return scorer(call.text, call.metrics)

    def _scored(self, call: Score, submitted_s: float, result: object) -> None:
        with self._lock:
            self._scoring.discard((call.session, call.seq))
        self._answer(call, submitted_s, result)

    def _settle(self, slot: _Slot, call: Open | Reset | Step, submitted_s: float, result: object) -> None:
        if isinstance(result, Failure):
            with self._lock:
                slot.failure = result
        self._answer(call, submitted_s, result)

    def _freed(self, slot: _Slot, ran: bool) -> None:
        with self._lock:
            slot.busy = False
            orphaned = slot.closing
        if orphaned:
            self._workers.submit([self._close_job(slot, CLOSE_S)])

    def _closed(self, slot: _Slot, ran: bool) -> None:
        if not ran and not self._workers.closed:
            self._workers.submit([self._close_job(slot, CLOSE_S)])
            return
        with self._lock:
            self._held -= 1
            self._released.notify_all()

    def _answer(self, call: Call, submitted_s: float, result: object) -> None:
        done = Done(
            session=call.session,
            seq=call.seq,
            result=result,  # type: ignore[arg-type]
            seconds=time.monotonic() - submitted_s,
        )
        with self._lock:
            first = not self._done
            self._done.append(done)
            if isinstance(result, Failure):
                self._failures[f"{result.where} {result.kind}"] += 1
        if first:
            self._wake()
