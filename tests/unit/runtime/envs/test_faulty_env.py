"""The environment that fails on purpose: each kind of trouble at its rate, and none where none is asked for."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from rollart.core.errors import EnvError
from rollart.runtime.envs.faulty import Faulty


def outcome(chance: int, **kwargs: Any) -> tuple[float, bool]:
    """(reward, ended by raising) of an episode that answers 9 throughout."""
    env = Faulty(turns=2, **kwargs)
    env.seed_chance(chance)
    total = 0.0
    try:
        env.reset(91)
        while not (result := env.step("9")).terminated:
            total += result.reward
    except EnvError:
        return total, True
    finally:
        env.close()
    return total + result.reward, False


def test_without_rates_it_is_the_problem_again_and_again() -> None:
    env = Faulty(turns=2)
    assert env.reset(90) == "max 0 9 0 = "
    assert env.step("9").text == "yes\nmax 0 9 1 = "
    last = env.step("1")
    assert (last.terminated, last.reward, last.text) == (True, 0.0, "no, 9\n")
    assert outcome(0) == (1.0, False)


def test_it_raises_at_its_rate_and_another_chance_may_come_out_well() -> None:
    failed = sum(outcome(chance, raises=0.1)[1] for chance in range(2000))
    assert 0.27 - 0.04 < failed / 2000 < 0.27 + 0.04  # 3 calls: 1 - 0.9**3
    assert outcome(7, raises=0.1) == outcome(7, raises=0.1)


def test_slow_and_hanging_calls_take_their_time() -> None:
    began = time.monotonic()
    outcome(0, slow=1.0, slow_s=0.01)
    outcome(0, hangs=1.0, hang_s=0.02)
    assert time.monotonic() - began >= 3 * 0.01 + 3 * 0.02


def test_its_children_end_with_it() -> None:
    env = Faulty(spawns=1.0)
    before = set(psutil.Process().children())
    env.reset(0)
    [child] = set(psutil.Process().children()) - before
    env.close()
    assert not child.is_running()


@pytest.mark.parametrize("rates", [{"raises": -0.1}, {"spawns": 1.1}, {"raises": 0.6, "hangs": 0.6}])
def test_rates_that_are_none_are_refused(rates: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="between 0 and 1"):
        Faulty(**rates)
