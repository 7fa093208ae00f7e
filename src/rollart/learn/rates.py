"""The learning rate of each optimiser step: warm-up, then decay. A pure function of the step's number."""

from __future__ import annotations

import math

from rollart.config.schema import Optimizer


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """The rate of optimiser step `step`, counted from 0, in a run of `total_steps`.

    Rises linearly over `warmup_steps` to `lr`, which the last of them has; then stays, or falls along a line or half a cosine
    so that the step after the last one would have 0. Steps beyond `total_steps` have 0 then.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    left = total_steps - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / left) if left > 0 else 1.0
    match settings.decay:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - progress)
        case "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))
