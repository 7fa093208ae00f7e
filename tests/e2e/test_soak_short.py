"""The soak in short: one process of each role of a real run is killed, and the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


def test_the_only_process_of_each_role_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    """Env host, engine, trainer, driver: each is replaced, its work goes on, and every promise holds in the log."""
    figures = tmp_path / "soak.json"
    options = [
        "--kills",
        "4",
        "--minutes",
        "0",
        "--workers",
        "1",
        "--json",
        str(figures),
        "--folder",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(
        [sys.executable, str(SOAK), *options], capture_output=True, text=True, timeout=420, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(figures.read_text())
    assert sorted(kill["role"] for kill in report["kills"]) == ["driver", "engine", "host", "trainer"]
    assert report["wrong"] == []
    assert next(one["value"] for one in report["cases"] if one["case"] == "steps in the surviving log") >= 4
