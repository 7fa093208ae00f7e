"""Fits the constants of the inference model on measured rows and freezes them in the package.

    python benchmarks/fit_inference.py --data DIR [--out FILE] [--quick]

Fitted are the efficiencies that all devices and engines share and one constant per (engine, device), drawn to 1 by two rows'
worth of evidence; robust loss on log errors of throughput and time per token, suites weighted by the root of their rows.
The file also gets the same fit, from the same start, without each fifth of the configurations and without each suite: rows
that were fitted on are scored with a fit that has not seen their configuration. It holds no row, only digests that say which
rows were fitted on and which fold each was in. About ten minutes on one core; `--quick`, the fit on all rows alone, one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rollart
from inference_rows import Case, Unscored, read_cases
from rollart.perf.rooflines import Efficiency

FOLDS = 5
SOFT = 0.1
"""Log errors well above this count by their size, below by their square."""
SHRINK_ROWS = 2.0
PRIOR_WEIGHT = 0.002
"""What it costs to move an efficiency by a factor of e from its usual value: it moves only where rows ask for it."""
TIME_WEIGHT = 0.4
"""A time per token counts less than a throughput: it is not the figure that is aimed at and repeats the same run."""
FIRST_STEP, LAST_STEP = 0.35, 0.02
SMALL_GAIN = 0.01
"""A sweep that gains less than this share of the loss halves the step."""
SWEEPS, SUITE_SWEEPS = 40, 15
"""Folds, whose figure is the one reported, get the same search as the whole; fits without a suite a shorter one."""
BOUNDS = {
    "matmul_bf16": (0.3, 0.9), "matmul_fp8": (0.25, 0.85), "matmul_fp4": (0.15, 0.8), "memory": (0.5, 0.95),
    "kv": (0.4, 0.95), "attention": (0.1, 0.8), "wave_half": (0.02, 2.0), "inner_half": (30.0, 3000.0),
    "kernel_s": (3e-7, 1e-5), "passes": (2.0, 60.0),
    "expert_matmul": (0.1, 1.0), "expert_passes": (1.0, 40.0), "expert_pad": (8.0, 128.0), "expert_imbalance": (1.0, 2.0),
    "rank_imbalance": (1.0, 1.8), "link": (0.2, 0.95), "collective_s": (2e-6, 6e-5), "host_step_s": (1e-4, 5e-2),
    "host_sequence_s": (1e-6, 5e-4),
}  # fmt: skip
"""Physical limits: nothing above the spec sheet, nothing free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    efficiency: Efficiency
    constants: Mapping[str, float]
    loss: float

    def as_json(self) -> dict[str, Any]:
        return {
            "efficiency": {key: float(f"{value:.4g}") for key, value in asdict(self.efficiency).items()},
            "constants": {key: float(f"{value:.4g}") for key, value in sorted(self.constants.items())},
        }


def errors(cases: Sequence[Case], efficiency: Efficiency, constants: Mapping[str, float]) -> list[float]:
    """Log of predicted over measured; NaN where the model does not fit."""
    served: dict[object, Any] = {}
    found = []
    for case in cases:
        if case.run not in served:
            try:
                served[case.run] = case.serve(efficiency, constants.get(case.pair, 1.0))
            except Unscored:
                served[case.run] = None
        answer = served[case.run]
        found.append(math.nan if answer is None else math.log(case.read(answer) / case.target))
    return found


def weights(cases: Sequence[Case]) -> list[float]:
    rows: dict[str, int] = defaultdict(int)
    for case in cases:
        rows[case.suite] += 1
    return [(1.0 if c.metric == "throughput" else TIME_WEIGHT) / math.sqrt(rows[c.suite]) for c in cases]


def robust(error: float) -> float:
    return SOFT * (math.sqrt(1.0 + (error / SOFT) ** 2) - 1.0)


def prior(efficiency: Efficiency) -> float:
    start = asdict(Efficiency())
    return PRIOR_WEIGHT * sum(math.log(value / start[key]) ** 2 for key, value in asdict(efficiency).items())


def update_constants(cases: Sequence[Case], found: Sequence[float], constants: Mapping[str, float]) -> dict[str, float]:
    """One step of every pair's constant to the median of its errors, drawn to 1."""
    by_pair: dict[str, list[float]] = defaultdict(list)
    for case, error in zip(cases, found, strict=True):
        if not math.isnan(error):
            by_pair[case.pair].append(error if case.metric == "throughput" else -error)
    updated = dict(constants)
    for pair, values in by_pair.items():
        ordered = sorted(values)
        middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2.0
        keep = len(ordered) / (len(ordered) + SHRINK_ROWS)
        wanted = keep * (math.log(constants.get(pair, 1.0)) + middle)
        updated[pair] = math.exp(wanted)
    return updated


