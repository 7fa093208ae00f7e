"""The overlap slowdown model against measured kernels.

    python benchmarks/validate_overlap.py --data ../shared/ground_truth --json FILE

`overlap_slowdown.csv` of the directory: `ground_truth` is a kernel's time alone, `duration` its time beside a collective, which
is to be predicted. Error = sum |predicted - duration| / sum duration, as a fraction; kernels under 5 us alone are left out.
Rows that the frozen table was fitted on are scored cross-validated: 5 folds stratified by kernel name (refitted without the
fold), and leave-one-kernel-name-out. Every other row is scored by the frozen table, which is never refitted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from micro_rows import OverlapRow, overlap_rows, split_seen
from overlap_folds import (
    LEVELS,
    SEEDS,
    absolute_error,
    all_levels,
    at_level,
    by_name,
    held_back,
    stratified,
)
from rollart.perf.overlap import LEAST_SLOWDOWN, packaged
from rollart.perf.overlap_fit import Measured

TARGET = 0.08
AIM = 0.06
CONSTANT = len(LEVELS)
"""Column of the constant factor among the predictors."""
READING = (
    "rows that the frozen table was fitted on (known by digest): cross-validated, the model refitted without the fold; other "
    "rows: the frozen table, never refitted. mean_abs_err: both together, at the frozen default level. "
    "leave_one_kernel_name_out: seen rows refitted without their name, other rows only where the table lacks their name."
)


def main() -> None:
    """Score a directory and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = json.loads((files("rollart.perf") / "tables" / "overlap.json").read_text(encoding="utf-8"))
    rows, unscored = overlap_rows(arguments.data)
    if not rows:
        raise SystemExit(f"{arguments.data}: no row of overlap_slowdown.csv can be scored: {dict(unscored)}")
    report = figures(*split_seen(rows, table["fitted_rows"]))
    report["unscored"] = dict(unscored)
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)  # noqa: T201


def figures(seen_rows: Sequence[OverlapRow], unseen_rows: Sequence[OverlapRow]) -> dict[str, Any]:
    """All figures of the rows, seen ones cross-validated, unseen ones by the frozen table."""
    seen, unseen = [row.measured for row in seen_rows], [row.measured for row in unseen_rows]
    model = packaged()
    level = model.default_level
    draws = [held_back(seen, stratified(seen, seed), all_levels) for seed in range(SEEDS)] if seen else []
    frozen = [[at_level(model, level, row) for row in unseen] for level in LEVELS]
    constant = table_constant(seen)
    frozen.append([constant * row.kernel.solo_s for row in unseen])
    new = [place for place, row in enumerate(unseen) if row.kernel.name not in model.names]
    by_names = held_back(seen, by_name(seen), all_levels) if seen else [[] for _ in frozen]
    columns = [[*column, *(frozen[index][place] for place in new)] for index, column in enumerate(by_names)]
    left_out = _errors([*seen, *(unseen[place] for place in new)], columns)
    each = [draw[level] for draw in draws] or [[]]
    per_draw = [absolute_error([*seen, *unseen], [*seconds, *frozen[level]]) for seconds in each]
    return {
        "mean_abs_err": sum(per_draw) / len(per_draw),
        "target": TARGET,
        "aim": AIM,
        "over_draws": [min(per_draw), max(per_draw)],
        "default_level": level,
        "reading": READING,
        "rows": {"scored": len(seen) + len(unseen), "seen": len(seen), "unseen": len(unseen)},
        "held_back": _mean_errors(seen, draws),
        "leave_one_kernel_name_out": left_out,
        "beats_both": _beats(left_out, level),
        "frozen": {
            "all": _errors(unseen, frozen),
            "kernel name in the table": _errors(*_part(unseen, frozen, lambda row: row.kernel.name in model.names)),
            "kernel name not in the table": _errors(
                *_part(unseen, frozen, lambda row: row.kernel.name not in model.names)
            ),
        },
        "by_kernel_name": _by_kernel(seen, draws[0][level] if draws else [], unseen, frozen[level]),
        "slowdown_below_least": sum(
            row.seconds < row.kernel.solo_s * (1 + LEAST_SLOWDOWN * row.overlap_ratio) for row in [*seen, *unseen]
        ),
    }


def table_constant(seen: Sequence[Measured]) -> float:
    """The constant factor that unseen rows are compared under: of the seen rows, 1 without any."""
    return sum(row.seconds for row in seen) / sum(row.kernel.solo_s for row in seen) if seen else 1.0


def _errors(rows: Sequence[Measured], columns: Sequence[Sequence[float]]) -> dict[str, float] | None:
    if not rows:
        return None
    names = [*(f"level {level}" for level in LEVELS), "constant factor"]
    return {name: absolute_error(rows, column) for name, column in zip(names, columns, strict=True)}


def _mean_errors(rows: Sequence[Measured], draws: Sequence[Sequence[Sequence[float]]]) -> dict[str, float] | None:
    each = [errors for draw in draws if (errors := _errors(rows, draw)) is not None]
    return {name: sum(errors[name] for errors in each) / len(each) for name in each[0]} if each else None


def _beats(errors: dict[str, float] | None, level: int) -> bool | None:
    """Whether the level's error is below that of no slowdown model (level 0) and of the constant factor."""
    return errors[f"level {level}"] < min(errors["level 0"], errors["constant factor"]) if errors else None


def _part(
    rows: Sequence[Measured], columns: Sequence[Sequence[float]], keep: Any
) -> tuple[list[Measured], list[list[float]]]:
    places = [place for place, row in enumerate(rows) if keep(row)]
    return [rows[place] for place in places], [[column[place] for place in places] for column in columns]


def _by_kernel(
    seen: Sequence[Measured], seen_s: Sequence[float], unseen: Sequence[Measured], unseen_s: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Per kernel name: rows, its share of the whole absolute error, its own error, and its error without a model."""
    rows, guesses = [*seen, *unseen], [*seen_s, *unseen_s]
    whole = sum(row.seconds for row in rows)
    table: dict[str, dict[str, float]] = {}
    for name in sorted({row.kernel.name for row in rows}):
        places = [place for place, row in enumerate(rows) if row.kernel.name == name]
        some, some_s = [rows[place] for place in places], [guesses[place] for place in places]
        error = absolute_error(some, some_s)
        table[name] = {
            "rows": len(some),
            "error": error,
            "level 0": absolute_error(some, [row.kernel.solo_s for row in some]),
            "points_of_the_whole": error * sum(row.seconds for row in some) / whole,
        }
    return table


if __name__ == "__main__":
    main()
