"""The engine on an accelerator: decode, prefill, new weights and a training step, beside transformers and the ceilings.

    PYTHONPATH=src python benchmarks/engine_on_device.py --json FILE [--device cuda] [--size 1b] [--cudnn]

Ceilings are measured in the same call: a copy on the device for memory, a copy from pinned host memory for the link, a bf16
matrix product for FLOP/s. Cases, each the ratio of what the ceiling would take to what was taken:

* `decode_of_bandwidth`: a step reads every weight and the batch's keys and values once.
* `prefill_of_flops`: two FLOP per weight and token, and causal attention's.
* `train_hand_written_step_mfu`: NOT the project's trainer, which has no path to an accelerator (its ranks talk by gloo, its
  rows are in host memory). It is a step written here around transformers' model, with the trainer's log-probabilities and
  torch's AdamW: what such a path would be held against.
* `stage_of_host_link`: a version's bytes in bf16 over the link, to staging it from fp32 in ordinary host memory, as the
  engine gets it; beside it the parts of serving a version that follow, each told apart, with all rows live.
* `rebuild_of_flops`: from the first step under new weights until every live row has sampled again.
* `generate`: tokens/s beside the best setting of transformers' `generate` that ran, in interleaved pairs. A setting that
  fails is named with its message: `static` is compiled on CUDA, which takes Triton and a C compiler with Python.h.

Each figure has all its runs, after one that is not counted. FILE is replaced whole after each case, so a call that is cut
short leaves what it has measured; peers come last. cuDNN's attention is off for both sides unless `--cudnn`: where torch
prefers it, it makes a plan for every length it has not met, and decoding has a new one at each step.

Needs torch, transformers and numpy, and `src` on PYTHONPATH where the package is not installed. The training step also needs
pydantic, with pydantic_core, annotated_types, typing_extensions and typing_inspection: without it that case says so and the
rest is measured. Sized to end within 8 minutes on an H200; `--device cpu --size tiny` tries the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig

    from engine_sides import Ours, Side, Workload, first_turns, generate, workload
    from rollart.runtime.engine.core import EngineCore
except ModuleNotFoundError as lacking:
    raise SystemExit(
        f"no module {lacking.name!r} here; this needs torch, transformers, numpy and rollart: install it, or put the "
        "checkout's src on PYTHONPATH"
    ) from lacking

REPEATS = 5
PRODUCTS = 10
"""Copies or products in one timing of a ceiling: starting the first and waiting for the last must not count."""
SIZES = {
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "positions": 4096, "vocab": 32000},
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "positions": 512, "vocab": 512},
}
ROWS, PROMPT, NEW = {"1b": 64, "tiny": 4}, {"1b": 512, "tiny": 32}, {"1b": 128, "tiny": 16}
TRAIN_ROWS = {"1b": 8, "tiny": 2}
"""Rows of prompt and new tokens in a training step: what the activations of one forward pass leave room for."""
COPY_BYTES, LINK_BYTES = {"1b": 4 << 30, "tiny": 1 << 24}, {"1b": 1 << 30, "tiny": 1 << 22}
GEMM = {"1b": 8192, "tiny": 256}
PEERS = ("dynamic", "static")
"""Kinds of cache of `generate`."""
MESSAGE_CHARS = 800

Case = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class PeerError(Exception):
    """Another library failed in its own code."""


def repeated(*runs: Callable[[], float]) -> list[list[float]]:
    """Seconds of each, interleaved, after a round that is not counted."""
    rounds = [[run() for run in runs] for _ in range(REPEATS + 1)]
    return [list(one) for one in zip(*rounds[1:], strict=True)]


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


def case(
    name: str, ratios: Sequence[float], ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Any], **more: Any
) -> Case:
    """One case; `ours` has all runs of each figure."""
    return {
        "case": name, "ratio_median": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "ratios": list(ratios), "ours": {figure: spread(runs) for figure, runs in ours.items()}, "theirs": dict(theirs),
        **more, "versions": _versions(),
    }  # fmt: skip


def without_ratio(name: str, why: str, **more: Any) -> Case:
    """A case that could not be measured, and why."""
    return {"case": name, "ratio_median": None, "failed": why, **more, "versions": _versions()}


def spread(runs: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "all": list(runs)}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return found | {"attention": "cudnn too" if cudnn else "without cudnn"}


def ceilings(device: torch.device, size: str) -> dict[str, float]:
    """Bytes/s of a copy on the device, read and write counted, and from pinned host memory; FLOP/s of a bf16 product."""
    source = torch.empty(COPY_BYTES[size] // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    host = torch.ones(LINK_BYTES[size], dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = torch.empty_like(host, device=device)
    n = GEMM[size]
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(work: Callable[[], object]) -> float:
        (runs,) = repeated(lambda: timed(device, lambda: [work() for _ in range(PRODUCTS)]))
        return statistics.median(runs) / PRODUCTS

    return {
        "bytes_per_s": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "host_to_device_bytes_per_s": host.nbytes / seconds(lambda: near.copy_(host, non_blocking=True)),
        "flop_per_s": 2 * n**3 / seconds(lambda: torch.mm(a, b, out=out)),
    }


class Cost:
    """What the model must move and compute at least."""

    def __init__(self, config: Any, weights: Tensors) -> None:
        self._config = config
        self.weight_bytes = 2 * sum(tensor.numel() for tensor in weights.values())
        # The embedding is looked up, not multiplied; the output matrix sees only tokens whose logits are wanted.
        self._inner = sum(t.numel() for name, t in weights.items() if "embed" not in name and "lm_head" not in name)

    def kv_bytes(self, tokens: float) -> float:
        config = self._config
        return float(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens)

    def forward_flop(self, lengths: Sequence[int], scored: int) -> float:
        """Of whole sequences with logits of `scored` tokens; of attention's two products the causal half counts."""
        config = self._config
        scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * sum(n * n for n in lengths)
        return float(2 * self._inner * sum(lengths) + 2 * scores + 2 * config.vocab_size * config.hidden_size * scored)


