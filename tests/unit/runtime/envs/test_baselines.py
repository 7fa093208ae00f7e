"""What is given away without learning: baselines are low, and the warm start's data hold answers no more often than chance."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from rollart.config.schema import CharsTokenizer, Deadlines, RunConfig, TaskConfig
from rollart.core.errors import ConfigError, RunFailed
from rollart.core.types import TaskSpec
from rollart.runtime.envs import baselines
from rollart.runtime.envs.baselines import ConstantBaseline, RandomBaseline
from rollart.runtime.envs.frozen_lake import MOVES, STEPS, solutions
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.envs.text import StepResult
from rollart.runtime.tokenizers import build_tokenizer

TOKENIZER = build_tokenizer(CharsTokenizer())
MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
TURNS = 12
CHI2_3_DEGREES = 21.1
"""Exceeded once in 10,000 draws of a uniform four-sided choice; the draws here are fixed by their seed."""

DEADLINES = Deadlines()
LAKE = TaskConfig.model_validate({"env": {"kind": "frozen_lake"}, "max_turns": TURNS, "max_tokens": 2})
DIGITS = TaskConfig.model_validate({"env": {"kind": "max_digit"}, "size": 1000, "held_out": 0.2, "max_tokens": 2})


class Silent:
    """A user's class that knows neither random actions nor constant answers."""

    def reset(self, seed: int) -> str:
        return "go "

    def step(self, action: str) -> StepResult:
        return StepResult("", terminated=True)


class Talker(Silent):
    def random_action(self, rng: random.Random) -> str:
        return "hello"

    def step(self, action: str) -> StepResult:
        return StepResult("", terminated=True, metrics={"length": len(action)})


def length_reward(text: str, metrics: Mapping[str, float]) -> float:
    assert text == "go hello\n"
    return metrics["length"]


def spec_of(task: TaskConfig) -> TaskSpec:
    return task_specs(RunConfig(tasks={"t": task}), TOKENIZER)[0]


def random_baseline(
    task: TaskConfig, *, episodes: int, seed: int, scored: int | None = None, spec: TaskSpec | None = None,
    deadlines: Deadlines = DEADLINES,
) -> RandomBaseline | None:  # fmt: skip
    return asyncio.run(
        baselines.random_baseline(
            spec or spec_of(task),
            task,
            TOKENIZER,
            deadlines=deadlines,
            episodes=episodes,
            scored=scored or episodes,
            seed=seed,
        )
    )


def constant_baseline(task: TaskConfig, *, seed: int, limit: int = 4096) -> ConstantBaseline | None:
    found = baselines.constant_baseline(spec_of(task), task, TOKENIZER, deadlines=DEADLINES, seed=seed, limit=limit)
    return asyncio.run(found)


def chance_of_goal(turns: int) -> float:
    """Probability that uniformly random moves reach the goal of MAP within `turns`, by adding up all ways."""
    at = {(0, 0): 1.0}
    reached = 0.0
    for _ in range(turns):
        after: Counter[tuple[int, int]] = Counter()
        for (row, column), mass in at.items():
            for down, right in STEPS.values():
                place = (min(3, max(0, row + down)), min(3, max(0, column + right)))
                cell = MAP[place[0]][place[1]]
                if cell == "G":
                    reached += mass / 4
                elif cell != "H":
                    after[place] += mass / 4  # type: ignore[assignment]
        at = dict(after)
    return reached


def test_random_moves_reach_the_goal_as_often_as_chance_has_it() -> None:
    episodes = 4000
    found = random_baseline(LAKE, episodes=episodes, seed=1)
    assert found is not None
    chance = chance_of_goal(TURNS)
    assert 0 < chance < 0.02
    assert abs(found.success - chance) < 4 * (chance / episodes) ** 0.5
    assert found.success <= 0.2


