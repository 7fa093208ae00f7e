"""Fits the overlap model on measured kernels and freezes it in the package.

    python benchmarks/fit_overlap.py --data ../shared/ground_truth

Writes `src/rollart/perf/tables/overlap.json`: slowdowns per kernel name, the default level (the one with least error on rows
held back), and digests of the rows, by which `validate_overlap.py` knows what was fitted on.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from micro_rows import overlap_rows
from overlap_folds import LEVELS, held_back_errors
from rollart.perf.overlap import as_table
from rollart.perf.overlap_fit import fit

TABLE = Path(__file__).parents[1] / "src" / "rollart" / "perf" / "tables" / "overlap.json"
SOURCE = (
    "github.com/NetX-lab/Echo-slowdown merge/output/merged_features.csv @7d698a77 (MIT): GPT-2 fp32, 2 A100-class GPUs"
)


def main() -> None:
    """Fit, choose the level, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    rows, unscored = overlap_rows(arguments.data)
    measured = [row.measured for row in rows]
    errors = held_back_errors(measured)
    level = min(LEVELS, key=lambda level: errors[level])
    names = Counter(row.kernel.name for row in measured)
    table = {
        "format": "rollart.perf.overlap/1",
        "provenance": "measured",
        "source": SOURCE,
        "fitted_by": "benchmarks/fit_overlap.py",
        "rows": len(rows),
        "left_out": dict(unscored),
        "rows_by_name": dict(sorted(names.items())),
        "held_back_error_by_level": {str(level): round(error, 4) for level, error in errors.items()},
        **as_table(fit(measured, default_level=level)),
        "fitted_rows": sorted(row.digest for row in rows),
    }
    arguments.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows, default level {level}, held-back errors {errors}: {arguments.out}")  # noqa: T201


if __name__ == "__main__":
    main()
