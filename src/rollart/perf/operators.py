"""Seconds of one operator of a training step on one device: matrix products, attention and memory-bound passes.

Owns the efficiency laws that turn FLOPs and bytes into seconds. Invariant: every function returns finite positive
seconds for positive work and never less than the roofline's; a device twice as fast in all respects never makes an
operator slower. Why: a step is a sum of these, and an operator's shape (inner dimension, tiles per wave, arithmetic
intensity) decides how far from the peak it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollart.perf.devices import Device

BF16_BYTES = 2
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.88), (64, 64, 0.75))
"""Output tiles among which the matrix libraries choose, with the fraction of the best tile's speed: small ones reload
more."""
GEMM_REACH = {
    "volta": 0.80,
    "ampere": 0.87,
    "hopper": 0.80,
    "blackwell": 0.775,
    "ada": 0.80,
    "cdna2": 0.77,
    "cdna3": 0.54,
    "cdna4": 0.70,
}
"""Best measured share of the 16-bit peak over all product shapes (the public `mamf` table of ml-engineering: A100 SXM
271 of 312, H100 SXM 792 of 989, B200 1,745 of 2,250, MI300X 709 of 1,307; volta, ada, cdna2 and cdna4 alike, from
their vendors' GEMM figures)."""
OTHER_REACH = 0.75
FP4_OVER_FP8 = 2.0
"""The extra half that Blackwell Ultra's sheet gives fp4 over twice fp8 is for inference: operands of training are
quantised anew and the power limit binds first."""
FLASH_BACKWARD_FLOPS = 2.5
"""Backward of fused attention recomputes the scores: 5 products for the forward's 2 (FlashAttention-2, section
3.1)."""
FLASH_BACKWARD_FRACTION = 0.85
"""Of the forward's fraction of the peak: 170 of 200 TFLOP/s on A100 (FlashAttention-2, figures 5 and 6)."""
DIAGONAL_TOKENS = 128
"""Side of a score tile: on the diagonal half of it is masked, which short sequences feel."""
OPERAND_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5, "int8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLaw:
    """Efficiencies that all devices share, fitted once over all of the data (`tables/training_calibration.json`).

    `gemm_fraction` and its narrow siblings: by operand width, the fraction of what the architecture reaches at best;
    `inner_half`: inner dimension at which a product runs at half of it; `memory_fraction`: of the memory bandwidth,
    in streaming passes; `kernel_s`: seconds on the device that a kernel takes whatever its size.
    """

    gemm_fraction: float = 0.9
    gemm_fraction_fp8: float = 0.95
    gemm_fraction_fp4: float = 0.7
    inner_half: float = 250.0
    memory_fraction: float = 0.8
    kernel_s: float = 3e-6


def wave_fraction(rows: int, columns: int, batch: int, sms: int) -> float:
    """Useful fraction of the waves of a rows x columns output (tile and wave quantisation), best tile; 1 if `sms` is
    0.
    """
    if sms <= 0:
        return 1.0
    best = 0.0
    useful = float(rows) * columns * batch
    for tile_rows, tile_columns, speed in TILES:
        tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) * batch
        waves = math.ceil(tiles / sms)
        best = max(best, speed * useful / (waves * sms * tile_rows * tile_columns))
    return best


def stream_s(moved_bytes: float, *, device: Device, law: OperatorLaw) -> float:
    """Seconds of a memory-bound pass that reads and writes `moved_bytes` in all."""
    return moved_bytes / (device.memory_bytes_per_s * law.memory_fraction)


def gemm_s(
    rows: int, columns: int, inner: int, *, device: Device, law: OperatorLaw, dtype: str = "bf16", batch: int = 1
) -> float:
    """Seconds of `batch` products (rows x inner) by (inner x columns): a roofline with efficiency by shape."""
    if min(rows, columns, inner, batch) <= 0:
        return 0.0
    computed = device.computes(dtype)
    peak = device.peak_flops(dtype)
    if computed == "fp4" and "fp8" in device.flops:
        peak = min(peak, FP4_OVER_FP8 * device.peak_flops("fp8"))
    width = OPERAND_BYTES[computed]
    fraction = {1.0: law.gemm_fraction_fp8, 0.5: law.gemm_fraction_fp4}.get(width, law.gemm_fraction)
    # narrow operands finish an inner step sooner, so filling the pipeline weighs more
    fraction *= GEMM_REACH.get(device.family, OTHER_REACH)
    ramp = inner / (inner + law.inner_half * BF16_BYTES / width)
    waves = wave_fraction(rows, columns, batch, device.sms)
    compute_s = 2.0 * rows * columns * inner * batch / (peak * fraction * ramp * waves)
    moved = (width * (rows + columns) * inner + BF16_BYTES * float(rows) * columns) * batch
    return max(compute_s, stream_s(moved, device=device, law=law)) + law.kernel_s


def flash_attention_s(
    queries: int, keys: int, heads: int, dims: int, *, device: Device, law: OperatorLaw, fraction: float,
    backward: bool = False,
) -> float:  # fmt: skip
    """Seconds of causal fused attention; `heads` counts all sequences, `dims` is query-key plus value head dimension.

    `fraction`: share of the 16-bit peak that the kernel reaches forward on long sequences with heads of this size.
    """
    flops = float(queries) * keys * heads * dims  # half of 2 * queries * keys * dims: causal
    reached = fraction * keys / (keys + DIAGONAL_TOKENS)
    if backward:
        flops, reached = flops * FLASH_BACKWARD_FLOPS, reached * FLASH_BACKWARD_FRACTION
    return flops / (device.peak_flops("bf16") * reached) + law.kernel_s


def score_attention_s(
    queries: int, keys: int, heads: int, head_dim: int, *, device: Device, law: OperatorLaw, backward: bool = False
) -> float:
    """Seconds of attention that keeps its scores in memory (before FlashAttention), with dropout on them.

    Two batched products, a fused scale-mask-softmax, and a dropout that keeps one byte a score; twice the products
    backward.
    """
    scores = gemm_s(queries, keys, head_dim, device=device, law=law, batch=heads)
    values = gemm_s(queries, head_dim, keys, device=device, law=law, batch=heads)
    per_score = 11.0 if backward else 9.0  # softmax 4 (6 backward), dropout 5, in bytes
    passes = stream_s(per_score * queries * keys * heads, device=device, law=law)
    return (2 if backward else 1) * (scores + values) + passes + 2 * law.kernel_s
