"""CPU time of the driver and of Ray's own processes over that of the whole run: what control costs beside the work.

    python benchmarks/overhead.py --json FILE

Runs of ours as `vs_trl.py` measures them, with an engine core beside a trainer core; CPU time of every process from the end
of the warm-up on, by role. What Ray does inside the workers' own processes counts as theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers_figures import versions
from peers_run import ONE_CORE_EACH, OURS_AROUND_S, TASKS, PeerFailed, Ran, Setting, run, save_weights

AIM = 0.05
LEAST_S = 5.0


def case(task: str, found: Sequence[Ran]) -> dict[str, Any]:
    """The share over some runs, and the median seconds of each role."""
    shares = [one.cpu.overhead for one in found]
    roles = sorted({role for one in found for role in one.cpu.by_role})
    middle = statistics.median(shares)
    return {
        "case": f"overhead_{task}", "value": round(middle, 4), "least": round(min(shares), 4),
        "most": round(max(shares), 4), "unit": "share of CPU time", "target": AIM, "met": middle <= AIM,
        "runs": len(found), "ours": found[len(found) // 2].rate.row(),
        "cpu_s": {
            role: round(statistics.median(one.cpu.by_role.get(role, 0.0) for one in found), 3) for role in roles
        },
    }  # fmt: skip


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6, help="of all cases together (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: %(default)s)")
    parser.add_argument("--cases", nargs="*", default=list(TASKS), choices=list(TASKS), metavar="CASE")
    parser.add_argument("--cores", type=int, nargs="*", help="cores of the run (default: the first two there are)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="rollart-overhead-"))
    cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    runs = options.runs * len(options.cases)
    seconds = max(LEAST_S, options.minutes * 60 / runs - OURS_AROUND_S)
    say(f"about {runs * (seconds + OURS_AROUND_S) / 60:.1f} minutes: {runs} runs of {seconds:.1f} s on cores {cores}")
    setting = Setting(scratch=scratch, model=save_weights(scratch / "model"), cores=cores, seconds=seconds)
    cases = []
    try:
        for task in options.cases:
            found = [run(task, ONE_CORE_EACH, setting, staleness=1, seed=seed) for seed in range(options.runs)]
            cases.append(case(task, found))
            one = cases[-1]
            say(
                f"{one['case']:20} {one['value']:.1%} of CPU time ({one['least']:.1%} .. {one['most']:.1%})  {one['cpu_s']}"
            )
    except PeerFailed as error:
        say(f"FAILED {error}")
        return 1
    report = {
        "name": "overhead", "cases": cases,
        "provenance": {
            "command": ["python", "benchmarks/overhead.py", *sys.argv[1:]], "cores": list(cores),
            "versions": versions(),
        },
    }  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
