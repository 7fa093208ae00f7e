"""Processes of `echo_gloo.py`: starts one per rank, each on a core of its own with one torch thread, and reads what they found.

Invariant: every process that is started here has ended when `ranks` returns, whether it answered or failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "echo_gloo_rank.py"
POLL_S = 0.02
TAIL_CHARACTERS = 2000


class RanksFailed(Exception):
    """A rank ended with an error or did not end in time."""


def ranks(
    task: str,
    spec: Mapping[str, Any],
    scratch: Path,
    *,
    cores: Sequence[int],
    timeout_s: float = 600.0,
    program: Path = PROGRAM,
) -> list[dict[str, Any]]:
    """What each of `len(cores)` processes answers to `task` with `spec`, by rank. Raises `RanksFailed`."""
    folder = scratch / f"{task}-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps({**spec, "world": len(cores)}), encoding="utf-8")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank, core in enumerate(cores):
            with (folder / f"{rank}.log").open("wb") as log:
                words = [sys.executable, str(program), task, str(folder), str(rank), str(core)]
                running.append(subprocess.Popen(words, stdout=log, stderr=log, env=_environment()))
        _await(running, folder, task, time.monotonic() + timeout_s)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(len(cores))]


def _environment() -> dict[str, str]:
    """One thread in every library, so that a rank is one core."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _await(running: Sequence[subprocess.Popen[bytes]], folder: Path, task: str, deadline_s: float) -> None:
    """Until all have ended; the first failure ends the wait, as the others would wait for the failed rank for ever."""
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code:
                log = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
                raise RanksFailed(f"{task}: rank {rank} ended with {code}\n{log[-TAIL_CHARACTERS:]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise RanksFailed(f"{task}: ranks {waiting} did not end in time; logs are in {folder}")
        time.sleep(POLL_S)
