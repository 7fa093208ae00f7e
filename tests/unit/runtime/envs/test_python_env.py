"""Users' own classes by name: two methods are enough, the rest has defaults, and mistakes are named."""

from __future__ import annotations

import random

import pytest

from rollart.config.schema import PythonEnv
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.envs.python import python_env
from rollart.runtime.envs.text import StepResult


class Parity:
    """The least that a user writes."""

    def __init__(self, modulus: int = 100) -> None:
        self.modulus = modulus
        self.n = 0

    def reset(self, seed: int) -> str:
        self.n = seed % self.modulus
        return f"{self.n} is odd? "

    def step(self, action: str) -> StepResult:
        right = action.strip() == ("yes" if self.n % 2 else "no")
        return StepResult("", reward=float(right), terminated=True, metrics={"n": self.n})


class Whole(Parity):
    """One that says more about itself."""

    closed = False
    chance = 0

    def seed_chance(self, seed: int) -> None:
        Whole.chance = seed

    def close(self) -> None:
        Whole.closed = True

    def canonical(self, seed: int) -> int:
        return seed % self.modulus

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(["yes", "no"])

    def constant_answers(self) -> list[list[str]]:
        return [["yes"], ["no"]]


class NoStep:
    def reset(self, seed: int) -> str:
        return "?"


NOT_A_CLASS = 3


def entry(name: str, **kwargs: object) -> PythonEnv:
    return PythonEnv(kind="python", entry=f"{__name__}:{name}", kwargs=dict(kwargs))


def test_two_methods_are_enough_and_the_rest_has_defaults() -> None:
    env = python_env(entry("Parity", modulus=10))
    assert env.reset(13) == "3 is odd? "
    assert env.step("yes").reward == 1.0
    env.seed_chance(1)
    env.close()
    assert env.canonical(13) == 13
    assert env.random_action(random.Random(0)) is None
    assert list(env.constant_answers()) == []


def test_what_a_class_says_about_itself_is_used() -> None:
    env = python_env(entry("Whole"))
    env.seed_chance(5)
    env.close()
    assert (Whole.chance, Whole.closed) == (5, True)
    assert env.canonical(113) == 13
    assert env.random_action(random.Random(0)) in ("yes", "no")
    assert list(env.constant_answers()) == [["yes"], ["no"]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parity", "not of the form package.module:Name"),
        ("no_such_package.envs:Parity", "cannot import 'no_such_package.envs'"),
        (f"{__name__}:Parrity", "did you mean 'Parity'"),
        (f"{__name__}:NOT_A_CLASS", "is a int, not a class or function"),
    ],
)
def test_a_name_that_cannot_be_used_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        python_env(PythonEnv(kind="python", entry=name))


def test_a_class_without_step_is_explained() -> None:
    with pytest.raises(EnvError, match=r"NoStep has no method 'step'"):
        python_env(entry("NoStep"))
