"""Foreign code in threads: every job is answered once, at its deadline at the latest, and hangs cost one thread each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from rollart.core.errors import EnvError
from rollart.core.types import Failure
from rollart.runtime.envs.workers import DeadlineWorkers, Job

WAIT_S = 20.0
"""Longest wait of a test for what must come; never waited out when things work."""


@pytest.fixture
def workers() -> Iterator[DeadlineWorkers]:
    made = DeadlineWorkers("test", max_threads=16)
    yield made
    made.close()


def job(
    run: Callable[[], object], answers: SimpleQueue[object], *, what: str = "call", budget_s: float = WAIT_S
) -> Job:
    return Job(what=what, where="env", budget_s=budget_s, run=run, answer=answers.put)


def test_values_come_back(workers: DeadlineWorkers) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    workers.submit([job(lambda n=n: n * n, answers) for n in range(100)])  # type: ignore[misc]
    assert [answers.get(timeout=WAIT_S) for _ in range(100)] == [n * n for n in range(100)]


def test_calls_that_wait_for_one_another_get_a_thread_each(workers: DeadlineWorkers) -> None:
    """Twelve calls that return only when all twelve run: one thread is there at first, the others are started."""
    answers: SimpleQueue[object] = SimpleQueue()
    barrier = threading.Barrier(12)
    workers.submit([job(barrier.wait, answers) for _ in range(12)])
    assert sorted(answers.get(timeout=WAIT_S) for _ in range(12)) == list(range(12))  # type: ignore[type-var]


def test_threads_started_for_slow_calls_are_retired_when_calls_are_fast(workers: DeadlineWorkers) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    barrier = threading.Barrier(12)
    workers.submit([job(barrier.wait, answers) for _ in range(12)])
    for _ in range(12):
        answers.get(timeout=WAIT_S)
    assert workers.facts().threads == 12, "never more than there are calls"
    for _ in range(1000):
        workers.submit([job(lambda: None, answers) for _ in range(20)])
        assert [answers.get(timeout=WAIT_S) for _ in range(20)] == [None] * 20
        time.sleep(0.002)
        if workers.facts().threads == 1:
            break
    assert workers.facts().threads == 1


def test_threads_outlast_a_wave_of_fast_calls_between_slow_ones(workers: DeadlineWorkers) -> None:
    """A wave is longer than two looks of the watch; threads that were retired in it would be started again after it."""
    answers: SimpleQueue[object] = SimpleQueue()
    threads = []
    for _ in range(4):
        barrier = threading.Barrier(8)
        workers.submit([job(barrier.wait, answers) for _ in range(8)])
        for _ in range(8):
            answers.get(timeout=WAIT_S)
        for _ in range(60):
            workers.submit([job(lambda: time.sleep(0.0005), answers) for _ in range(10)])
            for _ in range(10):
                answers.get(timeout=WAIT_S)
        threads.append(workers.facts().threads)
    assert threads == sorted(threads)
    assert threads[0] >= 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_who_cannot_take_an_answer_costs_the_others_nothing(workers: DeadlineWorkers) -> None:
    """The only thread ends with it; another is started for the next call."""
    answers: SimpleQueue[object] = SimpleQueue()

    def refuses(value: object) -> None:
        raise RuntimeError("the loop is closed")

    workers.submit([Job(what="lost", where="env", budget_s=WAIT_S, run=lambda: None, answer=refuses)])
    for _ in range(2):
        workers.submit([job(lambda: 7, answers)])
        assert answers.get(timeout=WAIT_S) == 7


def test_a_call_that_overruns_is_answered_once_and_its_thread_is_replaced(workers: DeadlineWorkers) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    gate, back = threading.Event(), threading.Event()
    hung = job(lambda: gate.wait(WAIT_S), answers, what="step", budget_s=0.05)
    hung.freed = lambda ran: back.set() if ran else None
    workers.submit([hung])
    first = answers.get(timeout=WAIT_S)
    assert isinstance(first, Failure)
    assert (first.where, first.kind, first.detail) == ("env", "timeout", "step ran longer than 0.05 s")
    assert not back.is_set()
    assert workers.facts().abandoned == 1
    workers.submit([job(lambda: "next", answers)])
    assert answers.get(timeout=WAIT_S) == "next"
    gate.set()
    assert back.wait(WAIT_S)
    workers.submit([job(lambda: "last", answers)])
    assert answers.get(timeout=WAIT_S) == "last"
    facts = workers.facts()
    assert (facts.abandoned, facts.timeouts, facts.late, facts.live) == (0, 1, 1, 0)


def test_a_call_whose_turn_never_comes_is_answered_and_never_run() -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    gate, ran = threading.Event(), threading.Event()
    workers = DeadlineWorkers("one", max_threads=1)
    waiting = job(ran.set, answers, budget_s=0.05)
    freed: SimpleQueue[bool] = SimpleQueue()
    waiting.freed = freed.put
    workers.submit([job(lambda: gate.wait(WAIT_S), answers), waiting])
    first = answers.get(timeout=WAIT_S)
    assert isinstance(first, Failure)
    assert first.detail == "call waited for a free thread longer than 0.05 s"
    assert freed.get(timeout=WAIT_S) is False
    gate.set()
    assert answers.get(timeout=WAIT_S) is True
    workers.submit([job(lambda: "after", answers)])
    assert answers.get(timeout=WAIT_S) == "after"
    assert not ran.is_set()
    workers.close()


def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "message", "retryable"),
    [
        (ValueError("no such door"), "ValueError: no such door (test_deadline_workers.py:", True),
        (SystemExit(3), "SystemExit: 3 (test_deadline_workers.py:", True),
        (
            EnvError("broken contract"),
            "rollart.core.errors.EnvError: broken contract (test_deadline_workers.py:",
            False,
        ),
    ],
)
def test_what_a_call_raises_is_its_answer(
    workers: DeadlineWorkers, error: BaseException, message: str, retryable: bool
) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    workers.submit([job(lambda: fails(error), answers)])
    got = answers.get(timeout=WAIT_S)
    assert isinstance(got, Failure)
    assert (got.where, got.kind, got.retryable) == ("env", "raised", retryable)
    assert got.detail.startswith(message)
    assert got.detail.endswith(" in fails)")


def test_an_exception_that_cannot_be_printed_is_still_an_answer(workers: DeadlineWorkers) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    answers: SimpleQueue[object] = SimpleQueue()
    workers.submit([job(lambda: fails(Unprintable()), answers)])
    got = answers.get(timeout=WAIT_S)
    assert isinstance(got, Failure)
    assert "Unprintable" in got.detail


def test_closing_answers_what_runs_waits_and_comes_later_as_lost() -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    gate, running = threading.Event(), threading.Event()
    workers = DeadlineWorkers("closing", max_threads=1)

    def run() -> None:
        running.set()
        gate.wait(WAIT_S)

    workers.submit([job(run, answers, what="a"), job(lambda: None, answers, what="b")])
    assert running.wait(WAIT_S)
    workers.close()
    workers.close()
    workers.submit([job(lambda: None, answers, what="c")])
    gate.set()
    details = [got.detail for got in (answers.get(timeout=WAIT_S) for _ in range(3)) if isinstance(got, Failure)]
    assert details == [f"{what}: its host is closing" for what in "abc"]


def test_a_thread_that_computes_for_ever_leaves_the_others_served(workers: DeadlineWorkers) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sys.getrefcount(None)

    workers.submit([job(spin, answers, budget_s=0.1)])
    first = answers.get(timeout=WAIT_S)
    workers.submit([job(lambda n=n: n, answers) for n in range(50)])  # type: ignore[misc]
    rest = [answers.get(timeout=WAIT_S) for _ in range(50)]
    stop.set()
    assert isinstance(first, Failure)
    assert first.kind == "timeout"
    assert rest == list(range(50))


def test_threads_that_hang_count_against_the_most_there_may_be() -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    gate = threading.Event()
    workers = DeadlineWorkers("few", max_threads=2)
    for _ in range(2):
        workers.submit([job(lambda: gate.wait(WAIT_S), answers, budget_s=0.05)])
        answers.get(timeout=WAIT_S)
    workers.submit([job(lambda: "starved", answers, budget_s=0.05)])
    starved = answers.get(timeout=WAIT_S)
    assert isinstance(starved, Failure)
    assert starved.detail == "call waited for a free thread longer than 0.05 s; 2 of 2 hang in calls that overran"
    assert (workers.facts().abandoned, workers.facts().threads) == (2, 0)
    workers.submit([job(lambda: "served", answers)])
    gate.set()
    assert answers.get(timeout=WAIT_S) == "served"
    workers.close()
