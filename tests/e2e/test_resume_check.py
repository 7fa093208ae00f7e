"""`rollart resume-check`, as a user calls it: the real command line, a real kill. In one process each, without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROLLART = Path(sys.executable).with_name("rollart")
SMALL = [
    "world.kind=inline", "baselines.episodes=4", "warm_start.steps=1", "warm_start.episodes=8", "eval.episodes=0",
    "schedule.batch=16", "schedule.group_size=4",
]  # fmt: skip


def test_a_killed_and_resumed_run_consumes_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """Field case 35: for real; with `max_staleness` 0 the same multiset of problems."""
    command = [str(ROLLART), "resume-check", "smoke", "sync", *SMALL, "--profile", "none", "--steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both: the multiset of trained problems (64 and 64)" in done.stdout
    assert "resumed after event" in done.stdout
    assert "holds" in done.stdout.splitlines()[-2]