def served(
    core: EngineCore, work: Workload, device: torch.device, cost: Cost, top: Mapping[str, float]
) -> Iterator[Case]:
    """Decoding with all rows live, in the middle of their turns, and reading their prompts."""
    ours, one = Ours(core), replace(work, new=np.ones_like(work.new))
    whole, prefill = repeated(lambda: timed(device, lambda: ours(work)), lambda: timed(device, lambda: ours(one)))
    steps, prompt, new = int(work.new.max()) - 1, len(work.prompts[0]), int(work.new.max())
    step = [(all_of - start) / steps for all_of, start in zip(whole, prefill, strict=True)]
    least_s = (cost.weight_bytes + cost.kv_bytes(work.rows * (prompt + new / 2))) / top["bytes_per_s"]
    figures = {
        "step_s": step,
        "whole_s": whole,
        "prefill_s": prefill,
        "tokens_per_s": [work.n_tokens / s for s in whole],
    }
    yield case("decode_of_bandwidth", [least_s / s for s in step], figures, top)
    least_s = cost.forward_flop([prompt] * work.rows, work.rows) / top["flop_per_s"]
    yield case("prefill_of_flops", [least_s / s for s in prefill], {"prefill_s": prefill}, top)


def applied(
    core: EngineCore, weights: Tensors, work: Workload, device: torch.device, cost: Cost, top: Mapping[str, float]
) -> Iterator[Case]:
    """A version a time into an engine whose rows are all live; they go on sampling under it."""
    requests = first_turns(work, run=0)
    core.submit(requests)
    _until_all_sample(core, dict.fromkeys(range(work.rows), -1), work.rows)
    found: dict[str, list[float]] = {}
    least: list[float] = []
    for repeat in range(REPEATS + 1):
        lengths = [len(work.prompts[0]) + n for n in _sampled(core).values()]
        seconds = _one_version(core, weights, device, work.rows)
        if repeat:
            least.append(cost.forward_flop(lengths, work.rows) / top["flop_per_s"])
            for part, took in seconds.items():
                found.setdefault(part, []).append(took)
    core.abort([request.id for request in requests])
    core.step()
    for request in requests:
        core.forget(request.id.traj, 0)
    least_s = cost.weight_bytes / top["host_to_device_bytes_per_s"]
    yield case("stage_of_host_link", [least_s / s for s in found["stage_s"]], found, top)
    rebuilt = {part: found[part] for part in ("first_step_s", "rebuild_s")}
    yield case("rebuild_of_flops", [a / b for a, b in zip(least, found["rebuild_s"], strict=True)], rebuilt, top)


