"""What the recipes promise, measured: minutes each. Run with `make test-long`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.ray]

ROLLART = Path(sys.executable).with_name("rollart")


def trained(folder: Path, recipe: str, *words: str, within_s: float = 1800.0) -> dict[str, Any]:
    """The summary of a finished run of `recipe`."""
    command = [str(ROLLART), "train", recipe, "--plain", f"output_dir={folder}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((folder / recipe / "summary.json").read_text())
    return summary


def test_the_main_job_learns_both_tasks_from_reward_alone(tmp_path: Path) -> None:
    success = trained(tmp_path, "first_run")["success"]
    lake, digit = success["frozen_lake"], success["max_digit"]
    for task in (lake, digit):
        assert task["random"] <= 0.2
        assert task["warm"] <= 0.2
        assert task["after"] >= 0.8
    assert digit["constant"] <= 0.3
    assert digit["held_back"] >= 0.8
    assert lake["greedy"] == 1.0


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    """The control run: the same recipe with rewards permuted across groups, sampled over more than 1,000 episodes."""
    summary = trained(tmp_path, "first_run_shuffled", "eval.episodes=1024")
    for task in summary["success"].values():
        assert task["after"] <= 0.3


def test_the_second_rung_beats_every_constant_answer_on_maps_that_it_has_not_seen(tmp_path: Path) -> None:
    """The goal of the recipe is 0.8 on held-back maps; it has not been reached, and the recipe says how far it came."""
    summary = trained(tmp_path, "generalise", within_s=3600.0)
    success = summary["success"]["frozen_lake"]
    assert success["random"] <= 0.2
    assert success["warm"] <= 0.2
    assert success["held_back"] >= success["constant"] + 0.15
