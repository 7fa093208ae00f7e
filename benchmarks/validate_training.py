"""Scores the frozen training model on a folder of published rows: `--data DIR --json FILE`.

What: the step time of every scorable row in `training.csv` and `training_single_node.csv`. Against what: the measured
step time. How: the constants are those of the package and are never refitted here; on the very rows that they were
fitted on, each row is predicted with the law and constants of the fold that did not see it, and `cross_validated`
says so. `mean_abs_err` is the mean over suites of 10 or more rows of each suite's mean |predicted / measured - 1|;
`uncalibrated` is the same with every (framework, device) constant at 1. The rule for fields that a row does not state
is in `training_rows.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.perf.train_calibration import Calibration, calibration
from training_rows import Case, cases, data_digest, fold_of

SMALL_SUITE = 10
"""Suites below this many rows are reported but not in the target figure."""


def errors(found: Sequence[Case], known: Callable[[Case], Calibration], *, calibrated: bool = True) -> list[float]:
    """Signed relative error of each row."""
    signed = []
    for case in found:
        used = known(case)
        scale = used.scale(case.framework_name, case.chip)[0] if calibrated else 1.0
        signed.append(scale * case.predict(used.law).total_s / case.measured_s - 1.0)
    return signed


def by_suite(found: Sequence[Case], signed: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Per suite: rows, mean |error|, mean signed error, and whether it is in the target figure."""
    rows: dict[str, list[float]] = {}
    for case, error in zip(found, signed, strict=True):
        rows.setdefault(case.suite, []).append(error)
    return {
        suite: {
            "rows": len(values),
            "mean_abs_err": sum(map(abs, values)) / len(values),
            "mean_err": sum(values) / len(values),
            "counted": len(values) >= SMALL_SUITE,
        }
        for suite, values in sorted(rows.items())
    }


def mean_over_suites(suites: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The target figure, None where no suite is large enough."""
    large = [suite["mean_abs_err"] for suite in suites.values() if suite["counted"]]
    return sum(large) / len(large) if large else None


def validate(folder: Path) -> dict[str, Any]:
    """The whole report for a folder."""
    found, unscored = cases(folder)
    frozen, table = calibration()
    seen = table.get("data") == data_digest(found)
    folds = [frozen.of(fold) for fold in table.get("folds", ())] if seen else []
    known: Callable[[Case], Calibration] = (lambda case: folds[fold_of(case)]) if folds else (lambda case: frozen)
    suites = by_suite(found, errors(found, known))
    report: dict[str, Any] = {
        "mean_abs_err": mean_over_suites(suites),
        "by_suite": suites,
        "uncalibrated": mean_over_suites(by_suite(found, errors(found, known, calibrated=False))),
        "cross_validated": bool(folds),
        "rows": len(found),
        "unscored": unscored,
        "constants": dict(frozen.scales),
        "leave_one_suite_out": table.get("leave_one_suite_out", {}),
    }
    if folds:
        report["in_sample"] = mean_over_suites(by_suite(found, errors(found, lambda case: frozen)))
    return report


def main() -> None:
    """Score and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    report = validate(options.data)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for suite, row in report["by_suite"].items():
        mark = "*" if row["counted"] else " "
        print(f"{mark} {row['rows']:4d} {row['mean_abs_err']:.3f} {row['mean_err']:+.3f}  {suite}")  # noqa: T201
    how = "cross-validated" if report["cross_validated"] else "frozen constants"
    print(f"mean_abs_err {report['mean_abs_err']} ({how}), uncalibrated {report['uncalibrated']}")  # noqa: T201


if __name__ == "__main__":
    main()
