"""The engine on an accelerator: decode, prefill, weight apply and a training step, beside transformers and the ceilings.

    python benchmarks/engine_on_device.py --json FILE [--device cuda] [--size 1b]

The ceilings are measured in the same call: a copy of a large tensor for memory bandwidth, a bf16 matrix product for FLOP/s.
A decode step reads every weight and the batch's keys and values once; prefill does two FLOP per weight and token, a training
step six, and attention's beside. Weights come from host memory:
`stage` brings a version near while the served one samples, `apply` is what stands still. Each figure is the median of `REPEATS`
runs after one that is not counted. Sized to end within 8 minutes; `--device cpu --size tiny` tries
the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine_sides import Ours, Workload, generate, workload
from rollart.config.schema import ScratchModel
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.trainer.policy import token_logprobs

REPEATS = 5
SIZES = {
    "1b": ScratchModel(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, max_positions=4096),
    "tiny": ScratchModel(layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, max_positions=512),
}
VOCAB = {"1b": 32000, "tiny": 512}
ROWS, PROMPT, NEW = {"1b": 64, "tiny": 4}, {"1b": 512, "tiny": 32}, {"1b": 128, "tiny": 8}
TRAIN_ROWS = {"1b": 8, "tiny": 2}
"""Rows of prompt and new tokens in a training step: what the activations of one forward pass leave room for."""
COPY_BYTES = {"1b": 4 << 30, "tiny": 1 << 24}
GEMM = {"1b": 8192, "tiny": 256}


def median_s(run: Callable[[], float]) -> float:
    run()
    return statistics.median(run() for _ in range(REPEATS))


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until the device is done."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(device: torch.device, size: str) -> dict[str, float]:
    """Bytes/s of a copy, read and write counted, and FLOP/s of a bf16 product."""
    source = torch.empty(COPY_BYTES[size] // 2, dtype=torch.bfloat16, device=device).zero_()
    target = torch.empty_like(source)
    copy_s = median_s(lambda: timed(device, lambda: target.copy_(source)))
    n = GEMM[size]
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm_s = median_s(lambda: timed(device, lambda: a @ b))
    return {"bytes_per_s": 2 * source.nbytes / copy_s, "flop_per_s": 2 * n**3 / gemm_s}


def decode(core: EngineCore, work: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of one decoding step with all rows live, in the middle of their turns."""
    ours = Ours(core)
    whole_s = median_s(lambda: timed(device, lambda: ours(work)))
    one = Workload(prompts=work.prompts, new=np.ones_like(work.new), observations=work.observations, group=work.group)
    prefill_s = median_s(lambda: timed(device, lambda: ours(one)))
    steps = int(work.new.max()) - 1
    return {"whole_s": whole_s, "prefill_s": prefill_s, "step_s": (whole_s - prefill_s) / steps}


def apply_s(core: EngineCore, weights: dict[str, torch.Tensor], device: torch.device) -> dict[str, float]:
    """Staging a version from host memory, serving it, and reading its fingerprint back; a version each time."""
    stages, applies = list[float](), list[float]()
    for _ in range(REPEATS + 1):
        stages.append(timed(device, lambda: core.stage(core.version + 1, weights)))
        applies.append(timed(device, lambda: core.apply(core.version + 1)))
    return {
        "stage_s": statistics.median(stages[1:]),
        "apply_s": statistics.median(applies[1:]),
        "fingerprint_s": timed(device, core.fingerprint),
    }


def train(device: torch.device, size: str, top: dict[str, float]) -> dict[str, Any]:
    """A training step: the model under bf16 autocast with fp32 weights, the trainer's log-probabilities, AdamW.

    Model FLOP/s over those of the bf16 product. (The trainer's own packing of rows is made for CPUs.)"""
    config, rows, prompt, new = hf_config(SIZES[size], VOCAB[size]), TRAIN_ROWS[size], PROMPT[size], NEW[size]
    model: Any = build_model(config, seed=0)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    ids = torch.randint(0, VOCAB[size], (rows, prompt + new), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state
        trained = hidden[:, prompt - 1 : -1].reshape(-1, config.hidden_size).float()
        logprobs, _ = token_logprobs(trained, model.lm_head.weight, ids[:, prompt:].reshape(-1), 1.0, False)
        torch.autograd.backward(-logprobs.mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step_s = median_s(lambda: timed(device, step))
    tokens = rows * (prompt + new)
    inner = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    head = VOCAB[size] * config.hidden_size * rows * new
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * rows * (prompt + new) ** 2
    # Backward is twice forward. Of attention's two products the causal half counts. What is computed twice counts once.
    flop = 6 * inner * tokens + 6 * head + 6 * scores
    figures = {"step_s": step_s, "tokens_per_s": tokens / step_s, "flop": float(flop)}
    return _case("train_mfu", flop / step_s / top["flop_per_s"], figures, top)


def measure(device: torch.device, size: str) -> dict[str, Any]:
    config = hf_config(SIZES[size], VOCAB[size])
    model = build_model(config, seed=0)
    weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    rows, prompt, new = ROWS[size], PROMPT[size], NEW[size]
    work = workload(vocab=VOCAB[size], rows=rows, group=1, prompt=prompt, turns=1, observation=0, new=new, ragged=False)
    top = ceilings(device, size)
    core = EngineCore(
        config,
        max_live=rows,
        kv_tokens=2 * rows * (prompt + new),
        prefill_tokens=8192,
        dtype=torch.bfloat16,
        device=device,
    )
    core.load(0, weights)
    ours = decode(core, work, device)
    applied = apply_s(core, weights, device)
    core.sleep()
    peer: Any = model
    peer = peer.to(device, torch.bfloat16)
    theirs = {
        kind: median_s(lambda kind=kind: timed(device, lambda: generate(peer, kind, reuse=False)(work)))  # type: ignore[misc]
        for kind in ("dynamic", "static")
    }
    weight_bytes = 2 * sum(tensor.numel() for tensor in weights.values())
    kv_bytes = 2 * 2 * core.shape.layers * core.shape.kv_heads * core.shape.head_dim * rows * (prompt + new // 2)
    # The embedding is looked up, not multiplied; the output matrix sees the last token of each prompt only.
    inner = sum(t.numel() for name, t in weights.items() if "embed" not in name and "lm_head" not in name)
    best = min(theirs.values())
    cases = [
        _case("decode_of_bandwidth", (weight_bytes + kv_bytes) / top["bytes_per_s"] / ours["step_s"], ours, top),
        _case("prefill_of_flops", 2 * inner * rows * prompt / top["flop_per_s"] / ours["prefill_s"], ours, top),
        _case("generate", best / ours["whole_s"], ours | {"tokens_per_s": work.n_tokens / ours["whole_s"]}, theirs),
        _case("apply", weight_bytes / top["bytes_per_s"] / applied["stage_s"], applied, top),
    ]
    peer.to("cpu")
    cases.append(train(device, size, top))
    return {"name": "engine_on_device", "device": _name(device), "size": size, "cases": cases}


def _case(name: str, ratio: float, ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"case": name, "ratio_median": round(ratio, 4), "ours": ours, "theirs": theirs, "versions": versions}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here; try the script with --device cpu --size tiny")
    found = measure(torch.device(given.device), given.size)
    given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for case in found["cases"]:
        print(case["case"], case["ratio_median"])  # noqa: T201


if __name__ == "__main__":
    main()
