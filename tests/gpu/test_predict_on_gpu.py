"""One GPU's profile predicts its own training and decoding steps. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "predict_on_device.py"
SCRIPT_S = 480


def test_six_training_and_six_decoding_steps_are_predicted(tmp_path: Path) -> None:
    out = tmp_path / "predicted.json"
    command = [sys.executable, str(SCRIPT), "--json", str(out), "--minutes", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    sys.stdout.write(done.stdout)
    assert sorted(row["kind"] for row in found["cases"]) == ["decode"] * 6 + ["train"] * 6
    assert all(row["predicted_s"] > 0.0 and row["measured_s"] > 0.0 for row in found["cases"])
