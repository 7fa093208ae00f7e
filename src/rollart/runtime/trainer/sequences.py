"""Means over whole trajectories, which the loss of a token may depend on although its segments are trained apart.

Owns what GSPO's ratio (present over old) and rejection (old over behaviour) need: the mean log-ratio over all trained tokens
of a trajectory. Invariant: it is the same however the trajectory is cut into segments, and however those are spread over
micro-batches and ranks. Where a trajectory lies in one micro-batch, its own forward pass gives the mean; where any is spread,
a pass without gradient over all of them comes first, and the sums are added over ranks. All segments of a trajectory must
come in one `accumulate`; a part of one is refused, since its mean would be another quantity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.config.schema import Algorithm
from rollart.core.errors import TrainerError
from rollart.core.types import TrajId
from rollart.runtime.trainer.rows import LossRow, LossTerms, SampleKey

SHARE_TOLERANCE = 1e-6
"""Shares of a trajectory's segments are fractions that sum to 1, to rounding."""

Logs = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Over the tokens of one trajectory, as far as they were seen."""

    share: float = 0.0
    """Of the trajectory; 1 when all of it was seen."""
    tokens: int = 0
    move: float = 0.0
    """Of present - old log-probabilities."""
    gap: float = 0.0
    """Of old - behaviour log-probabilities; NaN where behaviour is not known."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            share=self.share + other.share,
            tokens=self.tokens + other.tokens,
            move=self.move + other.move,
            gap=self.gap + other.gap,
        )

    @property
    def whole(self) -> bool:
        return abs(self.share - 1.0) <= SHARE_TOLERANCE


Totals = Mapping[TrajId, Sums]


def needed(algorithm: Algorithm) -> bool:
    """Whether a token's loss depends on its whole trajectory."""
    return algorithm.loss.kind == "gspo" or algorithm.reject.kind == "geometric"


def spread(micro_batches: Sequence[Sequence[LossRow]]) -> bool:
    """Whether some micro-batch holds a part of a trajectory only."""
    for rows in micro_batches:
        shares: dict[TrajId, float] = {}
        for one in rows:
            shares[one.key[0]] = shares.get(one.key[0], 0.0) + one.share
        if any(not Sums(share=share).whole for share in shares.values()):
            return True
    return False


def totals(rows: Iterable[LossRow], now: Iterable[Logs], old: Mapping[SampleKey, NDArray[np.float32]]) -> Totals:
    """Sums per trajectory over these rows; `now`: (trained,) per row. Without recomputed ones the present are the old."""
    found: dict[TrajId, Sums] = {}
    for one, present in zip(rows, now, strict=True):
        exact = np.asarray(present, np.float64)
        before = np.asarray(old[one.key], np.float64) if one.key in old else exact
        part = Sums(
            share=one.share,
            tokens=len(exact),
            move=float(np.sum(exact - before)),
            gap=float(np.sum(before - one.row.behaviour)),
        )
        found[one.key[0]] = found.get(one.key[0], Sums()) + part
    return found


def added(parts: Iterable[Totals]) -> Totals:
    """The sums of all ranks. Raises TrainerError naming a trajectory of which a part is missing."""
    found: dict[TrajId, Sums] = {}
    for part in parts:
        for traj, sums in part.items():
            found[traj] = found.get(traj, Sums()) + sums
    for traj, sums in found.items():
        if not sums.whole:
            raise TrainerError(
                f"trajectory {traj} came with {sums.share:.3g} of its weight in one accumulate; algorithm.loss.kind=gspo and "
                "algorithm.reject need means over whole trajectories: hand over all of its segments together"
            )
    return found


def filled(terms: LossTerms, rows: Sequence[LossRow], whole: Totals) -> LossTerms:
    """`terms` with the means of each token's trajectory."""
    counts = [len(one.row.targets) for one in rows]
    sums = [whole[one.key[0]] for one in rows]

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), counts))

    return replace(
        terms,
        move=per_token([one.move / one.tokens for one in sums]),
        gap=per_token([one.gap / one.tokens for one in sums]),
    )


def rejected(rows: Sequence[LossRow], terms: LossTerms, algorithm: Algorithm) -> float:
    """Trajectories that are out of the loss as a whole, counted by their shares in these rows."""
    rule = algorithm.reject
    if rule.kind == "none" or terms.gap is None:
        return 0.0
    ends = np.cumsum([len(one.row.targets) for one in rows])
    means = torch.exp(terms.gap).numpy()
    return sum(
        one.share for one, end in zip(rows, ends, strict=True) if not rule.low <= float(means[end - 1]) <= rule.high
    )
