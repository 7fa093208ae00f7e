"""Corrections: how much of a token's loss counts, given how far sampling was from where the update began.

Owns the weight per token and everything that takes tokens out of the loss. Invariants: weights carry no gradient; a token
that is taken out has weight exactly 0 and keeps its place in what the loss is divided by, so nothing else grows; each is
counted under the first rule that took it out, in the order of the table.

    taken out     why                                                                            whole trajectory
    old           sampled more than `mask_older_than` versions ago (staleness counts it all the same)       no
    rejected      geometric mean of old / behaviour probabilities out of the bounds of `reject`             yes
    masked        old / behaviour probability out of the bounds of `correction.kind=masked`                 no

Truncated weight: Yao et al. 2025; masked: IcePop, Ling team 2025. Under truncated sampling `behaviour` is what tokens were
drawn from: the kept mass is divided out (`rows`). `clip` leaves the distance from sampling to the loss's ratio, and only what
truncation kept is a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollart.config.schema import Algorithm
from rollart.runtime.trainer.rows import LossTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Per trained token, (N,) each."""

    weight: torch.Tensor
    """0 for what is taken out."""
    capped: torch.Tensor
    """bool: the weight is at its cap."""
    aged: torch.Tensor
    rejected: torch.Tensor
    masked: torch.Tensor
    """bool, each token in one of the three at most."""


@torch.no_grad()
def correct(old: torch.Tensor, behaviour: torch.Tensor, terms: LossTerms, algorithm: Algorithm) -> Correction:
    """`old`, `behaviour`: (N,) log-probabilities; `behaviour` may be NaN where nothing needs it."""
    rule, none = algorithm.correction, torch.zeros_like(old, dtype=torch.bool)
    weight, capped, masked = torch.ones_like(old), none, none
    if rule.kind == "tis":
        weight = torch.exp(old - behaviour).clamp(max=rule.cap)
        capped = weight >= rule.cap
    elif rule.kind == "masked":
        weight = torch.exp(old - behaviour)
        masked = (weight < rule.low) | (weight > rule.high)
    elif rule.kind == "clip" and terms.log_kept is not None:
        weight = torch.exp(terms.log_kept)
    aged = none if terms.fresh is None else ~terms.fresh
    rejected = none
    if algorithm.reject.kind == "geometric":
        assert terms.gap is not None
        mean = torch.exp(terms.gap)
        rejected = ((mean < algorithm.reject.low) | (mean > algorithm.reject.high)) & ~aged
    masked = masked & ~aged & ~rejected
    # the weight itself, not its product: 0 x infinity would be no number
    weight = weight.masked_fill(aged | rejected | masked, 0.0)
    return Correction(weight=weight, capped=capped, aged=aged, rejected=rejected, masked=masked)
