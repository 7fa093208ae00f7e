"""The engine's core beside a bare decode loop and beside other engines: tokens/s of 64 concurrent multi-turn trajectories.

    python benchmarks/engine.py --json FILE [--smol FOLDER] [--pairs 5] [--threads 1]

`loop_*`: against `engine_bare_loop.py`. `tiny_*` (0.92 M Llama, fp32) and `smol_*` (SmolLM2, bf16, where its folder is given):
against transformers `generate` in the best of a sweep of its caches. A ratio is that of one interleaved pair; the order within
pairs alternates. A matrix product timed beside every run says what the machine gave at that moment. `other_peers` is where an
engine of another environment plugs in.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from engine_sides import Ours, Side, Workload, bare, generate, workload
from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, hf_config, named_weights

TINY = ScratchModel(layers=4, hidden=128, heads=4, kv_heads=4, ffn=344, max_positions=512)
TINY_VOCAB = 512
DIFFERENCES = {
    "loop": "the engine also admits, ends and answers requests and computes a group's prompt once; the loop does all prompts",
    "generate": "the engine also returns log-probabilities and computes a group's prompt once; generate does neither",
}
Case = dict[str, Any]


def gemm_gflops() -> float:
    """What one fp32 matrix product of 512 x 512 gives now."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * 512**3 / best / 1e9


class Run(NamedTuple):
    """One run of a side."""

    per_s: float
    """Tokens/s."""
    per_cpu_s: float
    """Tokens per second of this process's CPU time: what other load on the machine does not take away."""
    gflops: float
    """Of the matrix product around it."""


def rated(side: Side, work: Workload) -> Run:
    before, cpu_s = gemm_gflops(), time.process_time()
    seconds = side(work)
    cpu_s = time.process_time() - cpu_s
    return Run(work.n_tokens / seconds, work.n_tokens / cpu_s, (before + gemm_gflops()) / 2)


def measured(name: str, work: Workload, ours: Side, theirs: Mapping[str, Side], pairs: int, differs: str) -> Case:
    """One case: a sweep of their settings (a warm run and a timed one each), then interleaved pairs with the best one."""
    sweep = {}
    for setting, side in theirs.items():
        side(work)
        sweep[setting] = round(work.n_tokens / side(work), 1)
    best = max(sweep, key=lambda setting: sweep[setting])
    ours(work)
    rows = {"ours": list[Run](), "theirs": list[Run]()}
    sides = [("ours", ours), ("theirs", theirs[best])]
    for pair in range(pairs):
        for who, side in sides if pair % 2 == 0 else reversed(sides):
            rows[who].append(rated(side, work))
    couples = list(zip(rows["ours"], rows["theirs"], strict=True))
    ratios = [a.per_s / b.per_s for a, b in couples]
    return {
        "case": name,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_ratio_median": round(statistics.median(a.per_cpu_s / b.per_cpu_s for a, b in couples), 3),
        "ours": _figures(rows["ours"]),
        "theirs": _figures(rows["theirs"]) | {"setting": best, "sweep_tokens_per_s": sweep},
        "tokens": work.n_tokens,
        "differs": differs,
        "versions": versions(),
    }


def _figures(runs: list[Run]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(statistics.median(run.per_s for run in runs), 1),
        "tokens_per_s_all": [round(run.per_s, 1) for run in runs],
        "tokens_per_cpu_s": round(statistics.median(run.per_cpu_s for run in runs), 1),
        "gemm_gflops": round(statistics.median(run.gflops for run in runs), 2),
        "tokens_per_gflop": round(statistics.median(run.per_s / run.gflops for run in runs), 2),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()),
    }


def engine_of(config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> EngineCore:
    core = EngineCore(config, max_live=64, kv_tokens=64 * 512, prefill_tokens=4096, dtype=dtype)
    core.load(0, weights)
    return core


def transformers_sides(model: Any, work: Workload) -> dict[str, Side]:
    """The settings of `generate` that can run the workload."""
    ways = [True, False] if work.lockstep else [False]
    return {
        f"{kind}{', cache kept over turns' if reuse else ''}": generate(model, kind, reuse=reuse)
        for kind in ("dynamic", "static")
        for reuse in ways
    }


def other_peers(model: Any, work: Workload) -> dict[str, Side]:
    """Engines beside transformers: name of a setting -> its side. An engine that needs an environment of its own adds a side
    here that hands the workload to its process and returns the seconds that it reports."""
    return {}


def tiny_cases(pairs: int, wanted: Callable[[str], bool]) -> list[Case]:
    config = hf_config(TINY, TINY_VOCAB)
    model = build_model(config, seed=0)
    weights = named_weights(model)
    sizes = {"vocab": TINY_VOCAB, "rows": 64, "prompt": 64}
    single = workload(**sizes, group=1, turns=1, observation=0, new=64, ragged=False)
    turns = workload(**sizes, group=8, turns=4, observation=16, new=24, ragged=False)
    ragged = workload(**sizes, group=8, turns=4, observation=16, new=24, ragged=True)
    ours = Ours(engine_of(config, weights, torch.float32))
    loop = {"bare loop": bare(config, weights)}
    cases = []
    for name, work in (("loop_single", single), ("loop_turns", turns)):
        if wanted(name):
            cases.append(measured(name, work, ours, loop, pairs, DIFFERENCES["loop"]))
    for name, work in (("tiny_turns", turns), ("tiny_ragged", ragged)):
        if wanted(name):
            theirs = transformers_sides(model, work) | other_peers(model, work)
            cases.append(measured(name, work, ours, theirs, pairs, DIFFERENCES["generate"]))
    return cases


def smol_cases(folder: str, pairs: int, wanted: Callable[[str], bool]) -> list[Case]:
    spec = PretrainedModel(kind="pretrained", path=folder)
    config = hf_config(spec, 0)
    model = build_model(config, seed=0, weights=folder)
    ours = Ours(engine_of(config, named_weights(model), torch.bfloat16))
    model = model.bfloat16()
    work = workload(vocab=config.vocab_size, rows=64, group=8, prompt=64, turns=2, observation=16, new=16, ragged=False)
    if not wanted("smol_turns"):
        return []
    theirs = transformers_sides(model, work) | other_peers(model, work)
    return [measured("smol_turns", work, ours, theirs, pairs, DIFFERENCES["generate"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--smol", help="a folder with SmolLM2 in the Hugging Face layout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name begins like this")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    def wanted(name: str) -> bool:
        return bool(name.startswith(given.only))

    cases = tiny_cases(given.pairs, wanted)
    if given.smol and wanted("smol_turns"):
        cases += smol_cases(given.smol, given.pairs, wanted)
    given.json.write_text(json.dumps({"name": "engine", "cases": cases}, indent=1), encoding="utf-8")
    for case in cases:
        ours, theirs = case["ours"]["tokens_per_s"], case["theirs"]["tokens_per_s"]
        print(  # noqa: T201
            f"{case['case']}: {case['ratio_median']} ({case['ratio_min']} .. {case['ratio_max']}; by CPU time "
            f"{case['cpu_ratio_median']}), {ours} against {theirs} tokens/s, {case['theirs']['setting']}"
        )


if __name__ == "__main__":
    main()
