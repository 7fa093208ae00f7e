"""The runs of `fidelity.py`: the one that is calibrated on, and the five that are predicted; all are runs of the product.

Turns have a fixed length: the policy is not trained in earnest (learning rate 1e-7, no warm start), so it writes until its 16
tokens are used up, in every run alike. What a policy learns is not what is predicted here; how long it takes is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_run import ALPHABET, MODEL, PeerFailed, told, with_tasks
from peers_tasks import LAKE_TURN_TOKENS, LAKE_TURNS
from rollart.runtime.follow import COMMAND
from rollart.sim.laws import ClippedNormal, Law

TASK = "lake"
LIMIT_S = 600.0
"""Of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    name: str
    steps: int
    batch: int = 64
    group: int = 8
    staleness: int = 1
    engines: int = 1
    latency_s: float = 0.0
    """Mean of what a step of the environment waits; its deviation is half of it."""

    def latency(self) -> Mapping[str, Law]:
        """What is told to the prediction of it: as the environment draws it."""
        return {TASK: ClippedNormal(law="normal", mean=self.latency_s, sigma=self.latency_s / 2)}


CALIBRATION = Case(name="base", steps=24)
PREDICTED = (
    # no injected latency; the first of them larger batches, the second more busy processes than cores
    Case(name="batch_128", steps=10, batch=128),
    Case(name="engines_2", steps=14, engines=2),
    Case(name="sync", steps=12, staleness=0, latency_s=0.1),
    Case(name="group_16", steps=14, group=16, staleness=2, latency_s=0.1),
    Case(name="latency", steps=14, latency_s=0.2),
)
"""engines_2: control, two engines, the trainer and the environments' host on two cores."""


def settings_of(case: Case, *, seed: int, name: str = "run") -> dict[str, Any]:
    """The configuration as a file says it."""
    waits = {"latency_s": case.latency_s, "spread_s": case.latency_s / 2} if case.latency_s else {}
    return {
        "name": name, "output_dir": ".", "seed": seed,
        "model": {"kind": "scratch", **MODEL}, "tokenizer": {"kind": "chars", "alphabet": ALPHABET},
        "tasks": {
            TASK: {
                "env": {"kind": "python", "entry": "peers_tasks:Lake", "kwargs": waits},
                "size": 256, "max_turns": LAKE_TURNS, "max_tokens": LAKE_TURN_TOKENS,
            }
        },
        "schedule": {
            "steps": case.steps, "batch": case.batch, "group_size": case.group, "max_staleness": case.staleness,
        },
        "optimizer": {"lr": 1e-7},
        "engine": {"kind": "native", "count": case.engines},
        "baselines": {"episodes": 1}, "warm_start": {"steps": 0}, "eval": {"episodes": 0}, "checkpoint": {"every": 0},
    }  # fmt: skip


def record(case: Case, scratch: Path, *, seed: int) -> Path:
    """Run it as a user would; returns the run's folder. Raises PeerFailed."""
    name = f"{case.name}-{seed}"
    shutil.rmtree(scratch / name, ignore_errors=True)
    (scratch / f"{name}.yaml").write_text(json.dumps(settings_of(case, seed=seed, name=name)), encoding="utf-8")
    output = scratch / f"{name}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, "train", f"{name}.yaml", "--profile", "none", "--plain"],
            stdout=file, stderr=subprocess.STDOUT, cwd=scratch, env=with_tasks(),
        )  # fmt: skip
        try:
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            process.terminate()
            process.wait()
            raise PeerFailed(f"{name} was not done within {LIMIT_S:g} s{told(output)}") from error
    if code:
        raise PeerFailed(f"{name} ended with {code}{told(output)}")
    return scratch / name
