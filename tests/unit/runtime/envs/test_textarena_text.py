"""textarena's single-player games as tasks: isolated draws, invalid moves as bad actions, refusals that help."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollart.config.schema import TaskConfig, TextArenaEnv
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.envs.tasks import instances
from rollart.runtime.envs.textarena import TextArena
from rollart.runtime.envs.textarena_games import EXAMPLES, games

PLAYED = (
    "2048-v0", "Bandit-v0", "Blackjack-v0", "FifteenPuzzle-v0", "FrozenLake-v0-random", "GuessTheNumber-v0",
    "LightsOut-v0", "Mastermind-v0-extreme", "Minesweeper-v0-small", "Secretary-v0", "Sudoku-v0-easy", "TowerOfHanoi-v0",
)  # fmt: skip


def arena(game: str, **fields: Any) -> TextArena:
    return TextArena(TextArenaEnv(kind="textarena", id=game, **fields))


def play(game: str, seed: int, moves: int = 12) -> list[tuple[str, float, bool]]:
    """Random moves, the same for the same seed."""
    env, draw = arena(game), random.Random(seed)
    seen = [(env.reset(seed), 0.0, False)]
    for _ in range(moves):
        step = env.step(env.random_action(draw) or "")
        seen.append((step.text, step.reward, step.bad_action))
        if step.terminated:
            break
    env.close()
    return seen


def test_a_game_is_won_by_its_moves_and_pays_at_its_end() -> None:
    env = arena("TowerOfHanoi-v0")
    assert "disks" in env.reset(0)
    steps = [env.step(f"[{move}]") for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
    assert [step.reward for step in steps] == [0.0] * 6 + [1.0]
    assert [step.terminated for step in steps] == [False] * 6 + [True]
    assert not any(step.bad_action for step in steps)
    assert steps[-1].metrics == {"game_turns": 7.0}
    assert "[A C]" not in steps[0].text, "the player's own words are in the context already"
    with pytest.raises(EnvError, match="after the end"):
        env.step("[A C]")


def test_an_invalid_move_is_a_bad_action_that_says_why_and_the_second_ends_the_game() -> None:
    env = arena("GuessTheNumber-v0", bad_action_reward=-0.25)
    env.reset(3)
    first, second = env.step("I do not know"), env.step("[99]")
    assert (first.bad_action, first.terminated, first.reward) == (True, False, -0.25)
    assert "did not respond with valid '[number]'" in first.text
    assert (second.bad_action, second.terminated, second.reward) == (True, True, -0.25)
    assert "outside the range" in second.text
    env.reset(3)
    env.step("nothing")
    right = env.step("[10]")
    assert not right.bad_action, "a valid move after an invalid one"


def test_a_reward_that_a_game_gives_in_the_place_of_its_reason_is_found() -> None:
    env = arena("Countdown-v0")
    env.reset(0)
    env.step("x")
    last = env.step("x")
    assert last.terminated
    assert last.reward == pytest.approx(0.568)


@pytest.mark.parametrize("game", PLAYED)
def test_the_seed_decides_problem_and_chance_whatever_plays_beside_it(game: str) -> None:
    alone = [play(game, seed) for seed in range(4)]
    before = random.getstate()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: play(game, seed), [0, 1, 2, 3] * 2))
    assert together == alone * 2
    assert random.getstate() == before, "the generators of the process are as they were"


def test_a_game_is_the_same_in_every_process() -> None:
    code = """
import json, sys
sys.path.insert(0, "tests/unit/runtime/envs")
from test_textarena_text import PLAYED, arena
print(json.dumps({game: [arena(game).reset(5), arena(game).canonical(5)] for game in PLAYED}))
"""
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "9"}
    )
    assert json.loads(there.stdout) == {game: [arena(game).reset(5), arena(game).canonical(5)] for game in PLAYED}


def test_a_problem_is_told_by_what_is_hidden_too() -> None:
    guess, hanoi = arena("GuessTheNumber-v0"), arena("TowerOfHanoi-v0")
    assert len({guess.canonical(seed) for seed in range(200)}) == 20, "20 numbers, one prompt"
    assert len({arena("Minesweeper-v0").canonical(seed) for seed in range(5)}) == 5
    assert hanoi.canonical(0) == hanoi.canonical(1)
    env = {"kind": "textarena", "id": "TowerOfHanoi-v0"}
    with pytest.raises(ConfigError, match="only 1 different instances were found; use size=1"):
        instances("hanoi", TaskConfig.model_validate({"env": env, "size": 2}))


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        ("NoSuchGame-v0", "no such game"),
        ("FrozenLake-v0-train", "leave it off"),
        ("TicTacToe-v0", "for two or more players"),
        ("TwentyQuestions-v0", "asked over the network"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason_and_games_that_work(game: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        arena(game)
    assert all(name in str(refused.value) for name in EXAMPLES)


def test_arguments_that_a_game_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        arena("TowerOfHanoi-v0", kwargs={"no_such": 1})
    assert "with 5 disks" in arena("TowerOfHanoi-v0", kwargs={"num_disks": 5}).reset(0)


def test_every_game_is_listed_with_why_it_cannot_be_played() -> None:
    listed = games()
    assert len(listed) > 200
    assert all(listed[name] is None for name in (*EXAMPLES, *PLAYED))
    assert listed["Chess-v0"] == "it is for two or more players"


def test_games_that_read_word_lists_name_the_download_before_anything_is_fetched() -> None:
    """In a process of its own, where there is no data of nltk."""
    code = """
import nltk
nltk.data.path[:] = []
nltk.download = lambda *names, **options: print("DOWNLOAD", names)
from rollart.config.schema import TextArenaEnv
from rollart.core.errors import ConfigError
from rollart.runtime.envs.textarena import TextArena
for game in ("Wordle-v0", "Hangman-v0"):
    try:
        TextArena(TextArenaEnv(kind="textarena", id=game))
    except ConfigError as error:
        print(error)
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    assert "python -m nltk.downloader words averaged_perceptron_tagger_eng; games that work: FrozenLake-v0" in lines[0]
    assert "python -m nltk.downloader words; games that work" in lines[1]


def test_without_the_packages_their_tasks_are_refused_with_the_install_line() -> None:
    """In a process of its own, where neither can be imported."""
    code = """
import sys
sys.modules["textarena"] = sys.modules["reasoning_gym"] = None
from rollart.config.schema import TaskConfig
from rollart.core.errors import ConfigError
from rollart.runtime.envs.tasks import build_env
for env in ({"kind": "textarena", "id": "2048-v0"}, {"kind": "reasoning_gym", "dataset": "chain_sum"}):
    try:
        build_env(TaskConfig.model_validate({"env": env}))
    except ConfigError as error:
        print(str(error).rpartition("; ")[2])
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        'install it with: pip install "rollart[textarena]"', 'install it with: pip install "rollart[reasoning-gym]"', "[]",
    ]  # fmt: skip
