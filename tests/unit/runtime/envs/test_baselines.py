"""What is given away without learning: baselines are low, and the warm start's data hold answers no more often than chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from rollart.config.schema import CharsTokenizer, RunConfig, TaskConfig
from rollart.core.errors import ConfigError
from rollart.core.types import TaskSpec
from rollart.runtime.envs.baselines import constant_baseline, random_baseline
from rollart.runtime.envs.frozen_lake import MOVES, STEPS, solutions
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.envs.text import StepResult
from rollart.runtime.tokenizers import build_tokenizer

TOKENIZER = build_tokenizer(CharsTokenizer())
MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
TURNS = 12
CHI2_3_DEGREES = 21.1
"""Exceeded once in 10,000 draws of a uniform four-sided choice; the draws here are fixed by their seed."""

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
    found = random_baseline(spec_of(LAKE), LAKE, TOKENIZER, episodes=episodes, seed=1)
    assert found is not None
    chance = chance_of_goal(TURNS)
    assert 0 < chance < 0.02
    assert abs(found.success - chance) < 4 * (chance / episodes) ** 0.5
    assert found.success <= 0.2


def test_warm_start_moves_are_uniform_given_the_state() -> None:
    found = random_baseline(spec_of(LAKE), LAKE, TOKENIZER, episodes=1000, seed=2)
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
    found = random_baseline(spec, DIGITS, TOKENIZER, episodes=episodes, seed=3)
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
    found = random_baseline(spec_of(LAKE), LAKE, TOKENIZER, episodes=50, seed=4)
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
        found = random_baseline(spec_of(DIGITS), DIGITS, TOKENIZER, episodes=20, seed=seed)
        assert found is not None
        return [TOKENIZER.decode(transcript.ids) for transcript in found.transcripts]

    assert texts(1) == texts(1) != texts(2)


def test_the_best_constant_answer_of_max_digit_is_nine() -> None:
    found = constant_baseline(spec_of(DIGITS), DIGITS, TOKENIZER, seed=0)
    assert found is not None
    assert (found.answer, found.episodes) == ("9", 1000)
    assert found.success == pytest.approx(0.271)


def test_the_best_constant_answer_of_the_one_frozen_lake_is_its_solution_and_is_shown() -> None:
    found = constant_baseline(spec_of(LAKE), LAKE, TOKENIZER, seed=0)
    assert found is not None
    assert (found.success, found.episodes) == (1.0, 1)
    assert found.answer.replace(" ", "") in set(solutions(MAP))


def test_a_limit_tries_constant_answers_on_a_sample() -> None:
    found = constant_baseline(spec_of(DIGITS), DIGITS, TOKENIZER, seed=0, limit=100)
    assert found is not None
    assert (found.answer, found.episodes) == ("9", 100)
    assert 0.1 < found.success < 0.45


def test_a_task_that_knows_no_action_has_no_baseline() -> None:
    task = TaskConfig.model_validate({"env": {"kind": "python", "entry": f"{__name__}:Silent"}})
    assert random_baseline(spec_of(task), task, TOKENIZER, episodes=5, seed=0) is None
    assert constant_baseline(spec_of(task), task, TOKENIZER, seed=0) is None


def test_a_scored_task_is_judged_by_its_scorer() -> None:
    task = TaskConfig.model_validate(
        {
            "env": {"kind": "python", "entry": f"{__name__}:Talker"},
            "scorer": {"kind": "python", "entry": f"{__name__}:length_reward"},
            "success_at": 5.0,
        }
    )
    found = random_baseline(spec_of(task), task, TOKENIZER, episodes=3, seed=0)
    assert found is not None
    assert found.success == 1.0


def test_turns_too_short_for_an_action_are_refused() -> None:
    task = LAKE.model_copy(update={"max_tokens": 1})
    with pytest.raises(ConfigError, match=r"the action '.\\n' needs 2 tokens, its end included; use max_tokens=2"):
        random_baseline(spec_of(task), task, TOKENIZER, episodes=1, seed=0)


def test_an_episode_ends_where_the_context_is_full() -> None:
    spec = task_specs(
        RunConfig.model_validate({"tasks": {"t": LAKE}, "model": {"kind": "scratch", "max_positions": 64}}), TOKENIZER
    )[0]
    found = random_baseline(spec, LAKE, TOKENIZER, episodes=50, seed=0)
    assert found is not None
    assert max(len(transcript.ids) for transcript in found.transcripts) == 44