def _one_version(core: EngineCore, weights: Tensors, device: torch.device, rows: int) -> dict[str, float]:
    """`stage_s`: host to device, nothing is sampled meanwhile by this thread; `apply_s`: exchanging the versions;
    `fingerprint_s`: reading them back; `first_step_s`; `rebuild_s`: that step and all until every row has sampled."""
    version, before = core.version + 1, _sampled(core)
    seconds = {
        "stage_s": timed(device, lambda: core.stage(version, weights)),
        "apply_s": timed(device, lambda: core.apply(version)),
        "fingerprint_s": timed(device, core.fingerprint),
        "first_step_s": timed(device, core.step),
    }
    rest_s = timed(device, lambda: _until_all_sample(core, before, rows))
    return seconds | {"rebuild_s": seconds["first_step_s"] + rest_s}


def _sampled(core: EngineCore) -> dict[Any, int]:
    """Tokens that each request has sampled."""
    return {row[:4]: row[4] for row in core.progress()}


def _until_all_sample(core: EngineCore, before: Mapping[Any, int], rows: int) -> None:
    while sum(n > before.get(id_, 0) for id_, n in _sampled(core).items()) < rows:
        core.step()
        if core.live_count + core.waiting_count < rows:
            raise RuntimeError(
                f"a row of {rows} ended while weights were exchanged; give the rows more tokens to sample"
            )


