"""How well a replay calibrated on one real run predicts other real runs of this machine.

    python benchmarks/fidelity.py --json FILE [--repeats 5]

One run is recorded and calibrated on, its step time included. Five other configurations, fixed in `fidelity_runs.py`, are
predicted by the simulator; the predictions are written and their SHA-256 is printed before the first of the measured runs
starts. Then each configuration is run `--repeats` times, interleaved. A run's figure is its mean step time, as long and short
steps alternate where two batches are under way. Error: of the predicted figure against the measured median over the repeats;
allowed: 10 %, or half the 95 % interval of the measured median where that is more; aim: 5 %. Phase shares and staleness stand
side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fidelity_runs import CALIBRATION, PREDICTED, Case, record, settings_of
from peers_figures import versions
from peers_run import PeerFailed
from rollart.config.schema import RunConfig
from rollart.observe.log import read_events
from rollart.observe.outlook import Outlook, outlook
from rollart.perf.measured import Calibrated
from rollart.sim.launch import Prepared, calibrated, predict
from rollart.sim.replay import build_replay, trimmed

AIM, ALLOWED = 0.05, 0.10
SEEDS = 3
"""Simulations of a configuration, the median of which is the prediction."""
RESAMPLES = 2000


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def figures(found: Outlook) -> dict[str, Any]:
    """What is laid side by side."""
    return {
        "step_s": found.step_s.mean, "trajectories_per_s": found.trajectories_per_s,
        "staleness_mean": found.staleness_mean, "staleness_max": found.staleness_max,
        "trajectory": dict(found.trajectory), "trainer": dict(found.trainer),
        "utilisation": {name: pool.utilisation for name, pool in found.pools.items()},
    }  # fmt: skip


def middle(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians, field by field; a field that one has not is left out."""
    made: dict[str, Any] = {}
    for name, one in many[0].items():
        values = [other[name] for other in many if other.get(name) is not None]
        if isinstance(one, Mapping):
            made[name] = middle(values)
        elif len(values) == len(many):
            made[name] = round(statistics.median(values), 5)
    return made


def predicted(case: Case, laws: Calibrated) -> dict[str, Any]:
    """The prediction of one configuration, from its settings and the laws alone."""
    many = []
    for seed in range(SEEDS):
        config = trimmed(RunConfig.model_validate(settings_of(case, seed=seed)))
        made = build_replay(config, laws, latency_s=case.latency())
        many.append(figures(predict(Prepared(config=config, world=made.world, basis=made.basis))))
    return middle(many)


def measured(run_dir: Path) -> dict[str, Any]:
    _, events = read_events(run_dir / "events.jsonl")
    found = outlook(events)
    if found is None:
        raise PeerFailed(f"{run_dir} has finished no step")
    return {**figures(found), "others": strangers(run_dir)}


def strangers(run_dir: Path) -> float:
    """Cores that others kept busy while it ran: above some hundredths the machine was not the run's alone."""
    _, events = read_events(run_dir / "events.jsonl")
    used = [event for event in events if event["kind"] == "usage"]
    seconds = used[-1]["t"] - used[0]["t"]
    return float((used[-1]["data"]["cpu_s"]["others"] - used[0]["data"]["cpu_s"]["others"]) / max(seconds, 1e-9))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the median, by drawing again."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def judged(case: Case, forecast: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One configuration: what was predicted beside what was measured."""
    step_s = [run["step_s"] for run in runs]
    median = statistics.median(step_s)
    low, high = interval(step_s)
    error = abs(forecast["step_s"] / median - 1.0)
    allowed = max(ALLOWED, (high - low) / 2 / median)
    return {
        "case": case.name, "predicted_s": forecast["step_s"], "measured_s": round(median, 5),
        "interval_s": [round(low, 5), round(high, 5)], "error": round(error, 4), "allowed": round(allowed, 4),
        "ok": error <= allowed, "aim": error <= AIM, "runs_s": [round(one, 5) for one in step_s],
        "predicted": dict(forecast), "measured": middle(runs),
    }  # fmt: skip


def side_by_side(one: Mapping[str, Any]) -> list[str]:
    """Shares and staleness of one configuration, predicted | measured."""
    lines = []
    for part in ("trajectory", "trainer"):
        told, found = one["predicted"][part], one["measured"][part]
        lines.append(f"    {part}: " + ", ".join(f"{name} {told[name]:.2f} | {found[name]:.2f}" for name in told))
    told, found = one["predicted"], one["measured"]
    return [*lines, f"    staleness: {told.get('staleness_mean')} | {found.get('staleness_mean')}"]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each case (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder of the runs (default: one that is removed)")
    parser.add_argument(
        "--cases", nargs="*", default=[case.name for case in PREDICTED], choices=[case.name for case in PREDICTED],
        metavar="CASE",
    )  # fmt: skip
    return parser.parse_args(words)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All of it, in the order that the module says."""
    cases = [case for case in PREDICTED if case.name in options.cases]
    laws = calibrated(record(CALIBRATION, scratch, seed=0))
    laws.save(scratch / "calibration.json")
    say(
        f"calibrated on {CALIBRATION.name}: a step of {laws.step_s:.3f} s; {laws.together:.3f} of a core's speed while all are "
        f"busy; strangers took {laws.origin.others:.2f} cores"
    )
    forecasts = {case.name: predicted(case, laws) for case in (CALIBRATION, *cases)}
    text = json.dumps(forecasts, indent=1, sort_keys=True) + "\n"
    (scratch / "predictions.json").write_text(text, encoding="utf-8")
    seal = hashlib.sha256(text.encode()).hexdigest()
    for case in (CALIBRATION, *cases):
        say(f"predicted {case.name}: a step of {forecasts[case.name]['step_s']:.3f} s")
    say(f"sha256 of the predictions, before the first measured run: {seal}")
    runs: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for repeat in range(options.repeats):
        for case in cases if repeat % 2 else cases[::-1]:
            runs[case.name].append(measured(record(case, scratch, seed=repeat)))
            last = runs[case.name][-1]
            say(f"repeat {repeat} {case.name}: {last['step_s']:.3f} s (strangers {last['others']:.2f} cores)")
    rows = [judged(case, forecasts[case.name], runs[case.name]) for case in cases]
    for row in rows:
        say(
            f"{row['case']:12} predicted {row['predicted_s']:.3f} s, measured {row['measured_s']:.3f} s "
            f"{row['interval_s']}: error {row['error']:.1%} of {row['allowed']:.1%} {'ok' if row['ok'] else 'MISSED'}"
        )
        for line in side_by_side(row):
            say(line)
    return {
        "name": "fidelity", "cases": rows, "met": all(row["ok"] for row in rows), "sha256": seal,
        "calibration": {
            "measured_s": laws.step_s, "predicted_s": forecasts[CALIBRATION.name]["step_s"],
            "together": laws.together, "others": laws.origin.others, "cpu": laws.origin.cpu, "cores": laws.origin.cores,
        },
        "provenance": {"command": ["python", "benchmarks/fidelity.py", *sys.argv[1:]], "versions": versions()},
    }  # fmt: skip


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="rollart-fidelity-") as folder:
        scratch = Path(folder) if options.keep is None else options.keep
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            report = run(options, scratch)
        except PeerFailed as error:
            say(f"FAILED {error}")
            return 1
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
