"""The loss: what is made smaller per trained token, and what is measured beside it.

Owns the per-token formula. Invariants: only sampled tokens are in it; everything is a sum over tokens, so no split into
micro-batches or ranks changes it; the division by the step's total weight is the last thing that happens.

    loss = sum of weight * correction * (-objective + kl.coef * kl)

    r           exp(logprobs - old_logprobs)                             how far this update has moved a token
    ppo_clip    min(r A, clip(r) A)                                      Schulman et al. 2017; two bounds: DAPO, section 3.1
                where r is the ratio to what sampled (`correction.kind` is `clip`) and A < 0, no lower than cap A: the dual clip
                of Ye et al. 2020, section 4.2
    decoupled   the same around old_logprobs that were recomputed        Fu et al. 2025 (AReaL), section 5.2
    gspo        min(s A, clip(s) A), s the geometric mean of r over the trajectory, its gradient through each token alike
                (Zheng et al. 2025, section 4.3: value sg(s), gradient of the token)
    cispo       sg(clip(r)) A logprobs                                   MiniMax-M1 2025, section 3.1
    kl          of the present policy from the reference, on the tokens that were sampled and no others:
                k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d with d = logprobs - reference (Schulman 2020)

`old_logprobs` are those under which tokens were sampled where `correction.kind` is `clip` (before truncation: what was cut off
is no move of the policy, and weighs apart). Else they are the present ones without gradient unless they were recomputed before
the update: with one optimiser step per batch both are the same, every ratio is 1 and nothing is clipped. The correction is in
`corrections`, trajectory means in `sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollart.config.schema import Algorithm
from rollart.runtime.trainer.corrections import Correction, correct
from rollart.runtime.trainer.metrics import MAXIMA, SUMS
from rollart.runtime.trainer.rows import LossTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Per token, (N,) each."""

    value: torch.Tensor
    """To be made larger; carries the gradient."""
    ratio: torch.Tensor
    """As it is clipped: of a token, under gspo of a trajectory."""
    clipped: torch.Tensor
    """bool: the bound has changed something."""


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
    now = logprobs.detach()
    old = _clipped_around(now, behaviour, terms, algorithm)
    objective = _objective(logprobs, now, old, terms, algorithm)
    correction = correct(old, behaviour, terms, algorithm)
    losses = -objective.value
    kl = None
    if algorithm.kl.kind != "none":
        assert terms.reference is not None
        kl = reference_kl(logprobs, terms.reference, algorithm.kl.kind)
        losses = losses + algorithm.kl.coef * kl * _drawn_now(objective, algorithm)
    losses = losses * correction.weight
    loss = (losses * terms.weights).sum()
    return loss, _measure(
        now=now,
        old=old,
        behaviour=behaviour,
        objective=objective,
        correction=correction,
        losses=losses.detach(),
        kl=None if kl is None else kl.detach(),
        terms=terms,
    )


def _clipped_around(now: torch.Tensor, behaviour: torch.Tensor, terms: LossTerms, algorithm: Algorithm) -> torch.Tensor:
    """`old_logprobs`, (N,)."""
    if algorithm.correction.kind == "clip":
        return behaviour if terms.log_kept is None else behaviour + terms.log_kept
    return now if terms.old is None else terms.old


def _objective(
    logprobs: torch.Tensor, now: torch.Tensor, old: torch.Tensor, terms: LossTerms, algorithm: Algorithm
) -> Objective:
    rule = algorithm.loss
    advantages = terms.advantages
    if algorithm.entropy_coef:
        # the entropy's gradient is the expectation of grad log p times -log p, and the tokens here are draws of it
        advantages = advantages - algorithm.entropy_coef * now
    low, high = 1 - rule.eps_clip_low, 1 + rule.eps_clip_high
    if rule.kind == "cispo":
        ratio = torch.exp(now - old)
        weight = ratio.clamp(low, high)
        return Objective(value=weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio)
    if rule.kind == "gspo":
        assert terms.move is not None
        ratio = torch.exp(terms.move) * torch.exp(logprobs - now)
    else:
        ratio = torch.exp(logprobs - old)
    surrogate, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    clipped = bounded.detach() < surrogate.detach()
    value = torch.minimum(surrogate, bounded)
    if algorithm.correction.kind == "clip":
        beyond = (ratio.detach() > algorithm.correction.cap) & (advantages < 0)
        value = torch.where(beyond, algorithm.correction.cap * advantages, value)
        clipped = clipped | beyond
    return Objective(value=value, ratio=ratio.detach(), clipped=clipped)


def _drawn_now(objective: Objective, algorithm: Algorithm) -> torch.Tensor | float:
    """What makes tokens of older weights count as draws of the present policy, of which the KL term is an expectation. The
    other corrections weigh the whole loss, this one only its own ratio."""
    if algorithm.correction.kind != "clip":
        return 1.0
    return objective.ratio.detach().clamp(max=algorithm.correction.cap)


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimates of KL(present, reference) per sampled token, (N,), for tokens drawn from the present policy.

    Mean gradient: under k1 and k2 that of KL(present, reference), under k3 that of KL(reference, present), both of which pull
    towards the reference. The plain difference `k1` has the right mean and a gradient of mean 0; its gradient here is d times
    that of the token's log-probability, which is the gradient of an expectation.
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference.detach() * torch.exp(logprobs - logprobs.detach())
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


@torch.no_grad()
def _measure(
    *,
    now: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    objective: Objective,
    correction: Correction,
    losses: torch.Tensor,
    kl: torch.Tensor | None,
    terms: LossTerms,
) -> dict[str, float]:
    """All sums in one tensor: one copy from the device, whatever the number of metrics."""
    drift = (now - old).double()
    known = ~behaviour.isnan()
    gap = (now - behaviour)[known].double()
    weights = terms.weights.double()
    sums = {
        "tokens": torch.ones_like(weights),
        "loss_weight": weights,
        "loss": weights * losses.double(),
        "ratio": objective.ratio.double(),
        "clipped": objective.clipped.double(),
        "kl": torch.expm1(drift) - drift,
        "tis": correction.weight.double(),
        "tis_capped": correction.capped.double(),
        "masked": correction.masked.double(),
        "rejected": correction.rejected.double(),
        "aged": correction.aged.double(),
        "zero_advantage": (terms.advantages == 0).double(),
        "behaviour_known": known.double(),
        "mismatch_kl": torch.expm1(gap) - gap,
        "mismatch_ratio": gap.exp(),
        "mismatch_abs": gap.abs(),
    }
    if kl is not None:
        sums |= {"reference_known": torch.ones_like(weights), "reference_kl": kl.double()}
    maxima = {"ratio_max": objective.ratio, "mismatch_abs_max": gap.abs()}
    values = [sums[name].sum() for name in SUMS if name in sums]
    values += [maxima[name].double().max() if len(maxima[name]) else drift.new_zeros(()) for name in MAXIMA]
    names = [*(name for name in SUMS if name in sums), *MAXIMA]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))
