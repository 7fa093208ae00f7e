"""Laws of random quantities, drawn from addresses: the same trajectory draws the same numbers under every schedule.

Owns the five laws that workloads are written in. Invariant: a draw is a function of the law and of a number in (0, 1), so
what a schedule does first changes nothing.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollart.config.node import Node, refuse
from rollart.core.seeds import unit

_NORMAL = NormalDist()


def normal(*address: object) -> float:
    """A standard normal number for what it is for."""
    return _NORMAL.inv_cdf(unit(*address))


class Constant(Node):
    """Always the same."""

    law: Literal["constant"] = "constant"
    value: float = Field(ge=0)

    def at(self, place: float) -> float:
        return self.value


class Uniform(Node):
    """Each value between two equally likely."""

    law: Literal["uniform"]
    low: float = Field(ge=0)
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        refuse(None if self.high >= self.low else f"high={self.high} is below low={self.low}; use {self.low} or more")
        return self

    def at(self, place: float) -> float:
        return self.low + place * (self.high - self.low)


class LogNormal(Node):
    """Skewed: half are below the median, a few are many times it."""

    law: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    """Deviation of the logarithm."""
    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=1e12, gt=0)
    """Draws are clipped to low .. high."""

    def at(self, place: float) -> float:
        return min(self.high, max(self.low, self.median * math.exp(self.sigma * _NORMAL.inv_cdf(place))))


class ClippedNormal(Node):
    """A bell curve whose part below 0 is put at 0."""

    law: Literal["normal"]
    mean: float
    sigma: float = Field(ge=0)

    def at(self, place: float) -> float:
        return max(0.0, self.mean + self.sigma * _NORMAL.inv_cdf(place))


class Mixture(Node):
    """One of two laws, the second with a chance."""

    law: Literal["mixture"]
    usual: Constant | Uniform | LogNormal | ClippedNormal = Field(discriminator="law")
    other: Constant | Uniform | LogNormal | ClippedNormal = Field(discriminator="law")
    chance: float = Field(ge=0, le=1)
    """Of the other."""

    def at(self, place: float) -> float:
        if place < self.chance:
            return self.other.at(max(place / self.chance, 1e-12))
        return self.usual.at(min(max((place - self.chance) / (1.0 - self.chance), 1e-12), 1.0 - 1e-12))


Law = Annotated[Constant | Uniform | LogNormal | ClippedNormal | Mixture, Field(discriminator="law")]
