"""Rewards from the user's own function, `package.module:function(trajectory_text, metrics) -> float`.

Invariant: only a finite number is a reward. NaN or infinity is a typed failure, so that a broken scorer leaves a
trajectory unscored and never scores it 0. What the function raises passes through to whoever gave it a deadline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from rollart.config.schema import PythonScorer
from rollart.core.errors import ScorerError, failure
from rollart.core.types import Failure
from rollart.runtime.envs.python import resolve

ScoreFn = Callable[[str, Mapping[str, float]], float | Failure]


def build_scorer(config: PythonScorer) -> ScoreFn:
    """The scorer that `config` names. Raises ConfigError when there is no such function."""
    return functools.partial(_score, functools.partial(resolve(config.entry, "scorer.entry"), **config.kwargs))


def _score(function: Callable[..., object], text: str, metrics: Mapping[str, float]) -> float | Failure:
    value = function(text, metrics)
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ScorerError(f"the scorer returned {value!r}, not a number")
    reward = float(value)
    if not math.isfinite(reward):
        return failure("scorer", "not_finite", f"the scorer returned {reward}", retryable=False)
    return reward
