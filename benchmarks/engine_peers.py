"""Engines of other environments beside this package's: one process each, kept alive, a workload a line.

Owns these processes. Invariants: a process gets the cores of the one that starts it, and the threads that the run has; it is
ready before the first workload and waits without computing between two, which `idle_share` measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from engine_sides import Workload

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
IDLE_S = 1.0
END_S = 20.0


class Served:
    """A side that is a process: `peers_vllm.py --serve`."""

    def __init__(self, options: list[str]) -> None:
        """Raises RuntimeError with the end of its log when it does not start."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(VLLM_PYTHON), str(HERE / "peers_vllm.py"), "--serve", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._seen = psutil.Process(self._process.pid)
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except RuntimeError:
            self.close()
            raise

    def __call__(self, work: Workload) -> float:
        """Samples the workload once; the seconds that the process took for it, without reading it."""
        said = {
            "prompts": [ids.tolist() for ids in work.prompts],
            "new": work.new.tolist(),
            "observations": [[ids.tolist() for ids in row] for row in work.observations],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer["tokens"] == work.n_tokens, f"{answer['tokens']} tokens sampled, {work.n_tokens} wanted"
        return float(answer["seconds"])

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    def idle_share(self) -> float:
        """CPU time over time while nothing is asked of it."""
        before = self.cpu_s()
        time.sleep(IDLE_S)
        return (self.cpu_s() - before) / IDLE_S

    def close(self) -> None:
        """End the process; its input ends, then it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM's process ended: {self._log.read().decode(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def vllm_sides(folder: str, dtype: str, longest: int, rows: int, threads: int) -> Iterator[dict[str, Served]]:
    """vLLM with prefix caching on the model in `folder`, eager and compiled; nothing, and a line that says so, without it."""
    sides: dict[str, Served] = {}
    if not VLLM_PYTHON.exists():
        sys.stderr.write(f"no {VLLM_PYTHON}: vLLM is left out; `make vllm` makes its environment\n")
    try:
        for way in ("eager", "compiled") if VLLM_PYTHON.exists() else ():
            options = [
                "--model", folder, "--dtype", dtype, "--longest", str(longest), "--trajectories", str(rows),
                "--threads", str(threads), *(["--compiled"] if way == "compiled" else []),
            ]  # fmt: skip
            sides[f"vllm {way}, prefix caching"] = Served(options)
        yield sides
    finally:
        for side in sides.values():
            side.close()
