"""The losses once more, from their papers alone: plain Python numbers, one token at a time, derivatives by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.config.schema import Algorithm


@dataclass(frozen=True, kw_only=True)
class Token:
    """One trained token; all logs are natural."""

    traj: str
    now: float
    old: float
    behaviour: float
    advantage: float
    weight: float
    reference: float = 0.0
    fresh: bool = True
    log_kept: float = 0.0
    """Of the mass that truncated sampling kept; `behaviour` is after it."""


@dataclass(frozen=True, kw_only=True)
class Naive:
    """Summed over tokens, before the division by the step's weight."""

    loss: float
    gradient: list[float]
    """Of the loss by each token's log-probability."""
    counts: Mapping[str, int]
    """masked, rejected, aged tokens and rejected trajectories."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _corrected(token: Token, siblings: Sequence[Token], algorithm: Algorithm) -> tuple[float, str]:
    """The weight of a token, and why it is 0."""
    if not token.fresh:
        return 0.0, "aged"
    if algorithm.reject.kind == "geometric":
        geometric = math.exp(_mean([one.old - one.behaviour for one in siblings]))
        if geometric < algorithm.reject.low or geometric > algorithm.reject.high:
            return 0.0, "rejected"
    ratio = math.exp(token.old - token.behaviour)
    if algorithm.correction.kind == "tis":
        return min(ratio, algorithm.correction.cap), ""
    if algorithm.correction.kind == "masked":
        inside = algorithm.correction.low <= ratio <= algorithm.correction.high
        return (ratio, "") if inside else (0.0, "masked")
    return (math.exp(token.log_kept), "") if algorithm.correction.kind == "clip" else (1.0, "")


def _surrogate(token: Token, siblings: Sequence[Token], algorithm: Algorithm) -> tuple[float, float]:
    """What is to be made larger, and its derivative by the token's log-probability."""
    rule = algorithm.loss
    advantage = token.advantage - algorithm.entropy_coef * token.now
    low, high = 1 - rule.eps_clip_low, 1 + rule.eps_clip_high
    ratio = math.exp(token.now - token.old)
    if algorithm.correction.kind == "clip":
        ratio = math.exp(token.now - token.behaviour - token.log_kept)
    if rule.kind == "cispo":
        weight = clip(ratio, low, high)
        return weight * advantage * token.now, weight * advantage
    if rule.kind == "gspo":
        # the whole derivative of s by this token is s / n, times n tokens of weight 1 / n each
        ratio = math.exp(_mean([one.now - one.old for one in siblings]))
    free, bounded = ratio * advantage, clip(ratio, low, high) * advantage
    if algorithm.correction.kind == "clip" and advantage < 0 and ratio > algorithm.correction.cap:
        return algorithm.correction.cap * advantage, 0.0
    return (free, free) if free <= bounded else (bounded, 0.0)


def _kl(token: Token, kind: str) -> tuple[float, float]:
    difference = token.now - token.reference
    match kind:
        case "k1":
            return difference, difference
        case "k2":
            return difference**2 / 2, difference
        case "k3":
            return math.exp(-difference) - 1 + difference, 1 - math.exp(-difference)
        case _:
            return 0.0, 0.0


def naive(tokens: Sequence[Token], algorithm: Algorithm) -> Naive:
    """All tokens of a step, in any order."""
    loss, gradient = 0.0, []
    counts = {"masked": 0, "rejected": 0, "aged": 0}
    for token in tokens:
        siblings = [one for one in tokens if one.traj == token.traj]
        weight, why = _corrected(token, siblings, algorithm)
        value, slope = _surrogate(token, siblings, algorithm)
        kl, kl_slope = _kl(token, algorithm.kl.kind)
        coef = algorithm.kl.coef if algorithm.kl.kind != "none" else 0.0
        if algorithm.correction.kind == "clip":
            coef *= min(math.exp(token.now - token.behaviour - token.log_kept), algorithm.correction.cap)
        loss += token.weight * weight * (coef * kl - value)
        gradient.append(token.weight * weight * (coef * kl_slope - slope))
        if why:
            counts[why] += 1
    return Naive(loss=loss, gradient=gradient, counts=counts)
