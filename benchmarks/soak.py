"""Real runs on a local Ray that must survive: what dies is replaced and nothing is lost, and hours cost no more than minutes.

    python benchmarks/soak.py --kills 60 --minutes 40 --json FILE

Phase 1 kills processes of one run (SIGKILL: env hosts, engines, training ranks, the driver, each as often as the others, at
random moments under load), waits for its recovery from each, and looks through the surviving log: every problem trained
once or dropped with a reason, the token ledger closed, version numbers rising, no process left. Time to recover is from the
kill to the event that says so. Phase 2 runs among environments that raise, hang, are slow and start child processes, and
reads the driver's memory and open handles and the CPU time of all processes; slopes leave the first tenth out. Beside it a
fixed computation is timed: where that grows dearer too, it is the machine and not the program.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rollart
from soak_drift import Reading, drift, endure
from soak_kills import ROLES, Survived, survive, table
from soak_run import SoakFailed

TARGETS = {"mb_per_min": 0.5, "handles_per_min": 0.1, "cpu_ratio": 1.1}
"""What counts as "about 0" and "within 10 %". 0.5 MB a minute is 20 MB in 40 minutes, beside some 300 that a driver has."""
PACKAGES = ("ray", "torch", "transformers", "numpy", "psutil")


def case(name: str, value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    met = None if target is None else value <= target
    return {"case": name, "value": round(value, 4), "unit": unit, "target": target, "met": met}


def of_kills(survived: Survived) -> list[dict[str, Any]]:
    cases = [
        case("kills survived", len(survived.kills), "kills"),
        case("promises broken in the surviving log", len(survived.wrong), "findings", 0),
        case("steps in the surviving log", survived.steps, "steps"),
        case("groups in the surviving log", survived.groups, "groups"),
    ]
    for role in ROLES:
        times = [kill.recovered_s for kill in survived.kills if kill.role == role]
        if times:
            cases += [
                case(f"{role}: time to recover, median of {len(times)}", statistics.median(times), "s"),
                case(f"{role}: time to recover, longest", max(times), "s"),
            ]
    return cases


def of_drift(readings: list[Reading], left: list[str]) -> list[dict[str, Any]]:
    found, last = drift(readings), readings[-1]
    return [
        case("duration", last.t_s / 60, "min"),
        case("trajectories done", last.trajectories, "trajectories"),
        case("attempts failed by their environments", last.failed, "attempts"),
        case("driver's memory at the end", last.rss_mb, "MB"),
        case("driver's memory, slope", found.mb_per_min, "MB/min", TARGETS["mb_per_min"]),
        case("driver's open handles at the end", last.handles, "handles"),
        case("driver's open handles, slope", found.handles_per_min, "1/min", TARGETS["handles_per_min"]),
        case("CPU per trajectory, second tenth", 1e3 * found.cpu_second_tenth_s, "ms"),
        case("CPU per trajectory, last tenth", 1e3 * found.cpu_last_tenth_s, "ms"),
        case("CPU per trajectory, last tenth over second", found.cpu_ratio, "ratio", TARGETS["cpu_ratio"]),
        case("a fixed computation, last tenth over second", found.yardstick_ratio, "ratio"),
        case("processes left", len(left), "processes", 0),
    ]


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def soak(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Both phases; each is left out when its argument is 0."""
    report: dict[str, Any] = {"name": "soak", "cases": []}
    if options.kills:
        survived = survive(scratch / "kills", options.kills, seed=options.seed, workers=options.workers, say=say)
        report["cases"] += of_kills(survived)
        report["kills"] = [kill._asdict() for kill in survived.kills]
        report["wrong"] = survived.wrong
        for line in (*(f"WRONG {one}" for one in survived.wrong), "", *table(survived.kills), ""):
            say(line)
    if options.minutes:
        readings, left = endure(scratch / "drift", options.minutes, say)
        report["cases"] += of_drift(readings, left)
        report["readings"] = [reading._asdict() for reading in readings]
        report["left"] = left
    report["provenance"] = {
        "command": ["python", "benchmarks/soak.py", *sys.argv[1:]],
        "versions": {
            "python": platform.python_version(),
            "rollart": rollart.__version__,
            **{name: version(name) for name in PACKAGES},
        },
    }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="processes to kill; 0: no kills (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=40, help="of phase 2; 0: none (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of each role, where kills are (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and moments of the kills")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay (default: a temporary one, removed)")
    options = parser.parse_args()
    scratch = (options.folder or Path(tempfile.mkdtemp(prefix="rollart-soak-"))).resolve()
    try:
        report = soak(options, scratch)
    except SoakFailed as error:
        say(f"FAILED {error}\nthe runs are in {scratch}")
        return 1
    for one in report["cases"]:
        target = "" if one["target"] is None else f"  target {one['target']:g}  {'met' if one['met'] else 'MISSED'}"
        say(f"{one['case']:48} {one['value']:12.2f} {one['unit']}{target}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.folder is None:
        shutil.rmtree(scratch)
    return 0 if all(one["met"] is not False for one in report["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
