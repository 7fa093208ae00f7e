"""Scores the inference model on measured rows: predicted against `inference.csv`, without fitting anything.

    python benchmarks/validate_inference.py --data DIR --json FILE [--rows FILE]

Against what: the published measurements in DIR (format of ground truth: one row per figure of a run). How: every row becomes
a workload on an engine by the rules of `inference_rows.py`; |predicted - measured| / measured, medians. `median_abs_err` is
of throughput. A row that the packaged constants were fitted on is predicted with constants that were fitted without its fold
of configurations (`cross_validated` says how many were); `as_fitted` has all rows with the packaged constants,
`leave_one_suite_out` with constants fitted without the row's suite, `uncalibrated` without the constants per (engine, device).
TTFT is not scored where the rate or the scheduler's settings are missing. Errors are fractions.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from inference_rows import Case, Unscored, read_cases
from rollart.perf.calibrated import Calibration, read_calibration

CLASSES = {
    "throughput": "throughput", "tpot": "tpot_itl", "itl": "tpot_itl", "ttft": "ttft", "e2e": "e2e", "tail": "tpot_tail"
}  # fmt: skip


class Scored(NamedTuple):
    case: Case
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.case.target - 1.0

    @property
    def kind(self) -> str:
        return CLASSES[self.case.metric]


def summary(rows: Iterable[Scored]) -> dict[str, float | int]:
    found = list(rows)
    if not found:
        return {"rows": 0}
    return {
        "rows": len(found),
        "median_abs_err": round(statistics.median(abs(row.error) for row in found), 4),
        "mean_abs_err": round(statistics.fmean(abs(row.error) for row in found), 4),
        "median_ratio": round(statistics.median(1.0 + row.error for row in found), 4),
    }


def tables(rows: list[Scored]) -> dict[str, Any]:
    """Medians of throughput, by class, and of throughput by suite."""
    classes, suites = defaultdict(list), defaultdict(list)
    for row in rows:
        classes[row.kind].append(row)
        if row.kind == "throughput":
            suites[row.case.suite].append(row)
    throughput = summary(classes["throughput"])
    return {
        "median_abs_err": throughput.get("median_abs_err", math.nan), "throughput_rows": throughput["rows"],
        "by_class": {kind: summary(found) for kind, found in sorted(classes.items())},
        "by_suite": {suite: summary(found) for suite, found in sorted(suites.items())},
    }  # fmt: skip


def score(cases: Iterable[Case], calibration: Callable[[Case], Calibration], unscored: Counter[str], *,
          calibrated: bool = True) -> list[Scored]:  # fmt: skip
    rows = []
    for case in cases:
        try:
            rows.append(Scored(case, case.predict(calibration(case), calibrated=calibrated)))
        except Unscored as reason:
            unscored[str(reason)] += 1
    return rows


def report(folder: Path, document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Scored]]:
    whole = read_calibration(document)
    folds = {key: read_calibration(value) for key, value in document["without_fold"].items()}
    suites = {key: read_calibration(value) for key, value in document["without_suite"].items()}
    fitted: Mapping[str, int] = document["fitted"]
    unscored: Counter[str] = Counter()
    cases: list[Case] = []
    for _, case in read_cases(folder):
        if isinstance(case, Case):
            cases.append(case)
        else:
            unscored[str(case)] += 1

    def held_out(case: Case) -> Calibration:
        return folds[str(fitted[case.digest])] if case.digest in fitted else whole

    rows = score(cases, held_out, unscored)
    found = tables(rows)
    repeats: Counter[str] = Counter()
    return {
        **found, "cross_validated": sum(case.digest in fitted for case in cases),
        "not_seen_in_fitting": sum(case.digest not in fitted for case in cases),
        "as_fitted": tables(score(cases, lambda _: whole, repeats)),
        "leave_one_suite_out": tables(score(cases, lambda case: suites.get(case.suite, whole), repeats)),
        "uncalibrated": tables(score(cases, held_out, repeats, calibrated=False)),
        "scored": len(rows), "unscored": sum(unscored.values()), "unscored_reasons": dict(unscored.most_common()),
        "constants": len(whole.constants),
        "pairs_without_a_constant": sorted({case.pair for case in cases} - set(whole.constants)),
    }, rows  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", type=Path, help="write every scored row with its prediction as CSV")
    options = parser.parse_args()
    text = files("rollart.perf").joinpath("tables/inference_calibration.json").read_text(encoding="utf-8")
    found, rows = report(options.data, json.loads(text))
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.rows:
        with options.rows.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row_id", "suite", "class", "model", "pair", "measured", "predicted", "error"])
            for row in rows:
                c = row.case
                writer.writerow([c.row_id, c.suite, row.kind, c.shape.name, c.pair, c.target, row.predicted, row.error])
    for kind, figures in found["by_class"].items():
        print(kind, figures)  # noqa: T201
    for suite, figures in found["by_suite"].items():
        print(suite, figures)  # noqa: T201


if __name__ == "__main__":
    main()
