"""Whole episodes played in this process beside the run's rollouts, each call of foreign code under its own deadline.

Invariant: an episode that raises or hangs is one typed failure, drawn again a few times and counted; foreign code runs in
daemon threads only, so it can keep neither the caller's loop nor the process. When nearly all episodes fail, the
environment is broken: RunFailed says so, with the last failure, before anything is trained.

One job plays episode after episode in one thread and renews its deadline before each call: a job per call would cost more
than the call. After a failure a new job goes on with a new environment, for the old one may still have a thread in it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollart.config.schema import Deadlines, TaskConfig
from rollart.core.errors import ConfigError, EnvError, RunFailed
from rollart.core.types import Boundary, Failure, TaskSpec
from rollart.runtime.envs.scorers import ScoreFn, build_scorer
from rollart.runtime.envs.tasks import build_env
from rollart.runtime.envs.text import TextTask
from rollart.runtime.envs.workers import DeadlineWorkers, Job

REDRAWS = 3
"""How often an episode that failed is drawn again: enough for chance, and no more than a rollout's retries."""
BROKEN_AFTER = 8
"""Failures before the environment can count as broken: fewer may be chance."""
BROKEN_SHARE = 0.9
"""Share of failed attempts above which it is broken: training would make next to nothing but failures."""
MAX_HANGS = 4
"""Calls that may run into their deadline before the rest is left unplayed: each of them costs a whole deadline."""

T = TypeVar("T")


class Clock:
    """Deadlines of one job's calls. Used by the thread that is in the job."""

    def __init__(self, deadlines: Deadlines, workers: DeadlineWorkers, job: Job) -> None:
        self.deadlines = deadlines
        self._workers = workers
        self._job = job
        self._end_s = float("inf")

    def begin(self) -> None:
        """A new episode begins; all of it must end within `trajectory_s`."""
        self._end_s = time.monotonic() + self.deadlines.trajectory_s

    def call(self, what: str, budget_s: float, where: Boundary = "env") -> None:
        """The next foreign call is `what`, and may take `budget_s`."""
        left_s = max(0.0, self._end_s - time.monotonic())
        self._workers.renew(self._job, what=what, where=where, budget_s=min(budget_s, left_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What an episode is played with."""

    env: TextTask
    scorer: ScoreFn | None
    clock: Clock


Play = Callable[[Table, int, int], T]
"""(table, number of the episode, how often it has failed) -> its outcome. Runs in a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Generic[T]):
    outcomes: Mapping[int, T]
    """By number of the episode; those that failed to the end are missing."""
    failures: tuple[Failure, ...]


async def play(spec: TaskSpec, task: TaskConfig, deadlines: Deadlines, episodes: int, one: Play[T]) -> Played[T]:
    """Play episodes 0 .. `episodes` - 1, failed ones again.

    Raises RunFailed when nearly all attempts fail, and ConfigError when the task cannot be played as configured.
    """
    waiting = deque((number, 0) for number in range(episodes))
    outcomes: dict[int, T] = {}
    failures: list[Failure] = []
    workers = DeadlineWorkers(f"episodes-{spec.name}", max_threads=MAX_HANGS + 1)
    try:
        while waiting and sum(each.kind == "timeout" for each in failures) < MAX_HANGS:
            done: list[T] = []
            answer = await _ask(workers, deadlines, _Stint(task, tuple(waiting), one, done))
            for outcome in tuple(done):  # a thread that was given up may still add to it
                if waiting:
                    outcomes[waiting.popleft()[0]] = outcome
            if isinstance(answer, ConfigError):
                raise answer
            if not isinstance(answer, Failure):
                break
            failures.append(answer)
            if waiting:
                number, failed = waiting.popleft()
                if answer.retryable and failed < REDRAWS:
                    waiting.append((number, failed + 1))
            _refuse_broken(spec.name, len(outcomes), failures)
    finally:
        workers.close()
    if failures and not outcomes:
        raise _broken(spec.name, 0, failures)
    return Played(outcomes=outcomes, failures=tuple(failures))


@dataclass(frozen=True, slots=True)
class _Stint(Generic[T]):
    """Episodes that are played one after another with one environment, up to the first failure."""

    task: TaskConfig
    order: Sequence[tuple[int, int]]
    one: Play[T]
    done: list[T]

    def run(self, clock: Clock) -> ConfigError | None:
        """Returns what the user must change, if that is what goes wrong; raises what foreign code raises."""
        open_s = clock.deadlines.env_open_s
        try:
            env = build_env(self.task)
            try:
                clock.call("building the scorer", open_s)
                scorer = build_scorer(self.task.scorer) if self.task.scorer is not None else None
                table = Table(env=env, scorer=scorer, clock=clock)
                for number, failed in self.order:
                    clock.begin()
                    self.done.append(self.one(table, number, failed))
            finally:
                with suppress(EnvError):  # given up: it is closed all the same, and nobody waits for that
                    clock.begin()
                    clock.call("closing the environment", open_s)
                env.close()
        except ConfigError as wrong:
            return wrong
        return None


async def _ask(workers: DeadlineWorkers, deadlines: Deadlines, stint: _Stint[T]) -> object:
    """Run a stint in a thread; its value, or the Failure that ended it."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[object] = loop.create_future()

    def settle(value: object) -> None:
        if not answered.done():
            answered.set_result(value)

    def answer(value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever asked
            loop.call_soon_threadsafe(settle, value)

    def run() -> object:
        return stint.run(clock)

    job = Job(what="building the environment", where="env", budget_s=deadlines.env_open_s, run=run, answer=answer)
    clock = Clock(deadlines, workers, job)
    workers.submit([job])
    return await answered


def _refuse_broken(name: str, played: int, failures: Sequence[Failure]) -> None:
    if len(failures) >= BROKEN_AFTER and len(failures) > BROKEN_SHARE * (len(failures) + played):
        raise _broken(name, played, failures)


def _broken(name: str, played: int, failures: Sequence[Failure]) -> RunFailed:
    return RunFailed(
        f"tasks.{name}: {len(failures)} of {len(failures) + played} episodes that were played before training failed; "
        "mend the environment or the scorer",
        failures[-1],
    )
