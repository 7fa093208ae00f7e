"""Time of one kernel on one device: a roofline whose corners are rounded by what kernels really reach.

Owns: the few numbers that say how far software stays below the spec sheet (`Efficiency`) and the three kinds of kernel that
inference is made of: matrix products, attention, collectives. Invariant: more work never takes less time and a better
device never more. Why: with the corner rounded and waves of tiles counted, one set of numbers fits all chips, so an
unknown chip needs its spec sheet only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart.perf.devices import Device

TILE = 128
"""Rows and columns of the output that one multiprocessor makes at a time."""
ROUND = 3.0
"""Sharpness of the roofline's corner: at equal compute and memory time a kernel takes 26 % more than either."""
WEIGHT_BYTES = {"fp4": 0.5625, "fp8": 1.0, "int8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
"""Bytes of a stored weight; fp4 with one scale in 8 bits for 16 elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What kernels reach of the spec sheet, the same for all devices, models and engines; fitted once."""

    matmul_bf16: float = 0.70
    matmul_fp8: float = 0.55
    matmul_fp4: float = 0.40
    """Best fraction of the dense peak by the dtype that is multiplied in."""
    memory: float = 0.80
    """Of the memory bandwidth, weights and activations."""
    kv: float = 0.75
    """Of the memory bandwidth, gathered KV blocks."""
    attention: float = 0.45
    """Of the bf16 peak, in attention over a prompt."""
    wave_half: float = 0.3
    """Waves of tiles at which half of the multiprocessors are busy on average."""
    inner_half: float = 300.0
    """Inner dimension at which a product runs at half of its best rate."""
    kernel_s: float = 2.0e-6
    """Between two kernels of a captured graph."""
    passes: float = 12.0
    """Hidden vectors read or written by norms, activations, rotations and quantisation, per token and layer."""
    expert_matmul: float = 0.6
    """What grouped products of quantised experts reach of a plain product; those in 16 bits lose to their tiles only."""
    expert_passes: float = 4.0
    """Times that each routed copy of a hidden vector is read or written to sort, gather and combine it."""
    expert_pad: float = 32.0
    """Rows that an expert's tile wastes on average."""
    expert_imbalance: float = 1.2
    """Tokens of the busiest expert-parallel rank over the mean."""
    rank_imbalance: float = 1.1
    """Sequences and prompt tokens of the busiest data-parallel rank of an engine over the mean."""
    link: float = 0.7
    """Of the link, in collectives."""
    collective_s: float = 8.0e-6
    """Start of a collective inside a node."""
    host_step_s: float = 5.0e-3
    host_sequence_s: float = 45.0e-6
    """Work of scheduler, tokenizer and server per step and per running sequence in an engine that does all of it in one process
    (blog of vLLM 0.6.0: 62 % of a step of about 23 ms for an 8B model on one H100)."""

    def matmul(self, dtype: str) -> float:
        return {"fp8": self.matmul_fp8, "fp4": self.matmul_fp4, "int8": self.matmul_fp8}.get(dtype, self.matmul_bf16)


def rounded_max(a: float, b: float) -> float:
    """A maximum with a rounded corner."""
    top, low = (a, b) if a >= b else (b, a)
    return top * (1.0 + (low / top) ** ROUND) ** (1.0 / ROUND) if top > 0 else 0.0


def matmul_s(
    device: Device, eff: Efficiency, rows: float, inputs: float, outputs: float, *,
    weight_bytes: float, compute: str, copies: float = 1.0, pad: float = 0.0, reach: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of `copies` products [rows, inputs] x [inputs, outputs] in one launch (experts), weights read once each.

    `rows` are those of one copy, `pad` the rows of a tile that it wastes; `compute` is the dtype multiplied in, `reach` what
    this kind of product gets of the usual efficiency.
    """
    if rows <= 0 or copies <= 0:
        return 0.0
    worked = rows + pad
    waves = copies * max(worked / TILE, 1.0) * (outputs / TILE) / max(device.sms, 1)
    busy = waves / (waves + eff.wave_half) * inputs / (inputs + eff.inner_half)
    compute_s = (
        2.0 * copies * worked * inputs * outputs / (device.peak_flops(compute) * eff.matmul(compute) * reach * busy)
    )
    moved = copies * (inputs * outputs * weight_bytes + rows * (inputs * min(weight_bytes, 2.0) + outputs * 2.0))
    return rounded_max(compute_s, moved / (device.memory_bytes_per_s * eff.memory)) + eff.kernel_s


def attention_s(device: Device, eff: Efficiency, *, flops: float, kv_bytes: float) -> float:
    """Seconds of attention that reads `kv_bytes` of cache and does `flops`, all of one device's layers together."""
    compute_s = flops / (device.peak_flops("bf16") * eff.attention)
    return rounded_max(compute_s, kv_bytes / (device.memory_bytes_per_s * eff.kv))


def all_reduce_s(device: Device, eff: Efficiency, ranks: int, moved_bytes: float) -> float:
    """Seconds of an all-reduce of `moved_bytes` inside a node: a start, then two passes of the ring over the links."""
    if ranks <= 1:
        return 0.0
    return eff.collective_s + 2.0 * (ranks - 1) / ranks * moved_bytes / (device.link_bytes_per_s * eff.link)


def all_to_all_s(device: Device, eff: Efficiency, ranks: int, sent_bytes: float) -> float:
    """Seconds of an all-to-all in which every rank has `sent_bytes` for all ranks, its own part included."""
    if ranks <= 1:
        return 0.0
    return eff.collective_s + (ranks - 1) / ranks * sent_bytes / (device.link_bytes_per_s * eff.link)
