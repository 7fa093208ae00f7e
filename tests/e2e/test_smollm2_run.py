"""The pre-trained model's recipe, run for real but small: chat template, games, engine, trainer and control, in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollart.observe.log import read_events
from rollart.observe.trajectories import read_trajectories
from rollart.recipes.smollm2_textworld import SMOLLM2, SYSTEM
from rollart.runtime.pretrained import local_folder

ROLLART = Path(sys.executable).with_name("rollart")
SMALL = (
    "world.kind=inline", "schedule.group_size=2", "schedule.batch=2", "tasks.textworld.size=2", "tasks.textworld.held_out=0",
    "tasks.textworld.max_turns=2", "tasks.textworld.max_tokens=8", "optimizer.warmup_steps=0", "engine.kv_tokens=4096",
    "baselines.episodes=2", "checkpoint.every=0", "eval.episodes=0", "eval.every=0",
    # so few trajectories may earn equal rewards only: weight decay moves the weights all the same
    "optimizer.weight_decay=0.1",
)  # fmt: skip


def run(folder: Path, *words: str) -> Path:
    """`rollart train smollm2_textworld` with `words`; the run's folder."""
    command = [str(ROLLART), "train", "smollm2_textworld", "--plain", f"output_dir={folder}", *SMALL, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "smollm2_textworld"


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_trajectories(run_dir / "trajectories.jsonl"))


def check(run_dir: Path, steps: int) -> None:
    """The run trained what it sampled, as a chat, and moved the pre-trained weights a little, to finite values."""
    summary = json.loads((run_dir / "summary.json").read_text())
    tokens = summary["tokens"]
    assert summary["steps"] == steps
    assert tokens["trained"] > 0
    places = sum(tokens[place] for place in ("trained", "buffered", "in_flight", "eval"))
    assert tokens["sampled"] == places + sum(tokens["dropped"].values())
    kept = rows(run_dir)
    assert kept
    for row in kept:
        assert row["text"].startswith(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nYou are in a text adventure."
        )
        assert len(row["ids"]) == len(row["loss_mask"])
        assert "<|im_start|>assistant\n" in row["text"]
        assert row["metrics"].keys() >= {"segments", "score", "progress", "won"}
    finished = [event["data"] for event in read_events(run_dir / "events.jsonl")[1] if event["kind"] == "step_finished"]
    assert sum(one["trained_tokens"] for one in finished) == tokens["trained"]
    before = load_file(local_folder(SMOLLM2) / "model.safetensors")
    after = load_file(run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert 0 < max(moved) < 0.01


def test_one_step_of_smollm2_on_textworld(tmp_path: Path) -> None:
    check(run(tmp_path, "schedule.steps=1"), steps=1)


@pytest.mark.long
def test_a_few_steps_of_smollm2_on_textworld_with_overlap(tmp_path: Path) -> None:
    """On a local Ray, with batches of two groups, an evaluation and a checkpoint."""
    words = (
        "world.kind=local", "schedule.steps=3", "schedule.batch=4", "checkpoint.every=2", "eval.episodes=2",
        "tasks.textworld.max_turns=3",
    )  # fmt: skip
    run_dir = run(tmp_path, *words)
    check(run_dir, steps=3)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["success"]["textworld"]["after"] is not None
