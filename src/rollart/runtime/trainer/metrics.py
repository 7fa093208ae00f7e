"""Metrics of a training step, as sums that add up over micro-batches and ranks.

Owns the list of what is measured and how means are made. Invariant: every mean is over trained tokens (or over the loss
weight, for the loss), never over micro-batches, rows or ranks, so no split and no padding changes a metric.

    loss                   summed loss / total loss weight
    entropy                mean entropy of the policy at the sampling temperature, nats
    ratio_mean, ratio_max  present over old probabilities, as they are clipped: of tokens, under gspo of trajectories
    clip_frac              tokens whose clipped term is the smaller one
    kl                     estimate of KL(old, present): mean of r - 1 - ln r (Schulman's k3)
    reference_kl           the KL term from the reference, before its coefficient; absent where there is none
    tis_mean, tis_clip_frac            weight of the correction, 0 for what it takes out; tokens at its cap
    masked_tokens, rejected_tokens, old_tokens    taken out of the loss: by masked importance sampling, with their whole
                           trajectory, by age; each token is counted once
    rejected_trajectories  out of the loss as a whole
    mismatch_kl, mismatch_ratio_mean   present over behaviour probabilities: distance between engine and trainer, and staleness
    mismatch_abs_mean, mismatch_abs_max   absolute difference of those log-probabilities
    zero_advantage_frac    trained tokens that teach nothing
    tokens, trajectories, micro_batches   what the step held
    computed_tokens        of its passes: without padding, prompts that rows share once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SUMS = (
    "tokens",
    "trajectories",
    "micro_batches",
    "computed_tokens",
    "loss_weight",
    "loss",
    "entropy",
    "ratio",
    "clipped",
    "kl",
    "tis",
    "tis_capped",
    "masked",
    "rejected",
    "rejected_trajectories",
    "aged",
    "reference_known",
    "reference_kl",
    "zero_advantage",
    "behaviour_known",
    "mismatch_kl",
    "mismatch_ratio",
    "mismatch_abs",
)
MAXIMA = ("ratio_max", "mismatch_abs_max")

PER_TOKEN = {
    "entropy": "entropy",
    "ratio_mean": "ratio",
    "clip_frac": "clipped",
    "kl": "kl",
    "tis_mean": "tis",
    "tis_clip_frac": "tis_capped",
    "zero_advantage_frac": "zero_advantage",
}
TAKEN_OUT = {"masked_tokens": "masked", "rejected_tokens": "rejected", "old_tokens": "aged"}
"""Tokens of the step that are not in its loss."""
COUNTS = ("tokens", "trajectories", "micro_batches", "computed_tokens", "rejected_trajectories")
PER_KNOWN_TOKEN = {
    "mismatch_kl": "mismatch_kl",
    "mismatch_ratio_mean": "mismatch_ratio",
    "mismatch_abs_mean": "mismatch_abs",
}


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add sums, take the larger of maxima. What a part lacks counts as 0."""
    merged = dict.fromkeys((*SUMS, *MAXIMA), 0.0)
    for part in parts:
        for name, value in part.items():
            merged[name] = max(merged[name], value) if name in MAXIMA else merged[name] + value
    return merged


def summary(sums: Mapping[str, float], *, with_entropy: bool) -> dict[str, float]:
    """The metrics of a step from its merged sums. Those of tokens that do not exist are left out, never 0."""
    tokens, known = sums["tokens"], sums["behaviour_known"]
    metrics = {name: sums[name] for name in COUNTS} | {name: sums[of] for name, of in TAKEN_OUT.items()}
    if tokens:
        metrics |= {name: sums[of] / tokens for name, of in PER_TOKEN.items() if with_entropy or name != "entropy"}
        metrics |= {"loss": sums["loss"] / sums["loss_weight"], "ratio_max": sums["ratio_max"]}
    if sums["reference_known"]:
        metrics["reference_kl"] = sums["reference_kl"] / sums["reference_known"]
    if known:
        metrics |= {name: sums[of] / known for name, of in PER_KNOWN_TOKEN.items()}
        metrics["mismatch_abs_max"] = sums["mismatch_abs_max"]
    return metrics
