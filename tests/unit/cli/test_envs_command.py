"""`rollart envs`: what it lists, what can be named, what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollart.cli import envs, envs_text, extras
from rollart.cli.main import main
from rollart.cli.tables import amount, duration, table

GAME = '''
from rollart.runtime.envs.text import StepResult
class Coin:
    """Heads or tails by the parity of the seed."""
    def __init__(self, side="heads"):
        self.side = side
    def reset(self, seed):
        print("a game that prints")
        self.seed = seed
        return "heads or tails? "
    def step(self, action):
        right = action == ("heads" if self.seed % 2 else "tails")
        return StepResult("yes" if right else "no", reward=float(right), terminated=True, metrics={"luck": float(right)})
    def random_action(self, rng):
        return rng.choice(("heads", "tails"))
class Broken(Coin):
    def step(self, action):
        return StepResult("?", reward=float("nan"))
'''

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def it(*words: str) -> tuple[int, str]:
        code = main(["envs", *words])
        said = capsys.readouterr()
        return code, said.out if code != 2 else said.err

    return it


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A module that can be imported as a user's is."""
    folder = tmp_path_factory.mktemp("games")
    (folder / "coin_games.py").write_text(GAME, encoding="utf-8")
    import sys

    sys.path.insert(0, str(folder))
    return "coin_games"


def test_every_kind_is_listed_with_its_fields_and_whether_it_is_installed(run: Run) -> None:
    code, said = run("list")
    assert code == 0
    blocks = {block.split()[0]: block for block in said.split("\n\n")}
    assert envs.KINDS.keys() <= blocks.keys()
    assert {"frozen_lake", "python", "reasoning_gym", "textarena"} <= envs.KINDS.keys()
    assert "id (required)" in blocks["textarena"]
    assert "side=4" in blocks["frozen_lake"]
    rows = json.loads(run("list", "--json")[1])
    assert [row["kind"] for row in rows] == list(envs.KINDS)
    assert all(row["installed"] and row["install"] is None for row in rows)


def test_a_kind_whose_package_is_missing_has_the_install_line() -> None:
    row: Mapping[str, Any] = {
        "kind": "textarena", "what": "A game", "installed": False, "fields": [], "install": extras.install_line(["textarena"]),
    }  # fmt: skip
    assert "textarena  (not installed; run: " in envs_text.kinds([row])
    assert "-m pip install 'rollart[textarena]')" in envs_text.kinds([row])


def test_what_a_package_offers_is_listed_by_name(run: Run) -> None:
    code, said = run("list", "reasoning_gym")
    assert code == 0
    assert "as dataset=NAME" in said
    assert "chain_sum" in said
    games = json.loads(run("list", "textarena", "--json")[1])["names"]
    assert games["FrozenLake-v0"] is None
    assert "two or more players" in games["TicTacToe-v0"]
    assert run("list", "textarenas") == (2, "rollart envs: list textarenas: no such kind; did you mean textarena?\n")


def test_a_users_own_class_is_tried(run: Run, game: str) -> None:
    code, said = run("try", f"{game}:Coin", "--episodes", "40", "--seed", "3")
    assert code == 0
    assert "--- episode of seed 3 (1 turns, terminated) ---\nheads or tails? \n> " in said
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    assert "40 terminated" in lines["episodes"]
    assert lines["luck"].split()[:2] == ["luck", "40"]
    assert said.endswith("no problems\n")
    assert "a game that prints" not in said, "what it prints is no part of the answer"


def test_a_broken_class_ends_with_1_and_what_is_wrong(run: Run, game: str) -> None:
    code, said = run("try", f"{game}:Broken", "--episodes", "3")
    assert code == 1
    assert said.splitlines()[-2:] == [
        "1 problem(s):",
        "  seed 0, turn 1: step gave the reward nan; a reward is a finite number",
    ]


def test_a_kind_takes_its_own_keys_and_those_of_a_task(run: Run) -> None:
    code, said = run("try", "frozen_lake", "map=random", "side=3", "max_turns=2", "--episodes", "5", "--json")
    data = json.loads(said)
    assert code == 0
    assert (data["env"]["map"], data["env"]["side"], data["episodes"]) == ("random", 3, 5)
    assert data["turns"]["max"] <= 2
    assert len(data["first"]["turns"][0]["text"].splitlines()) == 3
    assert {"reward", "success", "bad_actions", "seconds", "metrics", "notes", "problems"} <= data.keys()
    code, said = run("try", "python", f"entry={envs.__name__}:Nothing")
    assert code == 2
    assert "has no 'Nothing'" in said


def test_a_task_of_a_recipe_is_tried_as_it_is_configured(run: Run) -> None:
    code, said = run("try", "first_run/max_digit", "tasks.max_digit.env.digits=4", "--episodes", "4", "--json")
    assert code == 0
    data = json.loads(said)
    assert (data["what"], data["env"]) == ("first_run/max_digit", {"kind": "max_digit", "digits": 4})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["try"], "say what to play: a kind (frozen_lake"),
        (["try", "max_digits"], "did you mean max_digit?"),
        (["try", "nope"], "no kind of environment has this name; there are: frozen_lake, "),
        (["try", "nope"], "\nor write your own package.module:Class, or RECIPE/TASK (recipes: "),
        (["try", "first_run"], "name one of its tasks: first_run/frozen_lake, first_run/max_digit"),
        (["try", "first_run/none"], "name one of its tasks"),
        (["try", "frozen_lake", "sides=3"], "did you mean env.side?"),
        (["try", "textarena"], "env.id is missing"),
        (["try", "max_digit", "--episodes", "0"], "--episodes=0: too small; write 1 or more"),
        (["try", "textarena", "id=Wordle-v9"], "no such game"),
        (["list", "python", "a=1"], "list: a=1 means nothing to it"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_what_can(run: Run, words: list[str], message: str) -> None:
    code, said = run(*words)
    assert code == 2
    assert message in said


def test_a_table_lines_up_and_figures_have_units() -> None:
    assert table([("a", "1", "x"), ("bb", "22", "y")], right=(1,)) == "a    1  x\nbb  22  y"
    assert table([]) == ""
    assert (amount(1 / 3), amount(12345678.0)) == ("0.3333", "12,345,678")
    assert (duration(2.5), duration(0.0123), duration(4e-6), duration(0)) == ("2.5 s", "12.3 ms", "4 us", "0 s")


def test_a_run_folder_is_not_mistaken_for_a_recipe(run: Run, tmp_path: Path) -> None:
    code, said = run("try", str(tmp_path))
    assert code == 2
    assert "or RECIPE/TASK" in said
