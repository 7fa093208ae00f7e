"""The largest of some digits: the seed is the problem."""

from __future__ import annotations

import pytest

from rollart.config.schema import MaxDigitEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.max_digit import MaxDigit


def test_every_problem_rewards_its_largest_digit_only() -> None:
    env = MaxDigit(MaxDigitEnv(kind="max_digit"))
    for seed in range(1000):
        digits = f"{seed:03d}"
        for answer in "0123456789":
            assert env.reset(seed) == f"max {digits[0]} {digits[1]} {digits[2]} = "
            step = env.step(answer)
            assert step.terminated
            assert not step.bad_action
            assert step.reward == (1.0 if answer == max(digits) else 0.0)


def test_the_seed_modulo_the_number_of_problems_is_the_problem() -> None:
    env = MaxDigit(MaxDigitEnv(kind="max_digit"))
    assert env.canonical(123_456_007) == env.canonical(7) == 7
    assert env.reset(123_456_007) == env.reset(7) == "max 0 0 7 = "


@pytest.mark.parametrize("action", ["", "77", "x", "-7", "٧"])
def test_a_bad_answer_is_counted_and_ends_the_only_turn(action: str) -> None:
    env = MaxDigit(MaxDigitEnv(kind="max_digit"))
    env.reset(7)
    step = env.step(action)
    assert (step.bad_action, step.reward, step.terminated) == (True, 0.0, True)
    with pytest.raises(EnvError, match="call reset first"):
        env.step("7")
