"""Credit: how a trajectory's weight in the loss is spread over its segments and tokens.

Owns the four normalisations. Invariant: the trajectory is the unit of account. However a trajectory is cut into segments,
their weights sum to 1 and its number of trained tokens stays the same, so its part in the loss does not grow with the
number of its segments.

    normalize     one token of a trajectory with n trained tokens in k segments weighs     the loss is divided by
    trajectory    1 / n                                                                    trajectories
    sequence      1 / (k * trained tokens of its own segment)                              trajectories
    token         1                                                                        tokens
    constant      1 / the longest response that a task allows                              trajectories

Under `trajectory`, `token` and `constant` the cuts themselves leave no trace; `sequence` gives each segment of a trajectory
the same part of its weight, so there a token's weight depends on the length of its segment (equal cuts change nothing).
`constant` is Dr.GRPO's (Liu et al. 2025, section 3.1): a token weighs the same in a long trajectory as in a short one.
A token that a correction masks keeps its place in what the loss is divided by: what is masked never makes the rest heavier.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart.config.learning import Normalize
from rollart.config.schema import RunConfig
from rollart.core.types import Sample, Segment

__all__ = ["Normalize", "longest_response", "loss_tokens", "segment_shares", "token_weight", "total_weight"]


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


def longest_response(config: RunConfig) -> int:
    """The most tokens that a trajectory of any task can sample: every turn taken, and every turn full."""
    return max(task.max_turns * task.max_tokens for task in config.tasks.values())


def token_weight(sample: Sample, normalize: Normalize, longest: int = 1) -> float:
    """What one trained token of this sample weighs in the loss, before the division by the step's total weight.

    `longest`: tokens of the longest response, which `constant` divides by.
    """
    tokens = loss_tokens(sample.segment)
    if not tokens:
        return 0.0
    if normalize == "constant":
        return 1.0 / longest
    return 1.0 if normalize == "token" else sample.weight / tokens


def total_weight(samples: Sequence[Sample]) -> float:
    """What `Trainer.begin` expects for a step with these samples: their number of trajectories."""
    return sum(sample.weight for sample in samples)
