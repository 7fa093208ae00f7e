"""What going per trajectory and overlapping gain over taking turns, beside the most that they can gain.

    python benchmarks/async_vs_sync.py --json FILE

`rollout_*`: trainer off, the same environments and drawn latencies under a barrier per turn, a barrier per batch, and per
trajectory; the ratio is the measured gain over the bound from the drawn matrix and the time of a turn's generation, as
measured under each schedule in that pair. `overlap_*`: `rollart train` with rollout beside training, one core each; the
ratio is the measured gain over (R + T) / max(R, T), R and T measured alone by the same workers that take turns. The fastest
synchronous run of a small sweep, in which each part may have all cores, stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from async_vs_sync_rollout import IDEAL, Draw, Rolled, Schedule, bound, config, matrix, over_ideal, roll, specs_of
from peers_figures import Bounds, Rate, case, fastest, median_rate, versions
from peers_run import (
    ONE_CORE_EACH,
    OURS_AROUND_S,
    TAKING_TURNS,
    TASKS,
    PeerFailed,
    Ran,
    Say,
    Setting,
    measured,
    save_weights,
    window_s,
)

ROLLOUT_TARGET, OVERLAP_TARGET = 0.93, 0.85
CVS = (0.1, 0.3, 0.6, 1.0)
"""Sigma over mean of a step's latency."""
MEAN_S = 0.2
ENVIRONMENTS, BATCHES = 64, 3
BARRIERS: Sequence[Schedule] = ("per_turn", "per_batch")
ALL: Sequence[Schedule] = (*BARRIERS, "per_trajectory")
ROLLOUT_AROUND_S = 0.5
"""Start and end of one rollout."""


def draws(options: argparse.Namespace, cv: float) -> list[Draw]:
    """One a pair: every pair rolls out its own matrix, under all schedules."""
    return [
        Draw(environments=options.environments, batches=options.batches, mean_s=options.mean_s, cv=cv, seed=seed)
        for seed in range(options.pairs)
    ]


