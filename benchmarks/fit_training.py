"""Fits the training model's constants on a folder of published rows and freezes them in the package.

What: global efficiencies by coordinate search from the starting values of `TrainingLaw`, and one constant per
(framework, device). Against what: the mean over suites of the mean absolute error. How: `python
benchmarks/fit_training.py --data DIR` (minutes, one thread) writes
`src/rollart/perf/tables/training_calibration.json`; a fit for each of five folds goes into it too, so that
`validate_training.py` can predict every row of this very data with constants that have not seen it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollart.perf.train_calibration import Calibration, flat_law, law_from
from rollart.perf.train_layers import TrainingLaw
from training_rows import FOLDS, Case, cases, data_digest, fold_of

TABLE = Path(__file__).parents[1] / "src/rollart/perf/tables/training_calibration.json"
SMALL_SUITE = 10
"""Suites below this many rows are not in the target figure; here they weigh by their rows."""
ROWS_PER_SUITE = 100
"""Rows of a suite that a fit looks at, evenly spread: more of the same sweep cost time and add nothing."""
PRIOR_WEIGHT = 0.0008
"""Loss per squared doubling away from the starting value: keeps what the data cannot see where it was."""
SCALE_WEIGHT = 0.001
"""Loss per squared doubling of the constants away from 1: the law itself is to explain what it can."""
STEPS = (0.35, 0.18, 0.09, 0.045)
"""Relative steps of the search, each until no step helps or two rounds are done."""
FIXED = frozenset(
    {
        "operators.kernel_s",
        "step_host_s",
        "operators.memory_fraction",
        "host.blend",
    }
)
"""Not fitted: published (aiconfigurator: 3 us, 0.8 of the bandwidth), or immaterial to the rows at hand."""
CAPS = {
    "dp_hidden": 0.95,
    "tp_hidden": 0.95,
    "a2a_hidden": 0.95,
}
"""Overlap never hides all of it; every other share is at most 1."""
SHARES = frozenset(
    {*CAPS, "host.graph_share", "operators.gemm_fraction", "operators.gemm_fraction_fp8", "operators.gemm_fraction_fp4"}
)
FOLD_ROWS = 60
"""The same for the fits of a cross-validation, which are five."""
ROUNDS = 3
ENOUGH = 3e-4
"""A round that gains less than this ends its step size."""
TOUCH = 1e-6


def thinned(found: Sequence[Case], most: int = ROWS_PER_SUITE) -> list[Case]:
    """At most `most` rows of each suite, evenly spread over it."""
    by_suite: dict[str, list[Case]] = {}
    for case in found:
        by_suite.setdefault(case.suite, []).append(case)
    return [
        rows[int(i * len(rows) / min(most, len(rows)))]
        for rows in by_suite.values()
        for i in range(min(most, len(rows)))
    ]


def weights(found: Sequence[Case]) -> list[float]:
    """Weight of each row: suites count alike, small ones by their rows."""
    count: dict[str, int] = {}
    for case in found:
        count[case.suite] = count.get(case.suite, 0) + 1
    return [1.0 / max(SMALL_SUITE, count[case.suite]) for case in found]


def fitted_scales(found: Sequence[Case], predicted: Sequence[float], weight: Sequence[float]) -> dict[str, float]:
    """Per framework and device the constant that minimises the weighted mean |error|: a weighted median of measured /
    predicted.
    """
    by_key: dict[str, list[tuple[float, float]]] = {}
    for case, seconds, share in zip(found, predicted, weight, strict=True):
        # |c p / m - 1| = (p / m) |c - m / p|
        by_key.setdefault(case.key, []).append((case.measured_s / seconds, share * seconds / case.measured_s))
    scales = {}
    for key, pairs in by_key.items():
        pairs.sort()
        half, passed = sum(share for _, share in pairs) / 2, 0.0
        for ratio, share in pairs:
            passed += share
            if passed >= half:
                scales[key] = ratio
                break
    return scales


@dataclass(slots=True)
class Fit:
    """Rows under fit with their present predictions, so that a trial prices again only what its number touches."""

    found: list[Case]
    start: Mapping[str, float]
    numbers: dict[str, float]
    predicted: list[float] = field(default_factory=list)
    touched: dict[str, list[int]] = field(default_factory=dict)

    def price(self, numbers: Mapping[str, float], rows: Sequence[int]) -> list[float]:
        """All predictions under `numbers`, of which only `rows` may differ from the present ones."""
        law = law_from(numbers)
        priced = list(self.predicted)
        for index in rows:
            priced[index] = self.found[index].predict(law).total_s
        return priced

    def refresh(self, step: float) -> None:
        """Price everything and note which rows each free number touches."""
        self.predicted = [0.0] * len(self.found)
        every = range(len(self.found))
        self.predicted = self.price(self.numbers, every)
        for name in sorted(set(self.numbers) - FIXED):
            moved = self.price({**self.numbers, name: self.numbers[name] / (1 + step)}, every)
            self.touched[name] = [i for i in every if abs(moved[i] / self.predicted[i] - 1) > TOUCH]

    def loss(self, numbers: Mapping[str, float], predicted: Sequence[float]) -> float:
        """Mean over suites of the mean |error| with the best constants, and the prior."""
        share = weights(self.found)
        scales = fitted_scales(self.found, predicted, share)
        errors = (
            w * abs(scales[case.key] * seconds / case.measured_s - 1.0)
            for case, seconds, w in zip(self.found, predicted, share, strict=True)
        )
        away = sum(math.log2(max(numbers[name], 1e-12) / value) ** 2 for name, value in self.start.items() if value > 0)
        scaled = sum(math.log2(scale) ** 2 for scale in scales.values()) / len(scales)
        return sum(errors) / sum(share) + PRIOR_WEIGHT * away + SCALE_WEIGHT * scaled


def search(
    found: Sequence[Case], numbers: dict[str, float], start: Mapping[str, float], steps: Sequence[float]
) -> dict[str, float]:
    """Coordinate descent over the free numbers of the law."""
    fit = Fit(list(found), start, numbers)
    fit.refresh(steps[0])
    best = fit.loss(numbers, fit.predicted)
    for step in steps:
        for _ in range(ROUNDS):
            before = best
            for name, rows in fit.touched.items():
                for factor in (1 + step, 1 / (1 + step)):
                    value = fit.numbers[name] * factor
                    trial = {**fit.numbers, name: min(value, CAPS.get(name, 1.0)) if name in SHARES else value}
                    priced = fit.price(trial, rows)
                    score = fit.loss(trial, priced)
                    if score < best - 1e-6:
                        best, fit.numbers, fit.predicted = score, trial, priced
                        break
            if best > before - ENOUGH:
                break
    return fit.numbers


def leave_one_suite_out(found: Sequence[Case], predicted: Sequence[float]) -> dict[str, dict[str, object]]:
    """Per suite of 10 or more rows: the constants that the other suites alone give its (framework, device) pairs, and
    its error with them.
    """
    report: dict[str, dict[str, object]] = {}
    for suite in sorted({case.suite for case in found}):
        mine = [i for i, case in enumerate(found) if case.suite == suite]
        if len(mine) < SMALL_SUITE:
            continue
        others = [i for i in range(len(found)) if found[i].suite != suite]
        rest = [found[i] for i in others]
        known = Calibration(
            law=TrainingLaw(), scales=fitted_scales(rest, [predicted[i] for i in others], weights(rest))
        )
        scales = {found[i].key: known.scale(found[i].framework_name, found[i].chip) for i in mine}
        off = [abs(scales[found[i].key][0] * predicted[i] / found[i].measured_s - 1.0) for i in mine]
        report[suite] = {
            "constants": {key: round(value, 4) for key, (value, _) in scales.items()},
            "from": {key: "its own" if origin == "measured" else "stand-in" for key, (_, origin) in scales.items()},
            "mean_abs_err": round(sum(off) / len(off), 4),
        }
    return report


def fitted(
    found: Sequence[Case], start: Mapping[str, float], numbers: dict[str, float], most: int
) -> dict[str, dict[str, float]]:
    """Law and constants of a set of rows."""
    numbers = search(thinned(found, most), numbers, start, STEPS)
    law = law_from(numbers)
    scales = fitted_scales(found, [case.predict(law).total_s for case in found], weights(found))
    return {
        "law": {name: float(f"{value:.5g}") for name, value in sorted(numbers.items())},
        "scales": {key: round(value, 4) for key, value in sorted(scales.items())},
    }


def main() -> None:
    """Fit, cross-validate, freeze."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--no-folds", action="store_true", help="skip cross-validation")
    options = parser.parse_args()
    found, _ = cases(options.data)
    start = flat_law(TrainingLaw())
    whole = fitted(found, start, dict(start), ROWS_PER_SUITE)
    predicted = [case.predict(law_from(whole["law"])).total_s for case in found]
    folds = []
    for fold in range(0 if options.no_folds else FOLDS):
        kept = [case for case in found if fold_of(case) != fold]
        folds.append(fitted(kept, start, dict(start), FOLD_ROWS))
    table = {
        "format": "rollart.perf.training_calibration/1",
        "provenance": "fitted by benchmarks/fit_training.py on published rows: one law, one constant per (framework, chip)",
        "data": data_digest(found),
        **whole,
        "source": {key: f"{sum(case.key == key for case in found)} published rows" for key in whole["scales"]},
        "leave_one_suite_out": leave_one_suite_out(found, predicted),
        "folds": folds,
    }
    options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