def train(model: Any, device: torch.device, size: str, cost: Cost, top: Mapping[str, float]) -> Case:
    """A training step around transformers' model: bf16 autocast over fp32 weights, the trainer's log-probabilities, AdamW.

    Model FLOP/s over those of the bf16 product. Backward is twice forward; what is computed twice counts once."""
    name = "train_hand_written_step_mfu"
    try:
        from rollart.runtime.trainer.policy import token_logprobs
    except ModuleNotFoundError as lacking:
        return without_ratio(name, f"no module {lacking.name!r} here, which the trainer's log-probabilities import")
    config, rows, prompt, new = model.config, TRAIN_ROWS[size], PROMPT[size], NEW[size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    ids = torch.randint(0, config.vocab_size, (rows, prompt + new), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        trained = hidden[:, prompt - 1 : -1].reshape(-1, config.hidden_size).float()
        logprobs, _ = token_logprobs(trained, model.lm_head.weight, ids[:, prompt:].reshape(-1), 1.0, False)
        torch.autograd.backward(-logprobs.mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    (runs,) = repeated(lambda: timed(device, step))
    flop = 3 * cost.forward_flop([prompt + new] * rows, rows * new)
    figures = {"step_s": runs, "tokens_per_s": [rows * (prompt + new) / s for s in runs]}
    return case(name, [flop / s / top["flop_per_s"] for s in runs], figures, top, flop=flop)


def beside(ours: Side, theirs: Mapping[str, Side], work: Workload) -> Iterator[Case]:
    """The case `generate`, anew after each setting of theirs: one that hangs takes nothing with it."""
    ran: dict[str, list[list[float]]] = {}
    failed: dict[str, str] = {}
    for setting, side in theirs.items():
        try:
            ran[setting] = repeated(lambda: ours(work), lambda side=side: _theirs(side, work))  # type: ignore[misc]
        except PeerError as error:
            failed[setting] = str(error)
        if not ran:
            yield without_ratio("generate", "no setting of generate ran", theirs={"failed": failed})
            continue
        best = min(ran, key=lambda one: statistics.median(ran[one][1]))
        mine, other = ran[best]
        rates = {one: {"whole_s": spread(runs[1]), "tokens_per_s": work.n_tokens / statistics.median(runs[1])}
                 for one, runs in ran.items()}  # fmt: skip
        figures = {"whole_s": mine, "tokens_per_s": [work.n_tokens / s for s in mine]}
        ratios = [a / b for a, b in zip(other, mine, strict=True)]
        yield case("generate", ratios, figures, {"setting": best, "sweep": rates, "failed": failed})


def _theirs(side: Side, work: Workload) -> float:
    try:
        return side(work)
    # boundary: another library's code, which compiles by a machine's tools; what it raises is this setting's result
    except Exception as error:
        raise PeerError(f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]) from error


def measure(device: torch.device, size: str) -> Iterator[Case]:
    shape, rows, prompt, new = SIZES[size], ROWS[size], PROMPT[size], NEW[size]
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        head_dim=shape["hidden"] // shape["heads"], max_position_embeddings=shape["positions"], tie_word_embeddings=True,
        initializer_range=shape["hidden"] ** -0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    model.train(mode=False)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    work = workload(
        vocab=shape["vocab"], rows=rows, group=1, prompt=prompt, turns=1, observation=0, new=new, ragged=False
    )
    top, cost = ceilings(device, size), Cost(config, weights)
    core = EngineCore(
        config, max_live=rows, kv_tokens=2 * rows * (prompt + new), prefill_tokens=8192, dtype=torch.bfloat16, device=device
    )  # fmt: skip
    core.load(0, weights)
    yield from served(core, work, device, cost, top)
    yield train(model.to(device), device, size, cost, top)
    yield from applied(core, weights, work, device, cost, top)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    peer = model.to(torch.bfloat16)
    engine = Ours(core)
    theirs = {kind: _on(device, generate(peer, kind, reuse=False)) for kind in PEERS}
    yield from beside(_on(device, engine), theirs, work)


def _on(device: torch.device, side: Side) -> Side:
    """The side, timed until the device is done."""
    return lambda work: timed(device, lambda: side(work))


def record(path: Path, found: Mapping[str, Any]) -> None:
    """Replace the file whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    os.replace(part, path)


def recorded(path: Path, head: Mapping[str, Any], cases: Iterator[Case]) -> dict[str, Case]:
    """Cases by name; the file has them after each, with the seconds it took. A case that comes again takes its own place."""
    found: dict[str, Case] = {}
    started = time.perf_counter()
    for one in cases:
        before = found.get(one["case"], {"took_s": 0.0})["took_s"]
        found[one["case"]] = one | {"took_s": round(before + time.perf_counter() - started, 2)}
        started = time.perf_counter()
        record(path, {**head, "cases": list(found.values())})
        ratios = [one.get(f"ratio_{which}") for which in ("median", "min", "max")]
        sys.stdout.write(f"{one['case']}: {one.get('failed') or ratios}\n")
        sys.stdout.flush()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--cudnn", action="store_true", help="leave cuDNN's attention on")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here; try the script with --device cpu --size tiny")
    if importlib.util.find_spec("pydantic") is None:
        sys.stderr.write(
            "no module 'pydantic' here: the training step will not be measured (see --help); the rest will\n"
        )
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(given.cudnn)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = recorded(
        given.json,
        {"name": "engine_on_device", "device": name, "size": given.size},
        measure(device, given.size),
    )
    return int(any(one["ratio_median"] is None for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
