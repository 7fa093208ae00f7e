"""Times of collective operations against measurements.

    python benchmarks/validate_collectives.py --data ../shared/ground_truth --json FILE

`collectives.csv` of the directory. Error of a row = |predicted / measured - 1|; figures are means over rows. `by_split`:
message sizes held back (`mean_abs_err`), rank counts held back, a whole (device, interconnect) from constants; `law`: the
two-parameter latency-bandwidth law on the same rows. Rows that the frozen table was fitted on are cross-validated, constants
and curves refitted without the fold; every other row is scored by the frozen table, which is never refitted, under the split
that says how much the table knows of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

from collective_folds import (
    SPLITS,
    Laws,
    Predict,
    by_law,
    by_model,
    everything,
    held_back,
    operation_of,
    pair,
    sizes_of_these,
)
from micro_rows import CollectiveRow, collective_rows, split_seen
from rollart.perf.collective_fit import LatencyBandwidth
from rollart.perf.collective_table import CollectiveModel, packaged, place_of

TARGETS = {"sizes": 0.08, "ranks": 0.15, "device": 0.30}
READING = (
    "Rows that the frozen table was fitted on (known by digest) are cross-validated: constants and curves are refitted without "
    "the fold (sizes: every fifth octave of all curves at once; ranks: one rank count of a device, of all operations and "
    "sources; device: one (chip, interconnect), constants alone). Other rows are scored by the frozen table without any refit "
    "and fall under sizes where their curve is in it, ranks where only other curves of their chip and interconnect are, device "
    "(constants alone) where none is. by_split pools both. sizes_within_unseen, which counts nowhere: how well curves made of "
    "the other octaves of the unseen rows themselves give an octave. The covariance by which curves are carried is a constant "
    "of the code, chosen once on the held-back ranks and curves of the public rows."
)
ALL_UNSEEN = "every unseen row by the frozen table: no curve of these rows is in it"

Errors = dict[str, list[float]]


def main() -> None:
    """Score a directory and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, unscored = collective_rows(arguments.data)
    if not rows:
        raise SystemExit(f"{arguments.data}: no row of collectives.csv can be scored: {dict(unscored)}")
    report = figures(*split_seen(rows, frozen_table()["fitted_rows"]))
    report["unscored"] = dict(unscored)
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)  # noqa: T201


def figures(seen: Sequence[CollectiveRow], unseen: Sequence[CollectiveRow]) -> dict[str, Any]:
    """All figures of the rows, seen ones cross-validated, unseen ones by the frozen table."""
    model = packaged()
    known = {split: [row for row in unseen if known_split(model, row) == split] for split in SPLITS}
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        crossed = _filled(held_back(seen, split))
        frozen = frozen_errors(model, known[split], split)
        pooled = {name: crossed.get(name, []) + frozen[name] for name in frozen}
        splits[split] = {
            **(_summary(pooled) or {}),
            "target": TARGETS[split],
            "cross_validated": _summary(crossed),
            "frozen": _summary(frozen),
            "by_pair": _by(seen, crossed, pair),
        }
    whole = frozen_errors(model, unseen, "sizes")["model"]
    sizes = splits["sizes"].get("model")
    return {
        "mean_abs_err": sizes if sizes is not None else fmean(whole),
        "mean_abs_err_of": "sizes held back" if sizes is not None else ALL_UNSEEN,
        "by_split": {split: found.get("model") for split, found in splits.items()},
        "law": {split: found.get("law") for split, found in splits.items()},
        "reading": READING,
        "rows": {"scored": len(seen) + len(unseen), "seen": len(seen), "unseen": len(unseen)},
        "splits": splits,
        "curves_held_back": _summary(_filled(held_back(seen, "curves"))),
        "frozen_all_unseen": fmean(whole) if whole else None,
        "sizes_within_unseen": fmean(sizes_of_these(model, unseen)) if unseen else None,
        "frozen_by_device_and_operation": _by(unseen, {"model": whole}, operation_of) if unseen else {},
    }


def known_split(model: CollectiveModel, row: CollectiveRow) -> str:
    """What the frozen table knows of a row: its curve (sizes), its chip and interconnect (ranks), neither (device)."""
    place = place_of(row.request, row.device, row.library)
    if model.knows(place):
        return "sizes"
    return "ranks" if model.basis_without_curve(place) == "carried" else "device"


def frozen_errors(model: CollectiveModel, rows: Sequence[CollectiveRow], split: str) -> Errors:
    """Errors of rows that were not fitted on, by what is frozen; `device` by constants, and by the law of everything."""
    alone = CollectiveModel(constants=model.constants)
    predictors: dict[str, Predict] = {
        "model": partial(by_model, alone if split == "device" else model),
        "carried": partial(by_model, model),
        "law": partial(by_law, frozen_laws(), everything if split == "device" else operation_of),
    }
    return {name: [abs(predict(row) / row.seconds - 1) for row in rows] for name, predict in predictors.items()}


@cache
def frozen_laws() -> Laws:
    """The two-parameter laws frozen beside the curves."""
    return {
        group: LatencyBandwidth(latency_s=law["latency_us"] * 1e-6, stretch=law["stretch"])
        for group, law in frozen_table()["two_parameter_law"].items()
    }


@cache
def frozen_table() -> dict[str, Any]:
    """The package's table as it is."""
    table: dict[str, Any] = json.loads(
        (files("rollart.perf") / "tables" / "collectives.json").read_text(encoding="utf-8")
    )
    return table


def _filled(errors: dict[str, list[float | None]]) -> Errors:
    return {name: [error for error in column if error is not None] for name, column in errors.items()}


def _summary(errors: Errors) -> dict[str, float] | None:
    """Means of the predictors, and the model's median and rows; None of no rows."""
    if not errors.get("model"):
        return None
    means = {name: fmean(column) for name, column in errors.items() if column}
    return {**means, "median": median(errors["model"]), "rows": len(errors["model"])}


def _by(rows: Sequence[CollectiveRow], errors: Errors, group: Callable[[CollectiveRow], Any]) -> dict[str, float]:
    """Mean error of the model by group; nothing where rows were left without a prediction."""
    column = errors.get("model", [])
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, column, strict=len(column) == len(rows)):
        groups.setdefault(str(group(row)), []).append(error)
    return {name: fmean(found) for name, found in sorted(groups.items())}


if __name__ == "__main__":
    main()
