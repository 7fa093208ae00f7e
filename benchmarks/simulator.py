"""Cost of simulation: wall time of one step of a job of 3,000 GPUs, and per trajectory at ten times that scale.

    python benchmarks/simulator.py --json FILE [--scale 1 10]

The real control code (`control.run.run`) on the virtual loop, engines that batch continuously, about 20 turns a trajectory, and
the event log written to disk by its usual writer. Wall time covers the whole run, from starting engines to the closed log,
and is divided by the steps and by the trajectories that were trained. Each scale runs in a process of its own, on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

import rollart
from rollart.config.schema import RunConfig
from rollart.control.garbage import spare_the_loop
from rollart.control.run import run
from rollart.core.events import header
from rollart.observe.log import EventWriter
from rollart.ports import World
from rollart.sim.laws import Uniform
from rollart.sim.loop import run as run_virtually
from rollart.sim.virtual import build
from rollart.sim.workload import workload

ENGINES, ENGINE_TP, DEVICES_PER_NODE = 512, 4, 8
TRAIN_NODES = 119
"""With 512 engines of 4 devices, 3,000 devices in all."""
LEAST_TRAIN_NODES = 2
"""That the model is trained on."""
BATCH, GROUP_SIZE = 8192, 16
TURNS, MOST_TURNS = Uniform(law="uniform", low=10, high=30), 30
TASK = "shop"
STEP_TARGET_S, STEP_AIM_S, RATIO_TARGET = 60.0, 30.0, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    scale: float
    steps: int
    wall_s: float
    cpu_s: float
    simulated_s: float
    trajectories: int
    turns: int
    events: int
    log_bytes: int
    peak_gib: float

    @property
    def per_trajectory_s(self) -> float:
        return self.wall_s / self.trajectories


class Counts:
    """A sink beside the log: how many of what."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.trained = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.kinds[event["kind"]] += 1
        if event["kind"] == "batch_released":
            self.trained += event["data"]["trajectories"]


def write_load(path: Path) -> None:
    """Web shopping with 20 turns on average."""
    load = workload("webshop").model_copy(update={"turns": TURNS})
    path.write_text(yaml.safe_dump(load.model_dump(mode="json", exclude_none=True)), encoding="utf-8")


def a_config(scale: float, steps: int, load: Path) -> RunConfig:
    engines = max(1, round(scale * ENGINES))
    nodes = max(1, engines * ENGINE_TP // DEVICES_PER_NODE)
    groups = max(1, round(scale * BATCH / GROUP_SIZE))
    train_nodes = max(LEAST_TRAIN_NODES, round(scale * TRAIN_NODES))
    return RunConfig.model_validate(
        {
            "name": "simulator",
            "world": {"kind": "virtual"},
            "model": {"kind": "shape", "name": "qwen3-32b"},
            "engine": {"kind": "modelled"},
            "cluster": {
                "pools": {
                    "train": {"device": "H800", "nodes": train_nodes, "roles": ["train"]},
                    "rollout": {"device": "H20", "nodes": nodes, "tp": ENGINE_TP},
                },
            },
            "tasks": {
                TASK: {
                    "env": {"kind": "workload", "name": str(load)}, "size": 4 * steps * groups, "held_out": 0.0,
                    "max_turns": MOST_TURNS, "max_tokens": 1024,
                },
            },
            "schedule": {"steps": steps, "batch": groups * GROUP_SIZE, "group_size": GROUP_SIZE, "max_staleness": 1},
            "envs": {"sessions_per_host": 4 * groups * GROUP_SIZE + 1024},
            "eval": {"episodes": 0},
            "deadlines": {
                "turn_s": 5000, "trajectory_s": 20000, "env_open_s": 1000, "env_step_s": 1000, "batch_s": 20000,
                "train_s": 5000, "weights_s": 1000, "score_s": 100,
            },
        }
    )  # fmt: skip


def measured(scale: float, steps: int, folder: Path, profile: Path | None = None) -> Measured:
    """One run, from its configuration to its closed log."""
    load = folder / "load.yaml"
    write_load(load)
    config = a_config(scale, steps, load)
    counts, log = Counts(), folder / "events.jsonl"
    profiler = cProfile.Profile(builtins=True)
    spare_the_loop()
    wall, cpu = time.perf_counter(), time.process_time()
    first = header(run=config.name, incarnation=0, clock="virtual", world="virtual", git="")
    ended: list[float] = []

    async def main(inside: World) -> None:
        await run(config, inside)
        ended.append(asyncio.get_running_loop().time())

    with EventWriter(log, first) as writer:
        inside = build(config).world((counts, writer))
        if profile is not None:
            profiler.enable()
        run_virtually(main(inside))
        profiler.disable()
    spent = Measured(
        scale=scale, steps=steps, wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu,
        simulated_s=ended[0], trajectories=counts.trained, turns=counts.kinds["turn_done"],
        events=counts.kinds.total(), log_bytes=log.stat().st_size,
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )  # fmt: skip
    if profile is not None:
        with profile.open("w") as out:
            pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(60)
    return spent


def in_a_process(scale: float, steps: int) -> Measured:
    """As `measured`, on one core, in a process that has done nothing else."""
    words = [sys.executable, __file__, "--alone", str(scale), "--steps", str(steps)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout))


