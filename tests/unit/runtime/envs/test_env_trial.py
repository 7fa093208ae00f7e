"""Trying an environment without a model: what is reported, and every fault that a user's class can have."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rollart.config.schema import TaskConfig
from rollart.core.errors import ConfigError
from rollart.runtime.envs.text import StepResult
from rollart.runtime.envs.trial import Trial, try_env

HERE = "test_env_trial"
_made = itertools.count()


class Count:
    """Counts to three; right in every way. `wrong` names what goes wrong instead."""

    def __init__(self, wrong: str = "", quiet: bool = False) -> None:
        self.wrong, self.quiet = wrong, quiet
        self.made = next(_made)
        if wrong == "build":
            raise RuntimeError("no licence")

    def reset(self, seed: int) -> Any:
        self.turn = 0
        if self.wrong == "reset_text":
            return b"bytes"
        if self.wrong == "reset":
            raise OSError("no file")
        unlike = self.made if self.wrong == "same_seed" else ""
        return f"count from {seed} {unlike}\n"

    def step(self, action: str) -> Any:
        self.turn += 1
        faults: dict[str, Any] = {
            "step_result": ("text", 1.0),
            "step_text": StepResult(None),  # type: ignore[arg-type]
            "reward": StepResult("x\n", reward=float("nan")),
            "metric": StepResult("x\n", metrics={"m": "many"}),  # type: ignore[dict-item]
            "metric_finite": StepResult("x\n", terminated=True, metrics={"m": float("inf")}),
        }
        if self.wrong == "step" and self.turn == 2:
            raise KeyError("lost")
        right = action == "next"
        return faults.get(self.wrong) or StepResult(
            f"{self.turn}\n", reward=float(right), terminated=self.turn == 3, bad_action=not right,
            metrics={"turns": self.turn, "right": right},
        )  # fmt: skip

    def canonical(self, seed: int) -> int:
        return next(_made) if self.wrong == "canonical" else seed

    def close(self) -> None:
        if self.wrong == "close":
            raise RuntimeError("cannot close")

    def random_action(self, rng: random.Random) -> Any:
        if self.wrong == "random_action_text":
            return 3
        return None if self.quiet else rng.choice(("next", "stop"))


def half(text: str, metrics: dict[str, float]) -> float:
    return 0.5 if text.startswith("count from") and metrics["turns"] == 3 else float("nan")


def trial(wrong: str = "", *, actions: tuple[str, ...] = (), scorer: str | None = None, **kwargs: Any) -> Trial:
    task = {"env": {"kind": "python", "entry": f"{HERE}:Count", "kwargs": {"wrong": wrong, **kwargs}}, "max_turns": 5}
    if scorer:
        task["scorer"] = {"kind": "python", "entry": f"{HERE}:{scorer}"}
    return try_env(TaskConfig.model_validate(task), episodes=4, seed=7, actions=actions)


def test_an_environment_that_is_right_has_no_problem_and_all_its_figures() -> None:
    found = trial()
    assert found.problems == {}
    assert found.notes == []
    assert [episode.seed for episode in found.episodes] == [7, 8, 9, 10]
    for episode in found.episodes:
        assert (episode.end, len(episode.turns)) == ("terminated", 4)
        assert episode.reward == sum(turn.reward for turn in episode.turns)
        assert episode.metrics["turns"] == 3.0
        assert episode.turns[0].text == f"count from {episode.seed} \n"
    assert len(found.seconds["step"]) == 12
    assert {"build", "reset", "step", "close", "random_action"} == found.seconds.keys()
    again = trial()
    assert [episode.turns for episode in again.episodes] == [episode.turns for episode in found.episodes]


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ("build", "build_raised", "making the environment raised RuntimeError: no licence"),
        ("reset", "reset_raised", "seed 7: reset raised OSError: no file"),
        ("reset_text", "reset_text", "reset returned b'bytes'"),
        ("step", "step_raised", "turn 2: step('"),
        ("step_result", "step_result", "step returned tuple, not StepResult"),
        ("step_text", "step_text", "the text None"),
        ("reward", "reward", "the reward nan; a reward is a finite number"),
        ("metric", "metric", "metric 'm' is 'many', not a number"),
        ("metric_finite", "metric_finite", "metric 'm' is inf"),
        ("same_seed", "same_seed", "seed 7 gave two different first texts"),
        ("canonical", "canonical", "one problem has one id"),
        ("close", "close_raised", "seed 7: close() raised RuntimeError: cannot close"),
        ("random_action_text", "random_action_text", "random_action returned 3, not a str"),
    ],
)
def test_every_fault_is_found_and_named_with_where_it_was(wrong: str, kind: str, said: str) -> None:
    found = trial(wrong)
    assert found.problems.keys() == {kind}
    assert said in found.problems[kind]
    assert "seed 7" in found.problems[kind]
    assert len(found.episodes) == 4, "the trial went on"


def test_a_failed_episode_has_no_reward_and_one_that_cannot_close_keeps_its_own() -> None:
    assert [episode.reward for episode in trial("step").episodes] == [None] * 4
    assert [(episode.reward is not None, episode.end) for episode in trial("close").episodes] == [
        (True, "terminated")
    ] * 4


def test_without_random_actions_of_its_own_words_are_drawn_and_the_user_is_told() -> None:
    found = trial(quiet=True)
    assert any("knows no random action" in note for note in found.notes)
    assert any("no action could be read" in note for note in found.notes)
    named = trial(quiet=True, actions=("next",))
    assert [episode.reward for episode in named.episodes] == [3.0] * 4
    assert named.notes == ["every episode had the same reward: random actions do not show that it can differ"]


def test_the_tasks_scorer_gives_the_reward() -> None:
    assert [episode.reward for episode in trial(scorer="half").episodes] == [0.5] * 4
    with pytest.raises(ConfigError, match="has no 'halves'"):
        trial(scorer="halves")
    assert "score_raised" in trial(scorer="Count").problems
