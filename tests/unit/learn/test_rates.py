"""The learning rate over a run."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.config.schema import Optimizer
from rollart.learn.rates import learning_rate


def rates(steps: int, **settings: Any) -> list[float]:
    return [learning_rate(Optimizer(lr=1.0, **settings), step, steps) for step in range(steps)]


def test_the_rate_is_constant_by_default() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert learning_rate(Optimizer(lr=1.0), 10, 3) == 1.0


def test_warm_up_rises_to_the_full_rate() -> None:
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_would_reach_zero_after_the_last_step() -> None:
    assert rates(4, decay="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(6, decay="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_decay_falls_along_half_a_cosine() -> None:
    assert rates(4, decay="cosine") == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decayed_rate_is_zero_beyond_the_run_and_never_below(decay: Any) -> None:
    settings = Optimizer(lr=1.0, decay=decay, warmup_steps=2)
    assert learning_rate(settings, 9, 4) == pytest.approx(0)
    assert learning_rate(settings, 1, 1) == 1.0
    assert learning_rate(settings, 5, 1) == pytest.approx(0)