def loss_of(
    cases: Sequence[Case], weight: Sequence[float], efficiency: Efficiency, constants: Mapping[str, float]
) -> float:
    found = errors(cases, efficiency, constants)
    scored = [(w, e) for w, e in zip(weight, found, strict=True) if not math.isnan(e)]
    return sum(w * robust(e) for w, e in scored) / sum(w for w, _ in scored) + prior(efficiency)


def fit(cases: Sequence[Case], start: Fit | None, sweeps: int, step: float) -> Fit:
    """Pattern search in the logarithm of the efficiencies: every one up or down, then on along the way that the sweep went;
    the constants follow before each sweep."""
    weight = weights(cases)
    efficiency = start.efficiency if start else Efficiency()
    pairs = {case.pair for case in cases}
    constants = {key: value for key, value in (start.constants.items() if start else ()) if key in pairs}
    for _ in range(sweeps):
        for _ in range(2):
            constants = update_constants(cases, errors(cases, efficiency, constants), constants)
        begun = best = loss_of(cases, weight, efficiency, constants)
        before = efficiency
        for name in BOUNDS:
            for factor in (math.exp(step), math.exp(-step)):
                candidate = moved(efficiency, {name: factor})
                loss = loss_of(cases, weight, candidate, constants)
                if loss < best:
                    best, efficiency = loss, candidate
                    break
        way = {name: getattr(efficiency, name) / getattr(before, name) for name in BOUNDS}
        while (loss := loss_of(cases, weight, candidate := moved(efficiency, way), constants)) < best:
            best, efficiency = loss, candidate
        if begun - best < SMALL_GAIN * begun:
            step *= 0.5
        if step < LAST_STEP:
            break
    for _ in range(2):
        constants = update_constants(cases, errors(cases, efficiency, constants), constants)
    return Fit(efficiency=efficiency, constants=constants, loss=loss_of(cases, weight, efficiency, constants))


def moved(efficiency: Efficiency, factors: Mapping[str, float]) -> Efficiency:
    """`efficiency` with some of its numbers multiplied, inside their bounds."""
    within = {
        name: min(max(getattr(efficiency, name) * factor, BOUNDS[name][0]), BOUNDS[name][1])
        for name, factor in factors.items()
    }
    return replace(efficiency, **within)


def fold_of(case: Case) -> int:
    return hashlib.blake2b(case.group.encode(), digest_size=4).digest()[0] % FOLDS


def fitted_cases(folder: Path) -> list[Case]:
    cases = [case for _, case in read_cases(folder) if isinstance(case, Case)]
    return [case for case in cases if case.metric in ("throughput", "tpot", "itl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    package = Path(rollart.__file__).parent / "perf" / "tables" / "inference_calibration.json"
    parser.add_argument("--out", type=Path, default=package)
    parser.add_argument("--quick", action="store_true", help="the fit on all rows only")
    options = parser.parse_args()
    cases = fitted_cases(options.data)
    whole = fit(cases, None, SWEEPS, FIRST_STEP)
    print(json.dumps(whole.as_json(), indent=1), f"loss {whole.loss:.4f}", flush=True)  # noqa: T201
    folds, suites = {}, {}
    if not options.quick:
        for fold in range(FOLDS):
            rest = [case for case in cases if fold_of(case) != fold]
            folds[str(fold)] = fit(rest, None, SWEEPS, FIRST_STEP).as_json()
        for suite in sorted({case.suite for case in cases}):
            rest = [case for case in cases if case.suite != suite]
            suites[suite] = fit(rest, None, SUITE_SWEEPS, FIRST_STEP).as_json()
    every = [case for _, case in read_cases(options.data) if isinstance(case, Case)]
    document = {
        "about": "Fitted by benchmarks/fit_inference.py; `fitted` maps digests of rows to the fold that each was in.",
        "provenance": "fitted on published measurements of whole workloads", "engine_version": "as in the rows fitted on",
        **whole.as_json(), "without_fold": folds, "without_suite": suites,
        "fitted": {case.digest: fold_of(case) for case in every},
    }  # fmt: skip
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
