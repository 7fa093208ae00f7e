"""Steps of one device, predicted from its profile and then measured: six of training, six of decoding.

python benchmarks/predict_on_device.py --json FILE [--device cuda] [--size large] [--minutes 3] [--profile FILE]

The profile is the grid of `rollart profile-device`, which knows none of the cases; a training step is traced, priced and
composed as `rollart trace` does it, a decoding step is the operators that the model calls, priced one by one. All
predictions are made, and their digest taken, before anything is measured. Training: bf16 weights with fp32 masters,
AdamW, the norm clipped, eager. Decoding: transformers with a static cache, replayed from a CUDA graph, so that the device
and not Python is timed. Measured figures are medians of `REPEATS` steps. Sized to end within 8 minutes; `--device cpu
--size tiny` tries the script.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from rollart.optrace.assemble import compose_step
from rollart.optrace.capture import capture
from rollart.optrace.costs import Pricer
from rollart.optrace.kernels import base_name, work
from rollart.optrace.ops import Op, Priced
from rollart.optrace.profiling.device import profile_device, torch_device
from rollart.optrace.sources import Source
from rollart.optrace.transforms import derived
from rollart.perf.configs import shape_from_config
from rollart.perf.device_profile import DeviceProfile, read_profile
from rollart.perf.links import fabric
from rollart.perf.train_calibration import calibration
from rollart.perf.train_plan import FUSED_ADAM_BYTES, Framework, TrainingPlan

REPEATS = 5
PLACES = 32
"""Free places in the cache: each step that is run takes one."""
LEARNING_RATE = 1e-6
EAGER = Framework(attention="flash2", loss="torch", optimizer_bytes=FUSED_ADAM_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama by its sizes, with `rows` sequences of `tokens`: trained on, or in the cache when one more is decoded."""

    kind: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    rows: int
    tokens: int
    vocab: int = 32000

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layers}x{self.hidden} {self.rows}x{self.tokens}"

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab, "tie_word_embeddings": False,
            "max_position_embeddings": 2 * self.tokens, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds of a step, and the share of them by what they rest on."""

    seconds: float
    provenance: dict[str, float]
    operators: int
    notes: tuple[str, ...] = field(default=())


MODELS: dict[str, tuple[dict[str, int], ...]] = {
    "large": (
        {"layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8},
        {"layers": 12, "hidden": 3072, "ffn": 8192, "heads": 24, "kv_heads": 8},
        {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8},
    ),
    "tiny": (
        {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "vocab": 128},
        {"layers": 3, "hidden": 64, "ffn": 192, "heads": 4, "kv_heads": 2, "vocab": 128},
        {"layers": 2, "hidden": 96, "ffn": 128, "heads": 6, "kv_heads": 6, "vocab": 96},
    ),
}  # fmt: skip
LOADS = {
    "large": {"train": ((8, 1024), (2, 4096)), "decode": ((16, 1024), (64, 2048))},
    "tiny": {"train": ((4, 32), (2, 64)), "decode": ((4, 32), (8, 64))},
}
"""(rows, tokens) that each model is run with."""


def cases(size: str) -> list[Case]:
    """Six of each kind."""
    return [
        Case(kind=kind, rows=rows, tokens=tokens, **model)
        for kind in ("train", "decode") for model in MODELS[size] for rows, tokens in LOADS[size][kind]
    ]  # fmt: skip


# ---- prediction


def pricer_of(profile: DeviceProfile, plan: TrainingPlan) -> Pricer:
    return Pricer(
        device=profile.device, fabric=fabric(profile.device.name), law=calibration()[0].law, framework=EAGER, plan=plan,
        profile=profile,
    )  # fmt: skip


def plan_of(case: Case, dtype: str) -> TrainingPlan:
    return TrainingPlan(devices=1, micro_batch=case.rows, global_batch=case.rows, sequence=case.tokens, dtype=dtype)


def predict_training(case: Case, profile: DeviceProfile, dtype: str) -> Predicted:
    plan = plan_of(case, dtype)
    source = Source(
        name=case.name, kind="causal_lm", shape=shape_from_config(case.config, case.name), config=case.config
    )
    trace = derived(capture(source, plan, framework=EAGER), plan, EAGER)
    pricer = pricer_of(profile, plan)
    step = compose_step(
        trace, plan, pricer.price, framework=EAGER, hidden=pricer.hidden_share, host=pricer, fabric=pricer.fabric, level=0
    )  # fmt: skip
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    ops = [op for part in parts for op in (*part.forward, *part.backward, *part.optimizer)]
    return _predicted(step.step_s, [*ops, *trace.step], pricer, trace.notes)


def predict_decoding(ops: Sequence[Op], case: Case, profile: DeviceProfile, dtype: str) -> Predicted:
    """The operators one after the other; a graph leaves no gaps, a CPU's calls are in the operators' own times."""
    pricer = pricer_of(profile, plan_of(case, dtype))
    return _predicted(sum(pricer.price(op).seconds for op in ops), ops, pricer, ())


def _predicted(seconds: float, ops: Sequence[Op], pricer: Pricer, notes: tuple[str, ...]) -> Predicted:
    found: list[Priced] = [pricer.price(op) for op in ops]
    whole = sum(one.seconds for one in found)
    shares = Counter[str]()
    for one in found:
        shares[one.provenance] += one.seconds / whole  # type: ignore[assignment]
    rounded = {name: round(float(share), 4) for name, share in shares.items()}
    return Predicted(seconds=seconds, provenance=rounded, operators=len(ops), notes=notes)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        asked = work(func, args, kwargs or {}, out)
        if asked is not None:
            self.ops.append(
                Op(
                    id=len(self.ops), name=base_name(func), kind=asked.kind, shape=asked.shape, dtype=asked.dtype,
                    flops=asked.flops, moved_bytes=asked.moved_bytes,
                )
            )  # fmt: skip
        return out


# ---- measurement


def built(case: Case, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with random weights, made on the device."""
    config = AutoConfig.for_model(**case.config)
    maker: Any = AutoModelForCausalLM
    with torch.device(device):
        return maker.from_config(config, dtype=dtype, attn_implementation="sdpa")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(call: Callable[[], object], device: torch.device) -> tuple[float, list[float]]:
    """Of `REPEATS` calls after two that are not counted."""
    taken = []
    for number in range(REPEATS + 2):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        if number >= 2:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken), taken


