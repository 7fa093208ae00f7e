"""Laws as a calibration gives them, in round figures, and a configuration that they are of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollart.config.schema import RunConfig
from rollart.perf.measured import (
    Calibrated,
    ControlLaw,
    EngineLaw,
    HostLaw,
    Origin,
    Played,
    TaskLaw,
    TrainerLaw,
    WeightsLaw,
)


def some_laws(*, cores: int = 2, slower: float = 1.0, **changes: Any) -> Calibrated:
    """`slower`: times the engine's and the trainer's costs."""
    laws = Calibrated(
        origin=Origin(run="made", git="none", versions={"python": "3.11"}, cpu="a processor", cores=cores, steps=9),
        engine=EngineLaw(
            step_s=slower * 2e-3, row_s=slower * 4e-5, token_s=slower * 3e-5, context_s=slower * 1e-7, batch_s=3e-4,
            answer_s=5e-4, turn_s=2e-4,
        ),
        trainer=TrainerLaw(step_s=slower * 0.05, pass_s=slower * 0.02, token_s=slower * 5e-5),
        weights=WeightsLaw(publish_s=0.01, prefetch_s=0.01, apply_s=0.01),
        host=HostLaw(batch_s=4e-4, answer_s=6e-4, call_s=2e-4),
        control=ControlLaw(batch_s=3e-4, answer_s=5e-4, turn_s=3e-4, trajectory_s=3e-4, step_s=0.01, idle=0.02),
        tasks={
            "lake": TaskLaw(
                played=tuple(
                    Played(reward=float(n % 2), prompt=20, sampled=(8,) * (1 + n % 4), observed=(20,) * (1 + n % 4))
                    for n in range(8)
                )
            )
        },
        step_s=1.0,
    )  # fmt: skip
    return replace(laws, **changes)


def a_run(**changes: Any) -> RunConfig:
    """Of the task that the laws know; `changes`: sections as maps."""
    values: dict[str, Any] = {
        "name": "replayed",
        "tasks": {"lake": {"env": {"kind": "frozen_lake", "map": "random"}, "size": 32, "max_turns": 4, "max_tokens": 8}},
        "schedule": {"steps": 6, "batch": 16, "group_size": 4, "max_staleness": 1, **changes.pop("schedule", {})},
        "eval": {"episodes": 0}, "checkpoint": {"every": 0}, "warm_start": {"steps": 0},
        **changes,
    }  # fmt: skip
    return RunConfig.model_validate(values)