def rollouts(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """All `rollout_*` cases, pair by pair, so that a slow minute meets all of them."""
    warm_up = roll(dataclasses.replace(draws(options, 0.0)[0], mean_s=0.0), "per_batch")
    say(f"warm-up: a turn's generation takes {1e3 * warm_up.turn_s:.1f} ms when all environments generate at once")
    found: dict[float, list[dict[Schedule, Rolled]]] = {cv: [] for cv in options.cvs}
    for pair in range(options.pairs):
        for cv in options.cvs:
            order = ALL if pair % 2 else ALL[::-1]
            drawn = draws(options, cv)[pair]
            found[cv].append({schedule: roll(drawn, schedule) for schedule in order})
            told = ", ".join(f"{name} {found[cv][-1][name].seconds:.2f} s" for name in ALL)
            say(f"pair {pair}, sigma/mean {cv:g}: {told}")
    return [rollout_case(over, cv, draws(options, cv), found[cv]) for over in BARRIERS for cv in options.cvs]


def rollout_case(
    over: Schedule, cv: float, drawn: Sequence[Draw], found: Sequence[dict[Schedule, Rolled]]
) -> dict[str, Any]:
    """Measured gain over its bound, a pair a matrix."""
    gains = [one[over].seconds / one["per_trajectory"].seconds for one in found]
    bounds = [bound(draw, over, one) for draw, one in zip(drawn, found, strict=True)]
    sides = {
        name: {
            "seconds": round(statistics.median(one[name].seconds for one in found), 4),
            "turn_s": round(statistics.median(one[name].turn_s for one in found), 5),
            "groups_dropped": sum(one[name].dropped for one in found),
        }
        for name in (over, "per_trajectory")
    }  # fmt: skip

    def own(name: Schedule) -> float:
        """Its least time, from what was drawn and what it generated, over the measured one."""
        shares = [over_ideal(draw, name, one[name]) for draw, one in zip(drawn, found, strict=True)]
        return round(statistics.median(shares), 4)

    return case(
        f"rollout_{over}_{cv:g}", [gain / most for gain, most in zip(gains, bounds, strict=True)],
        target=ROLLOUT_TARGET, ours=sides["per_trajectory"], theirs=sides[over],
        gain=round(statistics.median(gains), 4), bound=round(statistics.median(bounds), 4), sigma_over_mean=cv,
        ours_over_ideal=own("per_trajectory"), barrier_over_ideal=own(over),
        environments=drawn[0].environments, trajectories=drawn[0].environments * drawn[0].batches,
        versions=versions(),
    )  # fmt: skip


def overlap(task: str, options: argparse.Namespace, setting: Setting, say: Say) -> dict[str, Any]:
    """One `overlap_*` case. `setting.seconds`: of each measurement of a pair."""
    swept: dict[str, Rate] = {
        workers.name: measured(task, workers, setting, staleness=0, seconds=window_s(task, 0)).rate
        for workers in TAKING_TURNS
    }  # fmt: skip
    best = fastest(swept)
    say(f"{task}: the fastest synchronous run is {best}, {swept[best].per_s:.1f} trajectories/s")
    runs, alone = list[Ran](), list[Bounds]()
    for pair in range(options.pairs):
        for staleness in (0, 1) if pair % 2 else (1, 0):
            found = measured(task, ONE_CORE_EACH, setting, staleness=staleness, seed=pair)
            if staleness:
                runs.append(found)
            else:
                alone.append(Bounds(found.rate.rollout_s, found.rate.train_s))
        gain = _gain(runs[-1].rate, alone[-1])
        say(f"{task} pair {pair}: {gain:.3f} of at most {alone[-1].overlap:.3f}")
    gains = [_gain(one.rate, parts) for one, parts in zip(runs, alone, strict=True)]
    middle, sampled = median_rate([one.rate for one in runs]), [one.sampled_over_trained for one in runs]
    return case(
        f"overlap_{task}", [gain / parts.overlap for gain, parts in zip(gains, alone, strict=True)],
        target=OVERLAP_TARGET,
        ours={
            **middle.row(), "workers": dataclasses.asdict(ONE_CORE_EACH), "max_staleness": 1,
            "sampled_over_trained": round(statistics.median(sampled), 4),
        },
        theirs={"taking turns, same workers": alone[len(alone) // 2].row()},
        gain=round(statistics.median(gains), 4),
        bound=round(statistics.median(parts.overlap for parts in alone), 4),
        sync={
            "workers": best, **swept[best].row(), "gain_over_it": round(middle.per_s / swept[best].per_s, 4),
            "sweep": {name: round(one.per_s, 3) for name, one in swept.items()},
        },
        versions=versions(),
    )  # fmt: skip


def _gain(ours: Rate, alone: Bounds) -> float:
    return (alone.rollout_s + alone.train_s) / ours.step_s


def rollout_time_s(options: argparse.Namespace) -> float:
    """What all rollouts take at best, from their matrices."""
    total_s = 0.0
    for cv in options.cvs if options.rollout else ():
        for drawn in draws(options, cv):
            rows = matrix(drawn, specs_of(config(drawn, "per_batch"))[0])
            total_s += sum(IDEAL[name](rows, drawn.environments, 0.0) + ROLLOUT_AROUND_S for name in ALL)
    return total_s


def seconds_for(options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """(seconds of each overlap measurement of a pair by task, seconds of all) that fit `--minutes`, or the least windows."""
    fixed_s = rollout_time_s(options) + sum(
        len(TAKING_TURNS) * (OURS_AROUND_S + window_s(task, 0)) + 2 * options.pairs * OURS_AROUND_S
        for task in options.overlap
    )  # fmt: skip
    least = {task: max(window_s(task, 0), window_s(task, 1)) for task in options.overlap}
    pairs_s = 2 * options.pairs * sum(least.values())
    longer = max(1.0, (options.minutes * 60 - fixed_s) / pairs_s) if pairs_s else 1.0
    return {task: longer * seconds for task, seconds in least.items()}, fixed_s + longer * pairs_s


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=22, help="of all cases together (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs per case (default: %(default)s)")
    parser.add_argument("--no-rollout", dest="rollout", action="store_false", help="leave the rollout_* cases out")
    parser.add_argument("--cvs", type=float, nargs="*", default=list(CVS), help="sigma / mean of the latencies")
    parser.add_argument("--mean-s", type=float, default=MEAN_S, help="mean latency of a step (default: %(default)s)")
    parser.add_argument("--environments", type=int, default=ENVIRONMENTS, help="a multiple of 8 (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches per rollout (default: %(default)s)")
    parser.add_argument("--overlap", nargs="*", default=["single", "multi"], choices=list(TASKS), metavar="TASK")
    parser.add_argument("--cores", type=int, nargs="*", help="cores of everything (default: the first two there are)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay (default: a temporary one, removed)")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    scratch = (options.folder or Path(tempfile.mkdtemp(prefix="rollart-async-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    seconds, total_s = seconds_for(options)
    windows = ", ".join(f"overlap {task} {one:.1f} s" for task, one in seconds.items())
    say(
        f"about {total_s / 60:.1f} minutes; a measurement of {windows or 'rollouts alone'}; on cores {cores}, in {scratch}"
    )
    model = save_weights(scratch / "model")
    try:
        cases = rollouts(options, say) if options.rollout else []
        for task, window in seconds.items():
            cases.append(
                overlap(task, options, Setting(scratch=scratch, model=model, cores=cores, seconds=window), say)
            )
    except PeerFailed as error:
        say(f"FAILED {error}")
        return 1
    for one in cases:
        met = "met" if one["met"] else "MISSED"
        figures = f"{one['ratio_median']:.3f} ({one['ratio_min']:.3f} .. {one['ratio_max']:.3f})"
        say(f"{one['case']:24} {figures}  gain {one['gain']:.3f} of {one['bound']:.3f}  {met}")
    report = {
        "name": "async_vs_sync", "cases": cases,
        "provenance": {
            "command": ["python", "benchmarks/async_vs_sync.py", *sys.argv[1:]], "cores": list(cores),
            "seconds": {task: round(one, 2) for task, one in seconds.items()},
        },
    }  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.folder is None:
        shutil.rmtree(scratch)
    return 0 if all(one["met"] for one in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
