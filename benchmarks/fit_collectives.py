"""Fits the constants and curves of collective operations and freezes them in the package.

    python benchmarks/fit_collectives.py --data ../shared/ground_truth

Writes `src/rollart/perf/tables/collectives.json`: constants with where their search began, the two-parameter law (of each
operation of a device, for comparison), measured curves thinned to the knots that the lines between them need, and digests of
the rows, by which `validate_collectives.py` knows what was fitted on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from collective_folds import laws, operation_of, timed
from micro_rows import collective_rows
from rollart.perf.collective_fit import START, fit
from rollart.perf.collective_table import curve_entry

TABLE = Path(__file__).parents[1] / "src" / "rollart" / "perf" / "tables" / "collectives.json"


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    rows, unscored = collective_rows(arguments.data)
    model = fit([timed(row) for row in rows])
    table: dict[str, Any] = {
        "format": "rollart.perf.collectives/1",
        "fitted_by": "benchmarks/fit_collectives.py",
        "rows": len(rows),
        "left_out": dict(unscored),
        "constants": {
            name: {
                "value": float(f"{value:.4g}"),
                "provenance": "public table" if value == START[name][0] else "fitted on the curves below",
                "start": START[name][0],
                "source": START[name][1],
            }
            for name, value in model.constants.items()
        },
        "two_parameter_law": {
            str(group): {"latency_us": float(f"{law.latency_s * 1e6:.4g}"), "stretch": float(f"{law.stretch:.4g}")}
            for group, law in laws(rows, operation_of).items()
        },
    }
    curves = [curve_entry(curve) for curve in model.curves]
    lines = [
        json.dumps(table, indent=1)[:-2],
        ',\n "curves": [\n  ',
        ",\n  ".join(json.dumps(curve) for curve in curves),
        "\n ],\n",
    ]
    lines += [' "fitted_rows": ', json.dumps(sorted({row.digest for row in rows})), "\n}\n"]
    arguments.out.write_text("".join(lines), encoding="utf-8")
    knots = sum(len(curve.seconds) for curve in model.curves)
    print(f"{len(rows)} rows, {len(curves)} curves of {knots} knots: {arguments.out}")  # noqa: T201


if __name__ == "__main__":
    main()