def training_step(case: Case, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Forward, backward, clip, AdamW on fp32 masters, as `optrace.live_step` traces it."""
    model = built(case, device, dtype)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [torch.nn.Parameter(w.detach().float()) if dtype != torch.float32 else w for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    ids, targets = (torch.randint(0, case.vocab, (case.rows, case.tokens), device=device) for _ in range(2))

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits
        loss: Any = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                gradient = weight.grad
                assert gradient is not None
                master.grad = gradient.to(master.dtype)
            gradients = [master.grad for master in masters if master.grad is not None]
            factor = torch.clamp(1.0 / (get_total_norm(gradients) + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, factor)
            optimizer.step()
            for weight, master in zip(weights, masters, strict=True):
                if weight is not master:
                    weight.copy_(master)
                weight.grad = None

    return step


def decoding_step(case: Case, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One more token for every row, with a full cache."""
    model = built(case, device, dtype)
    model.eval()
    cache = StaticCache(config=model.config, max_cache_len=case.tokens + PLACES)
    ids = torch.randint(0, case.vocab, (case.rows, case.tokens), device=device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    one = ids[:, :1].contiguous()
    place = torch.tensor([[case.tokens]], device=device)
    seen = torch.ones(
        1, 1, 1, case.tokens + PLACES, dtype=torch.bool, device=device
    )  # given, so that no host asks for it

    @torch.no_grad()
    def step() -> object:
        return model(input_ids=one, past_key_values=cache, position_ids=place, attention_mask=seen).logits

    return step


def graphed(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The step as a replay of a CUDA graph; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def watched(case: Case, device: torch.device, dtype: torch.dtype) -> list[Op]:
    """The operators of one decoding step, run once to see them; its time is not taken."""
    step = decoding_step(case, device, dtype)
    step()
    watch = Watch()
    with watch:
        step()
    del step
    release(device)
    return watch.ops


def run(given: argparse.Namespace) -> dict[str, Any]:
    device = torch_device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the profile is measured
    dtype, plain = (torch.bfloat16, "bf16") if device.type == "cuda" else (torch.float32, "fp32")
    path = given.profile or given.json.with_suffix(".profile.json")
    if given.profile:
        profile = read_profile(path)
    else:
        profile = profile_device(
            path, device=given.device, minutes=given.minutes, ranks=0, grid="tiny" if given.size == "tiny" else ""
        )  # fmt: skip
    wanted = cases(given.size)
    predicted = {
        case.name: predict_training(case, profile, plain) if case.kind == "train"
        else predict_decoding(watched(case, device, dtype), case, profile, plain)
        for case in wanted
    }  # fmt: skip
    said = json.dumps({name: asdict(one) for name, one in predicted.items()}, sort_keys=True)
    rows: list[dict[str, Any]] = []
    for case in wanted:
        step = training_step(case, device, dtype) if case.kind == "train" else None
        step = step or graphed(decoding_step(case, device, dtype), device)
        measured_s, all_s = median_s(step, device)
        one = predicted[case.name]
        rows.append({
            "case": case.name, "kind": case.kind, "predicted_s": one.seconds, "measured_s": measured_s, "all_s": all_s,
            "error": one.seconds / measured_s - 1.0, "provenance": one.provenance, "operators": one.operators,
        })  # fmt: skip
        del step
        release(device)
    errors = {
        kind: math.fsum(abs(row["error"]) for row in rows if row["kind"] == kind) / 6 for kind in ("train", "decode")
    }
    return {
        "name": "predict_on_device", "device": profile.device.name, "size": given.size,
        "versions": dict(profile.origin.versions),
        "predictions_blake2b": hashlib.blake2b(said.encode(), digest_size=16).hexdigest(),
        "mean_abs_err": errors, "cases": rows,
        "profile_notes": list(profile.notes), "operators_in_profile": len(profile.ops),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(MODELS), default="large")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the profile")
    parser.add_argument("--profile", type=Path, help="use this profile instead of measuring one")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here; try the script with --device cpu --size tiny")
    found = run(given)
    given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for row in found["cases"]:
        print(  # noqa: T201
            f"{row['case']:28} predicted {row['predicted_s'] * 1e3:9.3f} ms  measured {row['measured_s'] * 1e3:9.3f} ms  "
            f"error {row['error']:+.1%}  {row['provenance']}"
        )
    print({kind: f"{error:.1%}" for kind, error in found["mean_abs_err"].items()})  # noqa: T201


if __name__ == "__main__":
    main()
