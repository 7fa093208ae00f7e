"""Fits the overlap model of `overlap` to measured kernels.

Owns: the fitting of level 1 and level 2. Invariant: deterministic, and every estimate minimises (or is shrunk from what
minimises) the sum of absolute errors in time, which is the figure that is reported. Why: slowdowns are heavy-tailed (median
0.02, 99th percentile 8), so means of them describe no kernel.

Level 1 is judged on kernels that nobody measured, so each name has one vote, however often it ran, and two votes for "no
cost" stand beside them (`PRIOR_VOTES`). Level 2 shrinks a full name's slowdown towards its short name's, and that towards
level 1, as if `PRIOR_ROWS` more rows had been measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import ConfigError
from rollart.perf.overlap import LEAST_SLOWDOWN, Kernel, Level, OverlapModel, Step

PRIOR_VOTES = 2
"""Names for which a collective beside them cost nothing, added to those measured."""
PRIOR_ROWS = 1.0
"""Rows of the level above that a level's estimate is mixed with."""
LEAST_OVERLAP = 0.15
"""Below this share the slowdown is (T/T0 - 1) divided by almost nothing; such rows do not teach level 2."""
LEAST_LEAF_ROWS = 4
"""Rows on each side of a step."""
STEP_DEPTH = 2
"""Splits of splits: at most four intervals a kernel."""
LEAST_GAIN = 0.03
"""A step must take this share of the absolute error away."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A kernel's time alone, and its time while a collective ran beside it for a share of it."""

    kernel: Kernel
    overlap_ratio: float
    seconds: float


class _Sample(NamedTuple):
    """Slowdowns (n,), their weight in seconds (n,) and solo seconds (n,)."""

    slowdown: Floats
    weight: Floats
    solo_s: Floats


def fit(rows: Sequence[Measured], default_level: Level = 2) -> OverlapModel:
    """The model of `rows`; raises `ConfigError` where none of them is overlapped."""
    held_sms = fit_held_sms(rows)
    sms = rows[0].kernel.sms
    physical = held_sms / (sms - held_sms)
    strong = [row for row in rows if row.overlap_ratio > LEAST_OVERLAP]
    names: dict[str, Step] = {}
    full_names: dict[str, Step] = {}
    for name, group in _groups(strong, lambda row: row.kernel.name).items():
        sample = _sample(group)
        middle = _shrunk(sample, physical)
        names[name] = Step(edges_s=(), values=(middle,))
        for full_name, variants in _groups(group, lambda row: row.kernel.full_name).items():
            if full_name:
                full_names[full_name] = _steps(_sample(variants), middle, STEP_DEPTH)
    return OverlapModel(held_sms=held_sms, names=names, full_names=full_names, default_level=default_level)


def fit_held_sms(rows: Iterable[Measured]) -> float:
    """SMs that the collective holds, by one vote per kernel name; 0 or more."""
    overlapped = [row for row in rows if row.overlap_ratio > 0]
    if not overlapped:
        raise ConfigError("no row is overlapped: a slowdown cannot be fitted; measure kernels beside a collective")
    sms = {row.kernel.sms for row in overlapped}
    if len(sms) != 1:
        raise ConfigError(f"rows of devices with {sorted(sms)} SMs: fit one device at a time")
    votes = [_median(_sample(group)) for group in _groups(overlapped, lambda row: row.kernel.name).values()]
    middle = max(0.0, float(np.median([*votes, *[0.0] * PRIOR_VOTES])))
    return sms.pop() * middle / (1 + middle)


def _groups(rows: Iterable[Measured], key: Callable[[Measured], str]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return dict(sorted(found.items()))


def _sample(rows: Sequence[Measured]) -> _Sample:
    solo_s = np.array([row.kernel.solo_s for row in rows])
    ratio = np.array([row.overlap_ratio for row in rows])
    seconds = np.array([row.seconds for row in rows])
    # |T - T0 (1 + s r)| = T0 r |s_seen - s|: the weight of a row is the time that its slowdown acts on
    return _Sample((seconds / solo_s - 1) / ratio, solo_s * ratio, solo_s)


def _median(sample: _Sample) -> float:
    order = np.argsort(sample.slowdown, kind="stable")
    weight = np.cumsum(sample.weight[order])
    return float(sample.slowdown[order][np.searchsorted(weight, weight[-1] / 2)])


def _shrunk(sample: _Sample, towards: float) -> float:
    count = len(sample.slowdown)
    return max(LEAST_SLOWDOWN, (count * _median(sample) + PRIOR_ROWS * towards) / (count + PRIOR_ROWS))


def _steps(sample: _Sample, towards: float, depth: int) -> Step:
    """The step function in solo time that takes most absolute error away, split after split."""
    value = _shrunk(sample, towards)
    edge = _best_edge(sample) if depth else None
    if edge is None:
        return Step(edges_s=(), values=(value,))
    below = sample.solo_s <= edge
    low = _steps(_Sample(*(column[below] for column in sample)), value, depth - 1)
    high = _steps(_Sample(*(column[~below] for column in sample)), value, depth - 1)
    return Step(edges_s=(*low.edges_s, edge, *high.edges_s), values=(*low.values, *high.values))


def _best_edge(sample: _Sample) -> float | None:
    order = np.argsort(sample.solo_s, kind="stable")
    solo_s = sample.solo_s[order]
    least, best = _absolute_error(sample) * (1 - LEAST_GAIN), None
    for cut in range(LEAST_LEAF_ROWS, len(order) - LEAST_LEAF_ROWS + 1):
        if solo_s[cut - 1] == solo_s[cut]:
            continue
        sides = (order[:cut], order[cut:])
        error = sum(_absolute_error(_Sample(*(column[side] for column in sample))) for side in sides)
        if error < least:
            least, best = error, float((solo_s[cut - 1] + solo_s[cut]) / 2)
    return best


def _absolute_error(sample: _Sample) -> float:
    return float((sample.weight * np.abs(sample.slowdown - _median(sample))).sum())
