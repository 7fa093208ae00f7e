"""Episodes of one environment without any model: what it says, gives and costs, and what is wrong with it.

Invariant: the environment is called as a rollout calls it (a new one per episode, `seed_chance` before `reset`, `close` at the
end), and nothing that it does wrong ends the trial: each kind of fault is noted once, with where it was first seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from rollart.config.schema import TaskConfig
from rollart.core.errors import ConfigError
from rollart.core.seeds import rng, seed_of
from rollart.core.types import Failure
from rollart.runtime.envs.scorers import build_scorer
from rollart.runtime.envs.session import TurnText, evidence_text
from rollart.runtime.envs.tasks import build_env
from rollart.runtime.envs.text import StepResult, TextTask

SAME_SEED_TRIED = 3
"""Problems that are begun a second time, to see whether they are the same: what differs mostly differs at once."""
WORDS: tuple[str, ...] = (*"0123456789", *"abcdefghijklmnopqrstuvwxyz", "yes", "no")
"""Drawn from where the environment knows no random action and the caller names none."""
End = Literal["terminated", "truncated", "max_turns", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action and its answer. The first of an episode is the reset: no action, no reward."""

    action: str | None
    text: str
    reward: float = 0.0
    bad_action: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    seed: int
    turns: tuple[Turn, ...]
    """The reset included."""
    reward: float | None
    """None: it failed, so it has none."""
    end: End
    metrics: dict[str, float]
    """The last value of each."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """What came of it; filled while it goes on."""

    episodes: list[Episode] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """Kind of fault -> what and where, of the first of its kind."""
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of every call: build, reset, step, score, close."""

    def problem(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _Wrong(Exception):
    """The episode cannot go on; the problem is noted already."""


def try_env(task: TaskConfig, *, episodes: int, seed: int, actions: Sequence[str] = ()) -> Trial:
    """Play `episodes` episodes, of the problems `seed`, `seed` + 1, ..; `actions`: draw from these.

    Raises ConfigError when the environment or the scorer cannot be made as configured; everything else is in the result.
    """
    trial = Trial()
    for number in range(episodes):
        trial.episodes.append(_Player(task, trial, seed + number, seed_of(seed, "try", number), actions).play())
    for number in range(min(SAME_SEED_TRIED, episodes)):
        _same_problem(task, trial, trial.episodes[number], seed_of(seed, "try", number))
    _notes(task, trial)
    return trial


class _Player:
    """One episode."""

    def __init__(self, task: TaskConfig, trial: Trial, seed: int, chance: int, actions: Sequence[str]) -> None:
        self._task, self._trial, self._seed, self._chance = task, trial, seed, chance
        self._actions, self._draw = actions, rng(chance, "try_action")
        self._turns: list[Turn] = []
        self._metrics: dict[str, float] = {}

    def play(self) -> Episode:
        end: End = "failed"
        reward: float | None = None
        try:
            with _watched(self._trial, "build", f"seed {self._seed}: making the environment"):
                env = build_env(self._task)
            try:
                end = self._turns_of(env)
                reward = self._reward()
            finally:
                with _watched(self._trial, "close", f"seed {self._seed}: close()"):
                    env.close()
        except _Wrong:
            end = "failed" if reward is None else end
        return Episode(seed=self._seed, turns=tuple(self._turns), reward=reward, end=end, metrics=self._metrics)

    def _turns_of(self, env: TextTask) -> End:
        with _watched(self._trial, "reset", f"seed {self._seed}: reset"):
            env.seed_chance(self._chance)
            text = env.reset(self._seed)
        if not isinstance(text, str) or not text:
            self._fault(
                "reset_text", f"reset returned {text!r}; it returns the first text, which is a str and not empty"
            )
        self._turns.append(Turn(action=None, text=text))
        for turn in range(1, self._task.max_turns + 1):
            action = self._action(env)
            with _watched(self._trial, "step", f"seed {self._seed}, turn {turn}: step({action!r})"):
                result = env.step(action)
            self._take(action, result, turn)
            if result.terminated or result.truncated:
                return "terminated" if result.terminated else "truncated"
        return "max_turns"

    def _action(self, env: TextTask) -> str:
        if self._actions:
            return self._draw.choice(self._actions)
        with _watched(self._trial, "random_action", f"seed {self._seed}: random_action"):
            known: object = env.random_action(self._draw)
        if known is None:
            self._trial.note(
                "the environment knows no random action: digits, letters, yes and no are drawn (or name --action)"
            )
            return self._draw.choice(WORDS)
        if not isinstance(known, str):
            self._fault("random_action_text", f"random_action returned {known!r}, not a str")
        return known

    def _take(self, action: str, result: object, turn: int) -> None:
        """Check what a step returned, as rollouts do, and keep it."""
        if not isinstance(result, StepResult):
            self._fault("step_result", f"turn {turn}: step returned {type(result).__name__}, not StepResult")
        if not isinstance(result.text, str):
            self._fault("step_text", f"turn {turn}: step returned the text {result.text!r}, which is not a str")
        reward = _number(result.reward)
        if reward is None or not math.isfinite(reward):
            self._fault("reward", f"turn {turn}: step gave the reward {result.reward!r}; a reward is a finite number")
        for name, value in dict(result.metrics).items():
            number = _number(value)
            if number is None:
                self._fault("metric", f"turn {turn}: metric {name!r} is {value!r}, not a number")
            if not math.isfinite(number):
                self._trial.problem(
                    "metric_finite",
                    f"seed {self._seed}, turn {turn}: metric {name!r} is {number}; it is left out of means",
                )
            self._metrics[str(name)] = number
        self._turns.append(Turn(action=action, text=result.text, reward=reward, bad_action=bool(result.bad_action)))

    def _reward(self) -> float:
        if self._task.scorer is None:
            return sum(turn.reward for turn in self._turns)
        scorer = build_scorer(self._task.scorer)
        evidence = evidence_text(TurnText(turn.action or "", turn.text) for turn in self._turns)
        with _watched(self._trial, "score", f"seed {self._seed}: the scorer"):
            scored = scorer(evidence, self._metrics)
        if isinstance(scored, Failure):
            self._fault("score", scored.detail)
        return scored

    def _fault(self, kind: str, text: str) -> NoReturn:
        self._trial.problem(kind, f"seed {self._seed}, {text}")
        raise _Wrong


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@contextmanager
def _watched(trial: Trial, what: str, where: str) -> Iterator[None]:
    """Time a call, and note what it raises. Raises _Wrong, and ConfigError as it is."""
    begun = time.perf_counter()
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # boundary: foreign code, whatever it raises is the finding
        trial.problem(f"{what}_raised", f"{where} raised {type(error).__name__}: {error}")
        raise _Wrong from error
    trial.seconds.setdefault(what, []).append(time.perf_counter() - begun)


def _same_problem(task: TaskConfig, trial: Trial, episode: Episode, chance: int) -> None:
    """Begin the episode's problem again: in a new environment, twice, and once after another problem."""
    if not episode.turns:
        return

    def begun(env: TextTask, seed: int) -> object:
        env.seed_chance(chance)
        return env.reset(seed)

    seed, again = episode.seed, list[object]()
    try:
        with _watched(trial, "reset", f"seed {seed}: a second reset"):
            env = build_env(task)
            again.append(begun(env, seed))
            begun(env, seed + 1)
            again.append(begun(env, seed))
            ids = {env.canonical(seed) for _ in range(2)}
        with _watched(trial, "close", f"seed {seed}: close()"):
            env.close()
    except _Wrong:
        return
    if any(text != episode.turns[0].text for text in again):
        trial.problem(
            "same_seed", f"seed {seed} gave two different first texts; the same seed is the same problem, everywhere"
        )
    if len(ids) > 1:
        trial.problem(
            "canonical", f"seed {seed}: canonical gave {' and '.join(map(str, sorted(ids)))}; one problem has one id"
        )


def _notes(task: TaskConfig, trial: Trial) -> None:
    """What is allowed and may surprise."""
    played = [episode for episode in trial.episodes if episode.end != "failed"]
    first = {episode.turns[0].text for episode in played}
    said: list[tuple[bool, str]] = [
        (len(played) > 1 and len(first) == 1, "every seed gave the same first text"),
        (
            bool(played) and all(episode.end == "max_turns" for episode in played),
            f"no episode came to an end within max_turns={task.max_turns}",
        ),
        (
            len(played) > 1 and len({episode.reward for episode in played}) == 1,
            "every episode had the same reward: random actions do not show that it can differ",
        ),
        (
            bool(played) and all(turn.bad_action for episode in played for turn in episode.turns[1:]),
            "no action could be read; name some with --action, or write random_action(rng)",
        ),
    ]
    for holds, text in said:
        if holds:
            trial.note(text)