def cases(found: Sequence[Measured]) -> list[dict[str, Any]]:
    def case(name: str, value: float, unit: str, target: float | None = None) -> dict[str, Any]:
        met = None if target is None else value <= target
        return {"case": name, "value": round(value, 4), "unit": unit, "target": target, "met": met}

    rows = []
    for one in found:
        at = f"at scale {one.scale:g}"
        rows += [
            case(f"wall time of a step {at}", one.wall_s / one.steps, "s", STEP_TARGET_S if one.scale == 1 else None),
            case(f"CPU time of a step {at}", one.cpu_s / one.steps, "s"),
            case(f"wall time per trajectory {at}", 1e3 * one.per_trajectory_s, "ms"),
            case(f"wall time per turn {at}", 1e6 * one.wall_s / one.turns, "us"),
            case(f"turns per trajectory {at}", one.turns / one.trajectories, "turns"),
            case(f"peak memory {at}", one.peak_gib, "GiB"),
        ]
    base = next((one for one in found if one.scale == 1), None)
    rows += [
        case(f"wall time per trajectory, scale {one.scale:g} over 1", one.per_trajectory_s / base.per_trajectory_s,
             "ratio", RATIO_TARGET)
        for one in found if base is not None and one.scale > 1
    ]  # fmt: skip
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--scale", type=float, nargs="*", default=[1.0], help="1: 512 engines, 8,192 trajectories a step"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of each run (default: %(default)s)")
    parser.add_argument("--profile", type=Path, help="write where the time goes to this file (slows the run)")
    parser.add_argument("--alone", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    alone = options.alone
    if alone is not None or options.profile is not None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        scale = alone if alone is not None else options.scale[0]
        with tempfile.TemporaryDirectory(prefix="rollart-simulator-") as folder:
            print(json.dumps(asdict(measured(scale, options.steps, Path(folder), options.profile))))  # noqa: T201
        return
    found = [in_a_process(scale, options.steps) for scale in options.scale]
    figures = cases(found)
    for row in figures:
        target = "" if row["target"] is None else f"  target {row['target']:g}  {'met' if row['met'] else 'MISSED'}"
        print(f"{row['case']:52} {row['value']:12.4f} {row['unit']}{target}")  # noqa: T201
    if options.json is not None:
        report = {
            "name": "simulator", "cases": figures, "runs": [asdict(one) for one in found],
            "aim": {"wall time of a step at scale 1": STEP_AIM_S},
            "versions": {"python": platform.python_version(), "rollart": rollart.__version__},
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
