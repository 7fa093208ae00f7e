"""RollArt's RA-6: what a barrier at each turn costs, from latency alone; in closed form, and through the simulator.

    python benchmarks/ra6.py [--seeds 100] [--simulated 1] [--json FILE]

256 environments of 20 turns, each turn a clipped normal N(10 s, sigma); generation, training and weights take no time. With the
barrier a batch takes the sum over turns of the slowest environment, without it the slowest sum. The closed form is computed for
`--seeds` draws; for the first `--simulated` of them the control code runs both schedules (`schedule.barrier` turn and none) on
virtual time with the same latencies, and must come to the same ratio. Expected: 1.21, 1.56, 1.83, 2.07, 2.31 for sigma 1, 3, 5,
7, 10, within 3 % as a mean (600 draws; RollArt measured 1.23, 1.51, 1.69, 2.18, 2.27 with generation).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollart.config.schema import RunConfig
from rollart.control.run import run
from rollart.core.seeds import seed_of
from rollart.core.types import TaskSpec, TrajId
from rollart.sim.envs import Call, EnvModel
from rollart.sim.loop import run as run_virtually
from rollart.sim.world import SimCluster, world

ENVS, TURNS, GROUP_SIZE, MEAN_S = 256, 20, 8, 10.0
EXPECTED: Mapping[float, float] = {1.0: 1.21, 3.0: 1.56, 5.0: 1.83, 7.0: 2.07, 10.0: 2.31}
WITHIN = 0.03
OPEN_S = 1.0
"""All environments are there before the first one steps."""

Latencies = NDArray[np.float64]
"""Seconds, [environments, turns]."""


def latencies(sigma: float, seed: int, *, envs: int = ENVS, turns: int = TURNS) -> Latencies:
    drawn = np.random.default_rng(seed_of(seed, "ra6", sigma)).normal(MEAN_S, sigma, (envs, turns))
    return np.clip(drawn, 0.0, None)


def ratio(seconds: Latencies) -> float:
    """A batch with a barrier at each turn, over the same without one."""
    return float(seconds.max(axis=0).sum() / seconds.sum(axis=1).max())


def simulated(seconds: Latencies, barrier: str) -> float:
    """Seconds of one batch, from all environments open to the last reward, by the control code on virtual time."""
    envs, turns = seconds.shape
    rows: list[Mapping[str, Any]] = []
    inside = world(
        (TaskSpec(name="t", ratio=1.0, train=range(envs // GROUP_SIZE), max_turns=turns, max_tokens=1, max_context=1 << 20),),
        SimCluster(env=EnvModel(latency_s=_of(seconds), turns=lambda traj, attempt: turns)),
        sinks=(rows.append,),
    )  # fmt: skip
    config = RunConfig.model_validate(
        {
            "tasks": {"t": {"env": {"kind": "max_digit"}}},
            "schedule": {
                "steps": 1, "batch": envs, "group_size": GROUP_SIZE, "max_staleness": 0, "barrier": barrier,
            },
            "deadlines": {"trajectory_s": 1e5, "batch_s": 1e5, "env_step_s": 1e4, "turn_s": 1e4},
            "eval": {"episodes": 0},
        }
    )  # fmt: skip
    run_virtually(run(config, inside))
    (released,) = (row["t"] for row in rows if row["kind"] == "batch_released")
    return float(released) - OPEN_S


def _of(seconds: Latencies) -> Callable[[TrajId, int, Call, int], float]:
    def latency_s(traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        _, _, _, index, member = traj.split("/")
        row = int(index) * GROUP_SIZE + int(member)
        return float(seconds[row, turn]) if call == "step" else OPEN_S if call == "open" else 0.0

    return latency_s


def figures(seeds: int, checked: int) -> list[dict[str, float]]:
    """For each sigma the mean ratio in closed form, and the largest difference that the simulator made to it."""
    found: list[dict[str, float]] = []
    for sigma, expected in EXPECTED.items():
        drawn = [ratio(latencies(sigma, seed)) for seed in range(seeds)]
        through = [
            simulated(one, "turn") / simulated(one, "none") for one in (latencies(sigma, n) for n in range(checked))
        ]  # fmt: skip
        off = max((abs(one / drawn[n] - 1) for n, one in enumerate(through)), default=0.0)
        mean = float(np.mean(drawn))
        found.append(
            {
                "sigma_s": sigma, "expected": expected, "mean": round(mean, 4), "deviation": round(float(np.std(drawn)), 4),
                "error": round(mean / expected - 1, 4), "seeds": seeds, "simulated": checked,
                "simulated_off": round(off, 9),
            }
        )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--simulated", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    found = figures(asked.seeds, asked.simulated)
    for row in found:
        sys.stdout.write(
            f"sigma {row['sigma_s']:4.0f} s: {row['mean']:.3f} (expected {row['expected']:.2f}, {row['error']:+.1%}; one draw "
            f"{row['deviation']:.3f}), through the simulator off by {row['simulated_off']:.1e}\n"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps({"ra6": found}, indent=1) + "\n", encoding="utf-8")
    good = all(abs(row["error"]) <= WITHIN and row["simulated_off"] < 1e-4 for row in found)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