def test_warm_start_moves_are_uniform_given_the_state() -> None:
    found = random_baseline(LAKE, episodes=1000, seed=2)
    assert found is not None
    moves: dict[int, Counter[str]] = {}
    for transcript in found.transcripts:
        text = TOKENIZER.decode(transcript.ids)
        for place in np.flatnonzero(transcript.sampled)[::2]:
            view = text[place - 20 : place].replace("\n", "")
            moves.setdefault(view.index("P"), Counter())[text[place]] += 1
    often = {state: counts for state, counts in moves.items() if counts.total() >= 100}
    assert len(often) >= 5
    for counts in often.values():
        expected = counts.total() / 4
        assert sum((counts[move] - expected) ** 2 / expected for move in MOVES) < CHI2_3_DEGREES


def test_warm_start_answers_are_right_one_time_in_ten_and_blind_to_the_problem() -> None:
    episodes = 4000
    spec = spec_of(DIGITS)
    found = random_baseline(DIGITS, episodes=episodes, seed=3)
    assert found is not None
    assert abs(found.success - 0.1) < 4 * (0.09 / episodes) ** 0.5
    held_out = set(spec.held_out)
    right: Counter[str] = Counter()
    for transcript in found.transcripts:
        text = TOKENIZER.decode(transcript.ids)
        digits, answer = text[4:9:2], text[12]
        assert int(digits) not in held_out
        right[max(digits)] += answer == max(digits)
        right["all " + max(digits)] += 1
    for digit in "56789":
        share = right[digit] / right["all " + digit]
        assert abs(share - 0.1) < 4 * (0.09 / right["all " + digit]) ** 0.5


def test_transcripts_are_what_the_policy_would_have_read_and_sampled() -> None:
    found = random_baseline(LAKE, episodes=50, seed=4)
    assert found is not None
    assert found.episodes == len(found.transcripts) == 50
    for transcript in found.transcripts:
        assert transcript.ids.dtype == np.int32
        assert transcript.sampled.dtype == np.bool_
        assert transcript.ids.shape == transcript.sampled.shape
        text = TOKENIZER.decode(transcript.ids)
        assert text.startswith("PFFF\nFHFH\nFFFH\nHFFG\n")
        mine = TOKENIZER.decode(transcript.ids[transcript.sampled])
        assert set(mine[::2]) <= set(MOVES)
        assert set(mine[1::2]) == {"\n"}
        assert len(mine) <= 2 * TURNS
        assert transcript.sampled[-1], "nothing is read after the last action"


def test_the_same_seed_draws_the_same_episodes() -> None:
    def texts(seed: int) -> list[str]:
        found = random_baseline(DIGITS, episodes=20, seed=seed)
        assert found is not None
        return [TOKENIZER.decode(transcript.ids) for transcript in found.transcripts]

    assert texts(1) == texts(1) != texts(2)


def test_the_best_constant_answer_of_max_digit_is_nine() -> None:
    found = constant_baseline(DIGITS, seed=0)
    assert found is not None
    assert (found.answer, found.episodes) == ("9", 1000)
    assert found.success == pytest.approx(0.271)


def test_the_best_constant_answer_of_the_one_frozen_lake_is_its_solution_and_is_shown() -> None:
    found = constant_baseline(LAKE, seed=0)
    assert found is not None
    assert (found.success, found.episodes) == (1.0, 1)
    assert found.answer.replace(" ", "") in set(solutions(MAP))


def test_a_limit_tries_constant_answers_on_a_sample() -> None:
    found = constant_baseline(DIGITS, seed=0, limit=100)
    assert found is not None
    assert (found.answer, found.episodes) == ("9", 100)
    assert 0.1 < found.success < 0.45


def test_a_task_that_knows_no_action_has_no_baseline() -> None:
    task = TaskConfig.model_validate({"env": {"kind": "python", "entry": f"{__name__}:Silent"}})
    assert random_baseline(task, episodes=5, seed=0) is None
    assert constant_baseline(task, seed=0) is None


def test_a_scored_task_is_judged_by_its_scorer() -> None:
    task = TaskConfig.model_validate(
        {
            "env": {"kind": "python", "entry": f"{__name__}:Talker"},
            "scorer": {"kind": "python", "entry": f"{__name__}:length_reward"},
            "success_at": 5.0,
        }
    )
    found = random_baseline(task, episodes=3, seed=0)
    assert found is not None
    assert found.success == 1.0


