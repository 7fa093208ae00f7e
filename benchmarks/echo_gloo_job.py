"""What `echo_gloo.py` predicts and then measures: one small Llama, three ways to train it on two processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rollart.perf.train_plan import Framework, TrainingPlan

WORLD = 2
Way = Literal["data", "tensor", "pipeline"]
WAYS: tuple[Way, ...] = ("data", "tensor", "pipeline")
DTYPE = "fp32"
FP32_BYTES = 4
ADAM_BYTES = 28.0
"""One fused pass in fp32: reads weight, gradient and two moments, writes all but the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model and the batch, in sequences and tokens; every width divides by the ranks."""

    layers: int = 4
    hidden: int = 384
    heads: int = 6
    ffn: int = 1024
    vocab: int = 2048
    sequence: int = 256
    micro_batch: int = 2
    global_batch: int = 8

    @property
    def layer_bytes(self) -> int:
        """Of one layer's weights."""
        return FP32_BYTES * self.hidden * (4 * self.hidden + 3 * self.ffn)


FULL = Size()
"""A step of 0.3 to 1 s on one core each, so that Python's share is small and communication is still seen."""
TINY = Size(layers=2, hidden=64, heads=4, ffn=128, vocab=256, sequence=32, global_batch=8)
"""For tests of the machinery; its figures mean nothing."""


def llama_config(size: Size) -> dict[str, Any]:
    """A transformers `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": size.layers,
        "hidden_size": size.hidden, "num_attention_heads": size.heads, "num_key_value_heads": size.heads,
        "intermediate_size": size.ffn, "vocab_size": size.vocab, "max_position_embeddings": size.sequence,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def write_config(size: Size, folder: Path) -> Path:
    """The config as a file, as users hand it to `rollart trace`."""
    path = folder / "config.json"
    path.write_text(json.dumps(llama_config(size), indent=1), encoding="utf-8")
    return path


def plan(way: Way, size: Size) -> TrainingPlan:
    """Two ranks, all in one direction."""
    dp, tp, pp = (WORLD if way == each else 1 for each in WAYS)
    return TrainingPlan(
        devices=WORLD, micro_batch=size.micro_batch, global_batch=size.global_batch, sequence=size.sequence, dtype=DTYPE,
        dp=dp, tp=tp, pp=pp,
    )  # fmt: skip


def framework() -> Framework:
    """Eager torch in fp32: fused attention and optimizer, DDP beside the backward, no graphs."""
    return Framework(attention="flash2", loss="torch", grad_bytes=FP32_BYTES, optimizer_bytes=ADAM_BYTES)


def as_size(numbers: Mapping[str, int]) -> Size:
    return Size(**numbers)


def numbers(size: Size) -> dict[str, int]:
    return asdict(size)
