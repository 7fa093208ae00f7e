"""Closed forms of pipeline schedules: how long m micro-batches take on p stages, and what of it is bubble.

Owns the schedule names and their step-time formulas. Invariant: with equal stages and no communication 1F1B and GPipe
take exactly (m + p - 1)(tf + tb), interleaving divides the bubble by the number of chunks, and no schedule beats the
busiest stage's own work. Why closed forms: a plan is judged in microseconds, whatever the number of ranks; the
composer of timelines is checked against them. Sources: Narayanan et al. 2021 (arXiv 2104.04473) section 2.2; Qi et
al. 2023 (arXiv 2401.10241) for zero bubble; DeepSeek-V3 (arXiv 2412.19437) table 2 for DualPipe.
"""

from collections.abc import Sequence
from typing import Literal

from rollart.core.errors import ConfigError

Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "dualpipe"]


def balanced_layers(layers: int, stages: int, *, first_extra: float, last_extra: float) -> tuple[int, ...]:
    """Layers of each stage: equal where they divide, else the split whose largest stage, extras counted in layers, is
    smallest.

    `first_extra` and `last_extra` are the costs of the embedding and of the output head, in layers.
    """
    if layers % stages == 0 or stages == 1:
        return (layers // stages,) * stages if stages > 1 else (layers,)
    extras = [0.0] * stages
    extras[0] += first_extra
    extras[-1] += last_extra
    counts = [0] * stages
    for _ in range(layers):
        lightest = min(range(stages), key=lambda s: (counts[s] + 1 + extras[s], s))
        counts[lightest] += 1
    return tuple(counts)


def bubble_fraction(schedule: Schedule, *, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle share relative to the ideal time m(tf + tb), equal stages with tb = 2 tf: (p-1)/m, divided by the chunks
    when interleaved.
    """
    forward, backward = 1.0, 2.0
    whole = schedule_s(
        schedule,
        stage_forward_s=[forward] * stages,
        stage_backward_s=[backward] * stages,
        micro_batches=micro_batches,
        chunks=chunks,
    )
    return whole / (micro_batches * (forward + backward)) - 1.0


def schedule_s(
    schedule: Schedule,
    *,
    stage_forward_s: Sequence[float],
    stage_backward_s: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    weight_share: float = 0.5,
) -> float:
    """Seconds from the first forward to the last backward.

    `stage_forward_s[i]` and `stage_backward_s[i]`: one micro-batch through all chunks of stage i; `chunks`: model
    chunks per stage (interleaved); `weight_share`: part of the backward that computes weight gradients, which
    zero-bubble schedules defer. Raises ConfigError on unequal lengths, no stage, or fewer than one micro-batch or
    chunk.
    """
    if not stage_forward_s or len(stage_forward_s) != len(stage_backward_s):
        raise ConfigError(
            f"stages: {len(stage_forward_s)} forward and {len(stage_backward_s)} backward times; give one of each per stage"
        )
    if micro_batches < 1 or chunks < 1:
        raise ConfigError(f"micro_batches {micro_batches}, chunks {chunks}: both must be at least 1")
    totals = [f + b for f, b in zip(stage_forward_s, stage_backward_s, strict=True)]
    slowest = max(totals)
    others = sum(totals) - slowest
    steady = micro_batches * slowest
    if schedule in ("1f1b", "gpipe"):
        return steady + others
    if schedule == "interleaved":
        return steady + others / chunks
    forward = sum(stage_forward_s) / len(totals)
    backward = sum(stage_backward_s) / len(totals)
    weight = backward * weight_share
    stages = len(totals)
    if schedule == "zero_bubble":  # ZB-H1: (p-1)(F + B_input - W)
        return steady + max(0.0, (stages - 1) * (forward + backward - 2 * weight))
    # DualPipe: (p/2 - 1)(F&B + B - 3W), with F&B the overlapped pair
    return steady + max(0.0, (stages / 2 - 1) * (forward + 2 * backward - 3 * weight))
