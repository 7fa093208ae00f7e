"""A run of a batch workload as stretches of one pace, and what requests and tokens in it see.

Owns: how long a request's tokens take from where it starts, and quantiles over tokens and events. Invariant: a request that
begins later ends later, and the last stretch's pace goes on for ever. Why: benchmarks report times per token of requests,
each of which lives through several paces, and distances of tokens, each of which sees one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FAR = 40.0
"""No more events than this above the mean are looked at."""


class Round(NamedTuple):
    """The steps in which each running sequence gets one token on average, prompts of newcomers included."""

    seconds: float
    plain_s: float
    loaded_s: float
    loaded_share: float
    """Of the visits of the scheduler, those with a prompt's part in one of their steps."""


class Stretch(NamedTuple):
    """A part of a run: each running sequence gets `rounds` tokens in `seconds`; `sequences` run on average."""

    rounds: float
    seconds: float
    sequences: float
    now: Round

    @property
    def tokens(self) -> float:
        return self.rounds * self.sequences


def life_s(run: Sequence[Stretch], start_s: float, tokens: float) -> float:
    """Seconds in which a sequence that starts `start_s` after the run's begin gets `tokens`."""
    begun, lived, todo = 0.0, 0.0, tokens
    for stretch in run[:-1]:
        left_s = stretch.seconds - max(start_s - begun, 0.0)
        begun += stretch.seconds
        if left_s <= 0.0:
            continue
        rounds = stretch.rounds * left_s / stretch.seconds
        if todo <= rounds:
            return lived + todo / stretch.rounds * stretch.seconds
        lived, todo = lived + left_s, todo - rounds
    return lived + todo * run[-1].seconds / run[-1].rounds


def quantile_of(ordered: Sequence[float], share: float) -> float:
    """The value that so many of the ordered values stay below."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The value that half of the weight stays below; pairs of value and weight, some of it above 0."""
    ordered = sorted(values)
    half, seen = sum(weight for _, weight in ordered) / 2.0, 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    raise ValueError("no value has a weight")


def poisson_quantile(mean: float, share: float) -> int:
    """The number of independent events that so many stay below where `mean` are usual."""
    count, chance = 0, math.exp(-mean)
    seen = chance
    while seen < share and count < mean + FAR:
        count += 1
        chance *= mean / count
        seen += chance
    return count
