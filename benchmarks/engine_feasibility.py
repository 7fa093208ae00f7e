"""The bare loop of `engine_bare_loop.py` beside what such loops did when it was found out what this kind of machine can do.

    python benchmarks/engine_feasibility.py --threads 1|2

The conditions are those of then: the 0.92 M Llama in fp32, 64 rows, prompts of 64 tokens, 64 sampled, one turn, tokens/s with
the prompts' time in it. Figures of two machines are compared by the matrix product of each; of the machine of then only the
processor was written down. So the record says at how many GFLOP/s that machine would have been no faster per
operation (`equal_at_gflops`), beside what this one gives. The other measure needs no machine: how many times as fast as
transformers `generate` a loop is (`loop_over_generate` of `engine.py`), 1.06 to 1.18 then, at 64 rows on one thread.

Prints one JSON object. A process of its own for each number of threads: torch's threads keep the cores they began with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROWS, PROMPT, NEW, VOCAB = 64, 64, 64, 512
STATED: dict[int, tuple[float, ...]] = {1: (12_600.0, 8_962.0, 9_787.0), 2: (18_400.0, 14_348.0, 14_133.0)}
"""Threads -> tokens/s of the loops of then: the quiet one with per-row positions, and two runs of one that slices."""
STATED_CPU = "AMD EPYC, Zen 5 (family 26), 2 cores"
RUNS = 5


def gemm_gflops() -> float:
    """What one fp32 matrix product of 512 x 512 gives now."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * 512**3 / best / 1e9


def compared(threads: int, runs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The record of one number of threads. `runs`: tokens/s and GFLOP/s of each run."""
    per_gflop = statistics.median(per_s / gflops for per_s, gflops in runs)
    return {
        "threads": threads,
        "tokens_per_s": round(statistics.median(per_s for per_s, _ in runs), 1),
        "tokens_per_s_all": [round(per_s, 1) for per_s, _ in runs],
        "gemm_gflops": round(statistics.median(gflops for _, gflops in runs), 2),
        "tokens_per_gflop": round(per_gflop, 2),
        "stated_tokens_per_s": list(STATED[threads]),
        "stated_cpu": STATED_CPU,
        "equal_at_gflops": [round(stated / per_gflop, 1) for stated in STATED[threads]],
    }


def measured(threads: int, runs: int = RUNS) -> dict[str, Any]:
    """Some runs on this process's cores after one that is not counted."""
    from engine_bare_loop import BareLoop
    from rollart.config.schema import ScratchModel
    from rollart.runtime.models import build_model, hf_config, named_weights

    torch.set_num_threads(threads)
    config = hf_config(ScratchModel(layers=4, hidden=128, heads=4, kv_heads=4, ffn=344, max_positions=512), VOCAB)
    loop = BareLoop(config, named_weights(build_model(config, seed=0)), ROWS, PROMPT + NEW)
    prompts = torch.randint(0, VOCAB, (ROWS, PROMPT))
    loop.generate(prompts, NEW)
    found = []
    for _ in range(runs):
        before, started = gemm_gflops(), time.perf_counter()
        loop.generate(prompts, NEW)
        per_s = ROWS * NEW / (time.perf_counter() - started)
        found.append((per_s, (before + gemm_gflops()) / 2))
    return compared(threads, found)


def apart(threads: int, cores: Sequence[int]) -> dict[str, Any]:
    """`measured` in a process of its own, on the first of these cores, one a thread."""
    command = [sys.executable, str(Path(__file__).resolve()), "--threads", str(threads), "--cores"]
    command += [str(core) for core in cores[:threads]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, choices=sorted(STATED))
    parser.add_argument("--cores", type=int, nargs="*", help="default: the first there are")
    given = parser.parse_args()
    os.sched_setaffinity(0, given.cores or sorted(os.sched_getaffinity(0))[: given.threads])
    torch.manual_seed(0)
    sys.stdout.write(json.dumps(measured(given.threads), indent=1) + "\n")


if __name__ == "__main__":
    main()
