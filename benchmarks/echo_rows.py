"""Traced predictions of published training steps: what the tracer, and not only the law that it shares, is worth.

What: the step time of rows of `training.csv` on several nodes, every suite of ten or more such rows, `PER_SUITE` of each evenly
over its steps by time. Against what: the measured step, and the closed form on the same rows. How: the real model of the row's
shape captured, derived, priced and composed under the plan that the row states (of those that it leaves open the fastest, by
the closed form); law and constant are of the fold that did not see the row, where the rows are those of the package's fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError
from rollart.optrace.job import Job
from rollart.optrace.predict import Setting, predicted
from rollart.optrace.sources import Source, family_config
from rollart.perf.train_calibration import Calibration, calibration
from rollart.perf.train_plan import TrainingPlan
from rollart.perf.training import step_time
from training_rows import Case, cases, data_digest, fold_of

SMALL_SUITE = 10
PER_SUITE = 3
NODE = 8


def chosen(found: Sequence[Case]) -> list[Case]:
    """`PER_SUITE` rows of each suite that has enough rows on several nodes."""
    suites: dict[str, list[Case]] = {}
    for case in found:
        if case.plans[0].devices > NODE:
            suites.setdefault(case.suite, []).append(case)
    picked = []
    for rows in suites.values():
        if len(rows) >= SMALL_SUITE:
            ordered = sorted(rows, key=lambda case: (case.measured_s, case.row))
            picked += [ordered[(2 * at + 1) * len(ordered) // (2 * PER_SUITE)] for at in range(PER_SUITE)]
    return picked


def setting_of_row(case: Case, plan: TrainingPlan, known: Calibration) -> Setting:
    """The row as a job; blocks that no family here has are written down from the numbers of the shape."""
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    with suppress(ConfigError):
        config, notes = family_config(case.model)
    scale, basis = known.scale(case.framework_name, case.chip)
    return Setting(
        job=Job(model=case.model.name, plan=plan, framework=case.framework_name, capture=config is not None),
        source=Source(name=case.model.name, kind="causal_lm", shape=case.model, config=config, notes=notes),
        device=case.device, fabric=case.fabric, framework=case.framework, scale=scale, scale_basis=basis, law=known.law,
    )  # fmt: skip


def plan_of(case: Case, known: Calibration) -> TrainingPlan:
    """The fastest plan that the row leaves open, by the closed form."""

    def seconds(plan: TrainingPlan) -> float:
        return step_time(case.model, plan, case.device, case.fabric, case.framework, known.law).total_s

    return min(case.plans, key=seconds)


def traced_rows(folder: Path) -> dict[str, Any]:
    """Errors of the traced prediction and of the closed form, and rows that the tracer refuses, with its reason."""
    found, _ = cases(folder)
    frozen, table = calibration()
    seen = table.get("data") == data_digest(found)
    folds = [frozen.of(fold) for fold in table.get("folds", ())] if seen else []
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for case in chosen(found):
        known = folds[fold_of(case)] if folds else frozen
        plan = plan_of(case, known)
        try:
            of = setting_of_row(case, plan, known)
            traced = predicted(of).prediction
        except ConfigError as problem:
            refused[case.row] = str(problem)
            continue
        closed = step_time(case.model, plan, case.device, case.fabric, case.framework, known.law, of.scale)
        rows.append({
            "row": case.row, "suite": case.suite, "devices": plan.devices, "measured_s": case.measured_s,
            "traced": traced.step_s / case.measured_s - 1, "closed": closed.total_s / case.measured_s - 1,
            "captured": of.job.capture, "within": traced.low_s <= case.measured_s <= traced.high_s,
        })  # fmt: skip
    count = max(1, len(rows))
    return {
        "traced": sum(abs(one["traced"]) for one in rows) / count,
        "closed form": sum(abs(one["closed"]) for one in rows) / count,
        "traced, signed": sum(one["traced"] for one in rows) / count,
        "measured within the 95 % interval": sum(one["within"] for one in rows) / count,
        "rows": rows, "refused": refused, "cross_validated": bool(folds),
    }  # fmt: skip
