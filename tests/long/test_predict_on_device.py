"""The program that predicts one device's steps, tried on this CPU with tiny models. Run with `make test-long`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "predict_on_device.py"
SCRIPT_S = 900


def test_the_program_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "predicted.json"
    words = ["--json", str(out), "--device", "cpu", "--size", "tiny", "--minutes", "0.1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=SCRIPT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert sorted(row["kind"] for row in found["cases"]) == ["decode"] * 6 + ["train"] * 6
    for row in found["cases"]:
        assert row["predicted_s"] > 0.0
        assert row["measured_s"] > 0.0
        assert sum(row["provenance"].values()) == pytest.approx(1.0, abs=0.01)
    assert out.with_suffix(".profile.json").is_file()
