"""Credit: how a trajectory's weight in the loss is spread over its segments and tokens.

Owns the three normalisations. Invariant: the trajectory is the unit of account. However a trajectory is cut into segments,
their weights sum to 1 and its number of trained tokens stays the same, so its part in the loss does not grow with the
number of its segments.

    normalize     one token of a trajectory with n trained tokens in k segments weighs     the loss is divided by
    trajectory    1 / n                                                                    trajectories
    sequence      1 / (k * trained tokens of its own segment)                              trajectories
    token         1                                                                        tokens

Under `trajectory` and `token` the cuts themselves leave no trace; `sequence` gives each segment of a trajectory the same
part of its weight, so there a token's weight depends on the length of its segment (equal cuts change nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollart.core.types import Sample, Segment

Normalize = Literal["trajectory", "sequence", "token"]


def loss_tokens(segment: Segment) -> int:
    """Tokens of a segment that enter the loss: sampled here, and not in the prefix that is trained in the parent."""
    trained, start = 0, 0
    for piece in segment.pieces:
        if piece.sampled:
            trained += max(0, piece.n_tokens - max(0, segment.shared_tokens - start))
        start += piece.n_tokens
    return trained


def segment_shares(segments: Sequence[Segment], normalize: Normalize) -> tuple[float, ...]:
    """Each segment's part of its trajectory's weight 1; 0 for a segment without trainable tokens, all 0 if none has any."""
    tokens = [loss_tokens(segment) for segment in segments]
    parts = [min(1, n) for n in tokens] if normalize == "sequence" else tokens
    total = sum(parts)
    return tuple(part / total if total else 0.0 for part in parts)


def token_weight(sample: Sample, normalize: Normalize) -> float:
    """What one trained token of this sample weighs in the loss, before the division by the step's total weight."""
    tokens = loss_tokens(sample.segment)
    if normalize == "token" or not tokens:
        return 1.0 if tokens else 0.0
    return sample.weight / tokens


def total_weight(samples: Sequence[Sample]) -> float:
    """What `Trainer.begin` expects for a step with these samples: their number of trajectories."""
    return sum(sample.weight for sample in samples)