def test_turns_too_short_for_an_action_are_refused() -> None:
    task = LAKE.model_copy(update={"max_tokens": 1})
    with pytest.raises(ConfigError, match=r"the action '.\\n' needs 2 tokens, its end included; use max_tokens=2"):
        random_baseline(task, episodes=1, seed=0)


def test_an_episode_ends_where_the_context_is_full() -> None:
    spec = dataclasses.replace(spec_of(LAKE), max_context=64)
    found = random_baseline(LAKE, spec=spec, episodes=50, seed=0)
    assert found is not None
    assert max(len(transcript.ids) for transcript in found.transcripts) == 44


def mine(cls: str, **more: object) -> TaskConfig:
    return TaskConfig.model_validate({"env": {"kind": "python", "entry": f"{__name__}:{cls}"}, "size": 50, **more})


class Sometimes(Talker):
    """Right in every step but the seventh, fourteenth, .. of all."""

    steps = 0

    def step(self, action: str) -> StepResult:
        Sometimes.steps += 1
        if Sometimes.steps % 7 == 0:
            raise OSError("no such door")
        return StepResult("", reward=1.0, terminated=True)

    def constant_answers(self) -> list[tuple[str, ...]]:
        return [("a",), ("b",)]


class Broken(Talker):
    def step(self, action: str) -> StepResult:
        raise OSError("no such door")


HELD = threading.Event()
"""Never set while a test runs: what waits for it hangs."""


class HangsOnce(Talker):
    hung = False

    def step(self, action: str) -> StepResult:
        if not HangsOnce.hung:
            HangsOnce.hung = True
            HELD.wait()
        return StepResult("", terminated=True)


class HangsAlways(Talker):
    def random_action(self, rng: random.Random) -> str:
        HELD.wait()
        return ""


def test_an_episode_that_raises_is_drawn_again_and_counted() -> None:
    Sometimes.steps = 0
    found = random_baseline(mine("Sometimes", max_tokens=8), episodes=60, seed=0)
    assert found is not None
    assert (found.episodes, len(found.transcripts), found.success) == (60, 60, 1.0)
    assert len(found.failures) == 9
    assert {(one.where, one.kind) for one in found.failures} == {("env", "raised")}
    assert "OSError: no such door" in found.failures[-1].detail
    constant = constant_baseline(mine("Sometimes", max_tokens=8), seed=0)
    assert constant is not None
    assert (constant.success, constant.episodes) == (1.0, 50)
    assert constant.failures


def test_a_step_that_hangs_costs_its_deadline_and_no_more() -> None:
    HangsOnce.hung = False
    found = random_baseline(mine("HangsOnce", max_tokens=8), episodes=5, seed=0, deadlines=Deadlines(env_step_s=0.05))
    HELD.set()
    HELD.clear()
    assert found is not None
    assert found.episodes == 5
    assert [(one.kind, one.detail) for one in found.failures] == [("timeout", "step ran longer than 0.05 s")]


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        ("Broken", "8 of 8 episodes that were played before training failed.*\nenv raised: OSError: no such door"),
        ("HangsAlways", "4 of 4 episodes .*\nenv timeout: random_action ran longer than 0.05 s"),
    ],
)
def test_an_environment_that_always_fails_ends_the_run_with_its_failure(cls: str, told: str) -> None:
    with pytest.raises(RunFailed, match=told):
        random_baseline(mine(cls, max_tokens=8), episodes=500, seed=0, deadlines=Deadlines(env_step_s=0.05))
    HELD.set()
    HELD.clear()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("episodes-"))


def test_more_episodes_than_are_scored_are_played_for_their_transcripts() -> None:
    found, fewer = (random_baseline(DIGITS, episodes=n, scored=40, seed=0) for n in (100, 40))
    assert found is not None
    assert fewer is not None
    assert (found.episodes, len(found.transcripts)) == (40, 100)
    assert found.success == fewer.success
