"""Lengths of answers and what follows from them for a batch that is kept full or runs empty.

Owns: two laws of length. Invariant: the mean is the given one whatever the longest. Why: which sequences run together, how
long a burst takes to end and what the cache holds depend on the law of lengths and not on its mean alone.

`fixed`: all alike. `varied`: exponential up to a longest one at which the rest ends: answers of chat data sets as the usual
loaders cut them (filtered ShareGPT: mean 195, median 130, 90th percentile 470); above a shortest one where the short were
left out, which an exponential law does not notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

LONGEST_TOGETHER = 2048.0
LONGEST_OVER_MEAN = 1.5
"""A varied answer ends where it has 2,048 tokens with its prompt (the filter of the loaders), or at one and a half times the
mean where that is more."""
BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths with mean `mean`; `scale` 0: all alike, else `shortest` and an exponential of that scale, cut at `longest`."""

    mean: float
    scale: float = 0.0
    longest: float = 0.0
    shortest: float = 0.0

    @property
    def _cut(self) -> float:
        """Share of the lengths that the longest one cuts."""
        return math.exp(-(self.longest - self.shortest) / self.scale)

    def quantile(self, share: float) -> float:
        """The length that so many are shorter than."""
        if not self.scale:
            return self.mean
        return min(self.shortest - self.scale * math.log(max(1.0 - share, 1e-300)), self.longest)

    @property
    def age(self) -> float:
        """Mean tokens that a running sequence has already got: long ones are met more often."""
        if not self.scale:
            return self.mean / 2.0
        ratio, more = (self.longest - self.shortest) / self.scale, self.mean - self.shortest
        square = 2.0 * self.scale**2 * (1.0 - math.exp(-ratio) * (1.0 + ratio))
        return (self.shortest**2 + 2.0 * self.shortest * more + square) / (2.0 * self.mean)

    def left(self, steps: float, renewed: float) -> float:
        """Share of a batch still running `steps` after the last admission.

        `renewed` 0: all began together; 1: the batch was kept full before, and what is left of each has its own law.
        """
        if not self.scale:
            fresh, kept = float(steps < self.mean), max(1.0 - steps / self.mean, 0.0)
        elif steps < self.shortest:
            fresh, kept = 1.0, 1.0 - steps / self.mean
        else:
            alive = math.exp(-(steps - self.shortest) / self.scale)
            fresh = alive if steps < self.longest else 0.0
            kept = self.scale * max(alive - self._cut, 0.0) / self.mean
        return renewed * kept + (1.0 - renewed) * fresh

    def last(self, batch: float, renewed: float) -> float:
        """Steps until the last of `batch` ends, on average."""
        if not self.scale:
            return self.mean
        one = math.exp(-0.5772) / max(batch, 1.0)
        fresh = min(self.shortest - self.scale * math.log(one), self.longest)
        kept = self.shortest - self.scale * math.log(one * self.mean / self.scale + self._cut)
        if kept < self.shortest:
            kept = (1.0 - one) * self.mean
        return max(renewed * kept + (1.0 - renewed) * fresh, 1.0)


@cache
def varied(mean: float, prompt: float, shortest: float = 0.0) -> Lengths:
    """Exponential lengths of that mean after prompts of that mean, with the usual longest one and none below `shortest`."""
    longest, more = max(LONGEST_TOGETHER - prompt, LONGEST_OVER_MEAN * mean), mean - shortest
    low, high = more, 100.0 * more
    for _ in range(BISECTIONS):
        scale = (low + high) / 2.0
        low, high = (scale, high) if scale * (1.0 - math.exp(-(longest - shortest) / scale)) < more else (low, scale)
    return Lengths(mean, high, longest, shortest)
