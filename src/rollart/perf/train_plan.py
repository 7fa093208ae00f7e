"""What a training step is asked to be: degrees, batch, precision, recomputation, and what the framework does by
itself.

Owns `TrainingPlan`, `Framework` and the table of frameworks. Invariant: the degrees of a valid plan multiply to its
devices and its batch divides into whole micro-batches. Why: everything that may differ between two runs on the same
devices is a field here, so that a prediction depends on nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.perf.pipeline import Schedule

FUSED_ADAM_BYTES = 38.0
"""One kernel reads an fp32 weight, two moments and a gradient and writes the first three and a 16-bit weight (30
bytes); the norm clip and the loss-scale check read the gradients once more each."""
LOOPED_ADAM_BYTES = 100.0
"""The same tensor by tensor in fp32: decay 8, moments 20 and 24, denominator 24, update 16, norm clip 8 bytes."""
Recompute = Literal["none", "selective", "full"]
Attention = Literal["scores", "flash1", "flash2", "flash3"]
Loss = Literal["passes", "torch", "fused"]
FLASH_FRACTION = {
    ("flash1", "ampere"): 0.33, ("flash1", "hopper"): 0.18,
    ("flash2", "ampere"): 0.60, ("flash2", "hopper"): 0.36, ("flash3", "ampere"): 0.60, ("flash3", "hopper"): 0.60,
    ("flash3", "blackwell"): 0.55, ("flash2", "blackwell"): 0.40,
}  # fmt: skip
"""Share of the 16-bit peak, causal forward, heads of 128, 16 k tokens: FlashAttention-2 figures 4 to 7 and table 1
(A100: first version 100 to 115 of 312, second 190; H100: 350 of 989, the first about half of it), FlashAttention-3
figure 5 (H100 600 to 650), cuDNN 9 on B200 (1,200 to 1,300 of 2,250). Public tables."""
FULL_HEAD_DIM = 128
"""Heads narrower than this leave part of the tensor cores idle (FlashAttention-2, figures 4 to 6: 64 against 128); in
the first version other costs hide that."""
OTHER_FLASH_FRACTION = 0.45
"""An architecture without a published figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """One optimiser step. Batches in sequences, `sequence` in tokens; `shards`: 0 replicated, 1 to 3 the ZeRO
    stage.
    """

    devices: int
    micro_batch: int
    global_batch: int
    sequence: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    shards: int = 0
    dtype: str = "bf16"
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of the layers that full recomputation is applied to."""
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    lora: bool = False

    def __post_init__(self) -> None:
        whole = self.tp * self.pp * self.cp * self.dp
        if whole != self.devices:
            raise ConfigError(
                f"plan: tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp} = {whole} is not devices {self.devices}"
            )
        if min(self.micro_batch, self.global_batch, self.sequence, self.chunks, self.ep) < 1:
            raise ConfigError("plan: batches, sequence, chunks and ep must be at least 1")

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a data-parallel rank runs in a step, a part of one counting as one."""
        return max(1, -(-self.global_batch // (self.dp * self.micro_batch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a training framework does of itself; public descriptions of each, never fitted.

    `loss`: how the cross-entropy treats the logits; `dropout`: dropout is on; `fused`: elementwise passes are fused;
    `graphs`: kernels are launched by CUDA graphs or a compiler, so the host hardly delays them; `overlap_dp`,
    `overlap_tp`, `overlap_pp`: whether that communication runs beside computation; `optimizer_bytes`: moved per
    parameter of an update; `sequence_parallel`: it can be; `grad_bytes`: width of reduced gradients.
    """

    attention: Attention = "flash2"
    loss: Loss = "torch"
    dropout: bool = False
    fused: bool = False
    graphs: bool = False
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = False
    sequence_parallel: bool = True
    grad_bytes: int = 2
    optimizer_bytes: float = LOOPED_ADAM_BYTES


_EARLY_MEGATRON = Framework(
    optimizer_bytes=FUSED_ADAM_BYTES, attention="scores", loss="passes", dropout=True, fused=True, overlap_dp=False
)
DEFAULT_FRAMEWORK = Framework()
"""A framework that the table does not know: FlashAttention and overlapped data parallelism, as every current one
has."""
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    # DeepSpeed paper configurations inside Megatron: ZeRO overlaps its gathers (arXiv 2104.04473, section 5.2)
    ("zero", Framework(optimizer_bytes=FUSED_ADAM_BYTES, attention="scores", loss="passes", dropout=True, fused=True)),
    ("megatron deepspeed", replace(_EARLY_MEGATRON, sequence_parallel=False)),
    ("megatron core", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True,
        optimizer_bytes=FUSED_ADAM_BYTES)),
    ("megatron bridge", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True,
        optimizer_bytes=FUSED_ADAM_BYTES)),
    ("nemo", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True,
        optimizer_bytes=FUSED_ADAM_BYTES)),
    # MegaScale: arXiv 2402.15627, section 3: all communication overlapped, FlashAttention-2, fused kernels
    ("megascale", Framework(
        attention="flash2", loss="passes", fused=True, overlap_tp=True, overlap_pp=True,
        optimizer_bytes=FUSED_ADAM_BYTES)),
    ("megatron lm", _EARLY_MEGATRON),
    ("composer", Framework(attention="flash1", loss="torch")),
    ("torchtitan", Framework(attention="flash2", loss="torch", fused=True, graphs=True, overlap_tp=True, grad_bytes=4,
        optimizer_bytes=FUSED_ADAM_BYTES)),
)  # fmt: skip
"""First entry all of whose words stand in the framework's name (lower case) is taken."""


def framework(name: str) -> Framework:
    """What the framework called `name` does; `DEFAULT_FRAMEWORK` for one that the table does not know."""
    said = set(re.findall(r"[a-z0-9]+", name.lower())) | {w for w in ("zero",) if w in name.lower()}
    for needed, found in FRAMEWORKS:
        if set(needed.split()) <= said:
            return found
    return DEFAULT_FRAMEWORK


def flash_fraction(attention: Attention, family: str, head_dim: float) -> float:
    """Share of the 16-bit peak that fused attention reaches forward on an architecture family with heads of `head_dim`."""
    full = FLASH_FRACTION.get((attention, family), OTHER_FLASH_FRACTION)
    if attention == "flash1":
        return full
    return full * (0.5 + min(head_dim, FULL_HEAD_DIM) / (2 * FULL_HEAD_DIM))
