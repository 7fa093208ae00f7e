"""TextWorld's games as tasks: made once, equal for equal seeds, winnable, and safe from what a model may write."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollart.config.schema import TaskConfig, TextWorldEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.tasks import instances
from rollart.runtime.envs.text import StepResult
from rollart.runtime.envs.textworld import TextWorld
from rollart.runtime.envs.textworld_games import canonical_id, described, game_file, make_game
from rollart.runtime.made_once import cache_root, made_once

SEED = 1
"""The game of two commands that most tests play: open the safe, take the mouse."""


def config(**fields: Any) -> TextWorldEnv:
    return TextWorldEnv(kind="textworld", **({"commands": "acting"} | fields))


def game(**fields: Any) -> TextWorld:
    return TextWorld(config(**fields))


def won(env: TextWorld, *commands: str) -> list[StepResult]:
    env.reset(SEED)
    return [env.step(command) for command in commands]


def test_a_game_says_its_goal_and_what_can_be_done() -> None:
    env = game()
    text = env.reset(SEED)
    assert "recover the mouse from the safe" in text
    assert text.endswith("\nYou can: open safe, take passkey\nWrite one command, nothing else.")
    assert "$$" not in text
    assert "\n>" not in text
    assert "You can" not in game(commands="none").reset(SEED)
    assert "examine safe, inventory, look, open safe, take passkey" in game(commands="all").reset(SEED)


@pytest.mark.parametrize(("reward", "given"), [("score", [0.0, 1.0]), ("progress", [0.5, 0.5])])
def test_the_quest_is_won_by_its_commands(reward: str, given: list[float]) -> None:
    first, last = won(game(reward=reward), "open safe", "I would say:\n> Take Mouse from safe.")
    assert [first.reward, last.reward] == given
    assert (first.terminated, last.terminated) == (False, True)
    assert first.metrics == {"score": 0.0, "progress": 0.5, "won": 0.0}
    assert last.metrics == {"score": 1.0, "progress": 1.0, "won": 1.0}
    assert first.text.startswith("You open the safe, revealing a mouse.\nYou can: ")
    assert last.text.endswith("Your score has just gone up by one point.")


def test_going_back_takes_progress_back() -> None:
    steps = won(game(reward="progress"), "open safe", "close safe", "open safe")
    assert [step.reward for step in steps] == [0.5, -0.5, 0.5]


def test_a_number_is_a_command_where_commands_are_numbered() -> None:
    env = game(commands="numbered")
    assert env.reset(SEED).endswith(
        "\nYou can:\n1: open safe\n2: take passkey\nWhich number do you choose? Answer with the number only."
    )
    assert env.step("1").text.startswith("You open the safe")
    for answer in ("I choose 2.", "take passkey"):
        env.reset(SEED)
        assert env.step(answer).text.startswith("You pick up the passkey")
    for answer in ("17", "0", "1 or 2", "", "one", "9" * 40):
        assert env.step(answer).bad_action
    assert env.random_action(random.Random(0)) in "123456"
    assert ("1",) in env.constant_answers()
    assert not list(game().constant_answers())
    assert won(game(), "1")[0].bad_action, "without numbers a number is no command"


@pytest.mark.parametrize(
    "action", ["restart", "quit", "save", "undo", "restore", "", "\n", "hello there", "tw-trace-actions"]
)
def test_what_is_no_command_of_the_game_never_reaches_it(action: str) -> None:
    env = game(bad_action_reward=-0.1)
    [step] = won(env, action)
    assert (step.bad_action, step.reward, step.terminated) == (True, -0.1, False)
    assert step.text.startswith("That is no command.\nYou can: open safe")
    assert env.step("open safe").text.startswith("You open the safe"), "the game goes on where it was"


def test_a_command_that_is_not_possible_is_answered_by_the_game() -> None:
    [step] = won(game(), "open moon")
    assert (step.bad_action, step.reward) == (False, 0.0)
    assert step.text.startswith("You can't see any such thing.")


def test_after_its_end_a_game_takes_no_step() -> None:
    env = game()
    won(env, "open safe", "take mouse from safe")
    with pytest.raises(EnvError, match="call reset first"):
        env.step("look")
    with pytest.raises(EnvError, match="call reset first"):
        game().step("look")


def test_a_game_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    """Made a second time, in another place, it is the same game; other parameters make another one."""
    path = game_file(config(), SEED)
    assert path.is_relative_to(cache_root())

    copy = made_once("again", partial(make_game, config(), SEED), tmp_path)
    assert described(copy) == described(path.parent)
    # nothing in it tells where it was made: it decides in every installation alike what is held back
    assert not [word for word in (sys.prefix, str(tmp_path), str(cache_root())) if word in json.dumps(described(copy))]
    assert canonical_id(config(), SEED) == canonical_id(config(reward="progress"), SEED)
    assert canonical_id(config(), SEED) != canonical_id(config(), 0)


def test_random_actions_are_well_formed_and_blind() -> None:
    env = game()
    assert env.random_action(random.Random(0)) == "look", "before any game"
    env.reset(SEED)
    drawn = {env.random_action(random.Random(seed)) for seed in range(60)}
    assert {"open safe", "take passkey", "insert passkey into safe"} <= drawn
    before = env.random_action(random.Random(3))
    env.step("open safe")
    assert env.random_action(random.Random(3)) == before


def test_many_games_are_played_at_once_in_threads() -> None:
    """As in an env host: what one session does is the same as if it were alone."""

    def play(seed: int) -> list[str]:
        env, draw = game(), random.Random(seed)
        texts = [env.reset(seed % 2)]
        texts += [env.step(env.random_action(draw)).text for _ in range(6)]
        env.close()
        return texts

    alone = [play(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, [0, 1, 2, 3] * 2)) == alone * 2


def test_instances_are_different_games() -> None:
    task = TaskConfig(env=config(), size=2, max_turns=4, max_tokens=24)
    assert instances("adventure", task).train == (0, 1)
