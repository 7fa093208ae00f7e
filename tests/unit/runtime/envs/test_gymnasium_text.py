"""Any discrete gymnasium environment as text: nothing of the rendering is lost, actions by number or name."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from rollart.config.schema import GymnasiumEnv
from rollart.core.errors import ConfigError
from rollart.runtime.envs.gymnasium import GymnasiumText, plain

LAKE = {"kind": "gymnasium", "id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}


def test_the_players_place_survives_as_words() -> None:
    env = GymnasiumText(GymnasiumEnv.model_validate(LAKE))
    assert env.reset(0) == "<red:S>FFF\nFHFH\nFFFH\nHFFG\n"
    assert env.step("2").text.endswith("S<red:F>FF\nFHFH\nFFFH\nHFFG\n")


def test_actions_by_name_and_by_number_reach_the_goal() -> None:
    names = ("left", "down", "right", "up")
    env = GymnasiumText(GymnasiumEnv.model_validate({**LAKE, "actions": names}))
    env.reset(0)
    steps = [env.step(action) for action in ("down", "1", "right", "down", "2\n", " right ")]
    assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)
    assert env.random_action(random.Random(0)) in names
    assert [*env.constant_answers()] == [(name,) for name in names]
    env.close()


def test_a_bad_action_lists_what_is_understood() -> None:
    env = GymnasiumText(GymnasiumEnv.model_validate(LAKE))
    view = env.reset(0)
    step = env.step("north")
    assert step.bad_action
    assert step.text == "? use one of: 0 1 2 3\n" + view


def test_the_same_seed_is_the_same_problem() -> None:
    first, second = (GymnasiumText(GymnasiumEnv(kind="gymnasium", id="Taxi-v4")) for _ in range(2))
    assert first.reset(11) == second.reset(11)
    assert len({first.reset(seed) for seed in range(20)}) > 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "CartPole-v1"}, "not as text"),
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b")}, "names 2 actions, but 'FrozenLake-v1' has 4"),
    ],
)
def test_what_cannot_be_text_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymnasiumText(GymnasiumEnv.model_validate({"kind": "gymnasium", **config}))


def test_terminal_codes_become_words_or_go() -> None:
    assert plain("\x1b[2Ja\x1b[43;1mB\x1b[0mc\x1b[34mD\x1b[0m") == "a<yellow:B>c<blue:D>"


def test_without_gymnasium_only_its_tasks_are_refused_with_the_install_line() -> None:
    """In a process of its own, where gymnasium cannot be imported."""
    code = """
import sys
sys.modules["gymnasium"] = None
from rollart.config.schema import TaskConfig
from rollart.core.errors import ConfigError
from rollart.runtime.envs.tasks import build_env
print(build_env(TaskConfig.model_validate({"env": {"kind": "max_digit"}})).reset(7))
for env in ({"kind": "frozen_lake"}, {"kind": "gymnasium", "id": "Taxi-v4"}):
    try:
        build_env(TaskConfig.model_validate({"env": env}))
    except ConfigError as error:
        print(error)
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = 'this task needs gymnasium, which is not installed; install it with: pip install "rollart[envs]"'
    assert done.stdout.splitlines() == ["max 0 0 7 = ", line, line, "[]"]
