"""Splits of overlap rows and the errors on what they hold back; shared by the fit and the validation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from rollart.perf.overlap import Level, OverlapModel, overlapped
from rollart.perf.overlap_fit import Measured, fit

FOLDS = 5
SEEDS = 5
"""Repeats of the five folds with other draws: one draw moves the figure by a few tenths of a per cent."""
LEVELS: tuple[Level, ...] = (0, 1, 2)

Predict = Callable[[Measured], float]


def absolute_error(rows: Sequence[Measured], seconds: Sequence[float]) -> float:
    """Sum of |predicted - measured| over the sum of measured."""
    return sum(abs(guess - row.seconds) for row, guess in zip(rows, seconds, strict=True)) / sum(
        row.seconds for row in rows
    )


def fitted_or_none(rows: Sequence[Measured]) -> OverlapModel:
    """The model of `rows`; without an overlapped row there is nothing to learn but that overlap costs nothing."""
    return fit(rows) if any(row.overlap_ratio > 0 for row in rows) else OverlapModel(held_sms=0.0)


def at_level(model: OverlapModel, level: Level | None, row: Measured) -> float:
    """Seconds that `model` gives for `row`."""
    return overlapped(row.kernel, row.overlap_ratio, model, level).seconds


def constant_factor(rows: Sequence[Measured]) -> Predict:
    """One factor for every kernel: measured seconds over seconds alone."""
    factor = sum(row.seconds for row in rows) / sum(row.kernel.solo_s for row in rows)
    return lambda row: factor * row.kernel.solo_s


def stratified(rows: Sequence[Measured], seed: int) -> list[int]:
    """Fold of each row: rows of one kernel name are dealt out evenly."""
    generator = random.Random(seed)
    folds = [0] * len(rows)
    for name in sorted({row.kernel.name for row in rows}):
        places = [place for place, row in enumerate(rows) if row.kernel.name == name]
        generator.shuffle(places)
        first = generator.randrange(FOLDS)
        for count, place in enumerate(places):
            folds[place] = (first + count) % FOLDS
    return folds


def by_name(rows: Sequence[Measured]) -> list[int]:
    """Fold of each row: one kernel name each."""
    names = sorted({row.kernel.name for row in rows})
    return [names.index(row.kernel.name) for row in rows]


def held_back(
    rows: Sequence[Measured], folds: Sequence[int], learn: Callable[[Sequence[Measured]], Sequence[Predict]]
) -> list[list[float]]:
    """Seconds of every row by each of the predictors that `learn` makes of the rows of the other folds."""
    guesses: list[list[float]] = []
    for fold in sorted(set(folds)):
        rest = [row for row, place in zip(rows, folds, strict=True) if place != fold]
        predictors = learn(rest) if rest else [_alone] * len(guesses or LEVELS)
        guesses = guesses or [[0.0] * len(rows) for _ in predictors]
        for place, row in enumerate(rows):
            if folds[place] == fold:
                for column, predict in zip(guesses, predictors, strict=True):
                    column[place] = predict(row)
    return guesses


def _alone(row: Measured) -> float:
    """What a kernel takes that nothing disturbs."""
    return row.kernel.solo_s


def all_levels(rest: Sequence[Measured]) -> list[Predict]:
    """Predictors: level 0, level 1, level 2, one constant factor."""
    model = fitted_or_none(rest)
    return [*(partial(at_level, model, level) for level in LEVELS), constant_factor(rest)]


def held_back_errors(rows: Sequence[Measured]) -> dict[int, float]:
    """Error of each level on rows held back, mean over `SEEDS` draws of the folds."""
    draws = [held_back(rows, stratified(rows, seed), all_levels) for seed in range(SEEDS)]
    return {level: sum(absolute_error(rows, draw[level]) for draw in draws) / SEEDS for level in LEVELS}
