"""The loss: clipped policy gradient with a truncated importance weight, and what is measured beside it.

Owns the per-token formula. Invariants: only sampled tokens are in it; everything is a sum over tokens, so no split into
micro-batches or ranks changes it; the division by the step's total weight is the last thing that happens.

    ratio   = exp(logprobs - old_logprobs)                          how far this update has moved
    tis     = min(cap, exp(old_logprobs - behaviour logprobs))      how far sampling was from where the update began
    loss    = sum of weight * tis * -min(ratio A, clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high) A)

`old_logprobs` are the present ones without gradient unless they were recomputed before the update: with one optimiser step
per batch both are the same. PPO: Schulman et al. 2017; two bounds: DAPO, section 3.1; truncated weight: Yao et al. 2025.
"""

from __future__ import annotations

import torch

from rollart.config.schema import Algorithm
from rollart.runtime.trainer.metrics import MAXIMA, SUMS
from rollart.runtime.trainer.rows import LossTerms


def policy_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    terms: LossTerms,
    algorithm: Algorithm,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The summed loss over N trained tokens, with gradient, and the sums and maxima from which metrics are computed.

    `logprobs` (N,) under the present weights, with gradient; `behaviour` (N,), NaN where unknown (then it must not be
    needed: `rows.row_of` sees to that). The entropy sum is not among the results: it comes from the forward pass.
    """
    clip = algorithm.loss
    now = logprobs.detach()
    old = now if terms.old is None else terms.old
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - clip.eps_clip_low, 1 + clip.eps_clip_high)
    advantages = terms.advantages
    if algorithm.entropy_coef:
        # the entropy's gradient is the expectation of grad log p times -log p, and the tokens here are draws of it
        advantages = advantages - algorithm.entropy_coef * now
    surrogate, bounded = ratio * advantages, clipped * advantages
    tis = _tis(old, behaviour, algorithm)
    losses = -torch.minimum(surrogate, bounded) * tis
    loss = (losses * terms.weights).sum()
    return loss, _measure(
        now=now,
        old=old,
        behaviour=behaviour,
        ratio=ratio.detach(),
        tis=tis,
        losses=losses.detach(),
        clipped=bounded.detach() < surrogate.detach(),
        terms=terms,
        algorithm=algorithm,
    )


def _tis(old: torch.Tensor, behaviour: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    if algorithm.correction.kind == "none":
        return torch.ones_like(old)
    return torch.exp(old - behaviour).clamp(max=algorithm.correction.cap)


@torch.no_grad()
def _measure(
    *,
    now: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    ratio: torch.Tensor,
    tis: torch.Tensor,
    losses: torch.Tensor,
    clipped: torch.Tensor,
    terms: LossTerms,
    algorithm: Algorithm,
) -> dict[str, float]:
    """All sums in one tensor: one copy from the device, whatever the number of metrics."""
    drift = (now - old).double()
    known = ~behaviour.isnan()
    gap = (now - behaviour)[known].double()
    capped = tis >= algorithm.correction.cap if algorithm.correction.kind == "tis" else torch.zeros_like(known)
    weights = terms.weights.double()
    sums = {
        "tokens": torch.ones_like(weights),
        "loss_weight": weights,
        "loss": weights * losses.double(),
        "ratio": ratio.double(),
        "clipped": clipped.double(),
        "kl": torch.expm1(drift) - drift,
        "tis": tis.double(),
        "tis_capped": capped.double(),
        "zero_advantage": (terms.advantages == 0).double(),
        "behaviour_known": known.double(),
        "mismatch_kl": torch.expm1(gap) - gap,
        "mismatch_ratio": gap.exp(),
        "mismatch_abs": gap.abs(),
    }
    maxima = {"ratio_max": ratio, "mismatch_abs_max": gap.abs()}
    values = [sums[name].sum() for name in SUMS if name in sums]
    values += [maxima[name].double().max() if len(maxima[name]) else drift.new_zeros(()) for name in MAXIMA]
    names = [*(name for name in SUMS if name in sums), *MAXIMA]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))
