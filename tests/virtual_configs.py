"""Configurations of small virtual worlds, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.config.schema import RunConfig

POOLS: Mapping[str, Any] = {"train": {"device": "H800", "roles": ["train"]}, "roll": {"device": "H20"}}


def a_virtual(*, pools: Mapping[str, Any] = POOLS, load: str = "gem_math", **sections: Any) -> RunConfig:
    """One node that trains, one that samples, a load of a few turns. Sections are given as maps and merged with these."""
    base: dict[str, Any] = {
        "world": {"kind": "virtual"},
        "model": {"kind": "shape", "name": "qwen3-8b"},
        "engine": {"kind": "modelled"},
        "tasks": {"a": {"env": {"kind": "workload", "name": load}, "size": 1000, "max_turns": 8, "max_tokens": 4096}},
        "schedule": {"steps": 2, "batch": 32, "group_size": 8},
        "deadlines": {
            "turn_s": 4000, "trajectory_s": 8000, "batch_s": 9000, "weights_s": 600, "train_s": 3000, "env_open_s": 900,
            "env_step_s": 600, "score_s": 900,
        },
        "eval": {"episodes": 0},
    }  # fmt: skip
    for name, given in sections.items():
        base[name] = {**base.get(name, {}), **given}
    return RunConfig.model_validate({**base, "cluster": {**base.get("cluster", {}), "pools": dict(pools)}})
