"""What a training step is asked to be: degrees, batch, precision, recomputation, and what the framework does by itself.

Owns `TrainingPlan`, `Framework` and the table of frameworks. Invariant: the degrees of a valid plan multiply to its
devices and its batch divides into whole micro-batches. Why: everything that may differ between two runs on the same
devices is a field here, so that a prediction depends on nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.perf.pipeline import Schedule

Recompute = Literal["none", "selective", "full"]
Attention = Literal["scores", "flash2", "flash3"]
Loss = Literal["passes", "torch", "fused"]
FLASH_FRACTION = {
    ("flash2", "ampere"): 0.60, ("flash2", "hopper"): 0.36, ("flash3", "ampere"): 0.60, ("flash3", "hopper"): 0.60,
    ("flash3", "blackwell"): 0.55, ("flash2", "blackwell"): 0.40,
}  # fmt: skip
"""Share of the 16-bit peak, causal forward, heads of 128, 16 k tokens: FlashAttention-2 table 1 (A100 190 of 312, H100 350 of
989), FlashAttention-3 figure 5 (H100 600 to 650), cuDNN 9 on B200 (1,200 to 1,300 of 2,250). Public tables."""
OTHER_FLASH_FRACTION = 0.45
"""An architecture without a published figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """One optimiser step. Batches in sequences, `sequence` in tokens; `shards`: 0 replicated, 1 to 3 the ZeRO stage."""

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

    `loss`: how the cross-entropy treats the logits; `dropout`: dropout is on; `fused`: elementwise passes are fused; `graphs`: kernels are
    launched by CUDA graphs or a compiler, so the host hardly delays them; `overlap_dp`, `overlap_tp`, `overlap_pp`: whether that communication
    runs beside computation; `grad_bytes`: width of reduced gradients.
    """

    attention: Attention = "flash2"
    loss: Loss = "torch"
    dropout: bool = False
    fused: bool = False
    graphs: bool = False
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = False
    grad_bytes: int = 2


_EARLY_MEGATRON = Framework(attention="scores", loss="passes", dropout=True, fused=True, overlap_dp=False)
DEFAULT_FRAMEWORK = Framework()
"""A framework that the table does not know: FlashAttention and overlapped data parallelism, as every current one has."""
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    # DeepSpeed paper configurations inside Megatron: ZeRO overlaps its gathers (arXiv 2104.04473, section 5.2)
    ("zero", Framework(attention="scores", loss="passes", dropout=True, fused=True)),
    ("megatron deepspeed", _EARLY_MEGATRON),
    ("megatron core", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True, grad_bytes=2)),
    ("megatron bridge", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True, grad_bytes=2)),
    ("nemo", Framework(
        attention="flash3", loss="fused", fused=True, graphs=True, overlap_tp=True, overlap_pp=True, grad_bytes=2)),
    # MegaScale: arXiv 2402.15627, section 3: all communication overlapped, FlashAttention-2, fused kernels
    ("megascale", Framework(
        attention="flash2", loss="passes", fused=True, overlap_tp=True, overlap_pp=True)),
    ("megatron lm", _EARLY_MEGATRON),
    ("composer", Framework(attention="flash2", loss="torch")),
    ("torchtitan", Framework(attention="flash2", loss="torch", fused=True, graphs=True, overlap_tp=True, grad_bytes=4)),
)  # fmt: skip
"""First entry all of whose words stand in the framework's name (lower case) is taken."""


def framework(name: str) -> Framework:
    """What the framework called `name` does; `DEFAULT_FRAMEWORK` for one that the table does not know."""
    said = set(re.findall(r"[a-z0-9]+", name.lower())) | {w for w in ("zero",) if w in name.lower()}
    for needed, found in FRAMEWORKS:
        if set(needed.split()) <= said:
            return found
    return DEFAULT_FRAMEWORK


def flash_fraction(attention: Attention, family: str) -> float:
    """Share of the 16-bit peak that fused attention reaches forward on an architecture family."""
    return FLASH_FRACTION.get((attention, family), OTHER_FLASH_FRACTION)
