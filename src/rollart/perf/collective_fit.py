"""Fits the collective models to measurements: constants of the closed forms, and curves.

Owns: the search for the constants, the making of curves from rows, and the two-parameter law that both are compared with.
Invariant: deterministic; every estimate minimises relative error |predicted / measured - 1|, or its logarithm where the
constants are searched, and constants that no row tells about stay at their published start. Why: errors are reported as
means of relative errors over sizes that span six decades, which a least-squares fit in seconds would see only the top of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, floor, log2

import numpy as np

from rollart.core.errors import ConfigError
from rollart.perf.collective_table import CollectiveModel, Curve, Place, log_analytic, place_of
from rollart.perf.collectives import Floats, Request, analytic_seconds, columns

START = {
    "base_ll_us": (6.6, "NCCL tuning table (tuning.cc baseLat, ring LL 6.6 us)"),
    "base_ll128_us": (14.0, "NCCL tuning table (baseLat, ring LL128 14 us)"),
    "base_simple_us": (20.0, "assumed: launch and the first fill of the buffers"),
    "hop_ll_us": (0.6, "NCCL tuning table (hwLat, NVLink ring LL 0.6 us)"),
    "hop_ll128_us": (1.9, "NCCL tuning table (hwLat, NVLink ring LL128 1.9 us)"),
    "hop_simple_us": (3.4, "NCCL tuning table (hwLat, NVLink ring Simple 3.4 us)"),
    "wire_ll": (0.25, "LL carries 4 bytes of data in 8 and is bound by flags: a quarter to a half"),
    "wire_ll128": (0.6, "LL128 carries 120 bytes of 128, at the rate of stores"),
    "wire_simple": (0.77, "SimAI: efficiency of 1 GiB in one node"),
    "own_copy": (1.9, "near the NVLink curves of collectives.csv: twice the link's rate"),
    "exchange_hop": (0.5, "assumed: half a hop to issue one more send"),
    "network_ring_ll_us": (9.3, "SimAI: network ring LL"),
    "network_ring_ll128_us": (18.0, "SimAI: network ring LL128"),
    "network_ring_simple_us": (22.4, "SimAI: network ring Simple"),
    "network_tree_ll_us": (11.8, "SimAI: network tree LL"),
    "network_tree_ll128_us": (22.5, "SimAI: network tree LL128"),
    "network_tree_simple_us": (22.4, "SimAI: network tree Simple"),
    "network_wire_ll": (0.25, "as wire_ll"),
    "network_wire_ll128": (0.6, "as wire_ll128"),
    "network_wire_simple": (0.67, "SimAI: network efficiency of 128 MiB among 16 devices"),
    "tree_wire": (0.9, "NCCL tuning: trees reach about nine tenths of a ring's bandwidth"),
    "pcie_sharing": (1.0, "assumed: ranks beyond a pair share one host bridge evenly; above 1: they contend"),
    "base_nvls_us": (25.0, "SimAI: NVLS latency"),
    "wire_nvls": (1.0, "SimAI: the switch's cap is what is reached"),
}  # fmt: skip
"""Where the search for each constant begins, and who says so."""
SHARES = (
    "wire_ll",
    "wire_ll128",
    "wire_simple",
    "network_wire_ll",
    "network_wire_ll128",
    "network_wire_simple",
    "tree_wire",
    "wire_nvls",
)
"""Constants that are shares of a rated bandwidth: at most 1."""
WIDEST_FACTOR = 4.0
"""No constant leaves its published start by more: beyond it, one would stand in for what the model lacks."""
SWEEPS = 8
FIRST_STEP = 0.3
GROWTH, SHRINKAGE = 1.3, 0.5
WORST_LOG_ERROR = 1.0
"""Rows that are off by more than a factor e count no more: mislabelled rows must not steer constants."""
LEAST_GAIN = 1e-7
KNOTS_PER_OCTAVE = 2
"""Rows of a curve that lie closer are pooled."""
STRAIGHT = 0.01
"""A knot whose log time is this near the line between its neighbours is left out of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A collective that was timed; `device` and `library` as `collective_table.place_of` takes them."""

    request: Request
    device: str
    library: str
    seconds: float
    source: str = ""


def fit_constants(rows: Sequence[Timed]) -> dict[str, float]:
    """Constants by coordinate search on the mean absolute log error, from `START`."""
    constants = {name: value for name, (value, _) in START.items()}
    if not rows:
        return constants
    requests = columns([row.request for row in rows])
    measured = np.log(np.array([row.seconds for row in rows]))

    def loss(tried: Mapping[str, float]) -> float:
        return float(np.minimum(np.abs(np.log(analytic_seconds(requests, tried)) - measured), WORST_LOG_ERROR).mean())

    least, steps = loss(constants), dict.fromkeys(constants, FIRST_STEP)
    for _ in range(SWEEPS):
        for name, step in steps.items():
            start = START[name][0]
            most = min(start * WIDEST_FACTOR, 1.0) if name in SHARES else start * WIDEST_FACTOR
            for sign in (1, -1):
                value = min(max(constants[name] * exp(sign * step), start / WIDEST_FACTOR), most)
                error = loss({**constants, name: value})
                if error < least - LEAST_GAIN:
                    least, constants[name], steps[name] = error, value, step * GROWTH
                    break
            else:
                steps[name] = step * SHRINKAGE
    return constants


# ---- curves


def curves_of(rows: Sequence[Timed], constants: Mapping[str, float]) -> tuple[Curve, ...]:
    """One curve per place, by place; a knot is the middle of the log ratios of its rows, weighted for relative error."""
    groups: dict[Place, list[Timed]] = {}
    for row in rows:
        groups.setdefault(place_of(row.request, row.device, row.library), []).append(row)
    return tuple(
        _curve(place, group, constants) for place, group in sorted(groups.items(), key=lambda item: repr(item[0]))
    )


def _curve(place: Place, rows: Sequence[Timed], constants: Mapping[str, float]) -> Curve:
    by_size: dict[float, list[float]] = {}
    for row in rows:
        by_size.setdefault(row.request.payload_bytes, []).append(row.seconds)
    sizes = sorted(by_size)
    logs = dict(zip(sizes, log_analytic(place, sizes, constants), strict=True))
    bins: dict[int, list[float]] = {}
    for size in sizes:
        bins.setdefault(floor(log2(size) * KNOTS_PER_OCTAVE + 1e-9), []).append(size)
    knots: list[tuple[float, float]] = []
    for members in bins.values():
        ratios = np.array([np.log(seconds) - logs[size] for size in members for seconds in by_size[size]])
        centre = 2 ** float(np.mean(np.log2(members)))
        knots.append((centre, relative_middle(ratios) + float(log_analytic(place, [centre], constants)[0])))
    kept = _bent(place, knots, constants)
    return Curve(
        place=place,
        payload_bytes=tuple(size for size, _ in kept),
        seconds=tuple(exp(log_time) for _, log_time in kept),
        source=rows[0].source,
    )


def relative_middle(log_ratios: Floats) -> float:
    """The value whose exponential has the least mean relative error to those of `log_ratios`: a median weighted by 1/ratio."""
    order = np.sort(log_ratios)
    weight = np.cumsum(np.exp(order[0] - order))
    return float(order[np.searchsorted(weight, weight[-1] / 2)])


def _bent(
    place: Place, knots: Sequence[tuple[float, float]], constants: Mapping[str, float]
) -> list[tuple[float, float]]:
    """Knots without those that the line between the kept ones gives within `STRAIGHT`."""
    sizes = [size for size, _ in knots]
    x = np.log2(sizes)
    y = np.array([log_time for _, log_time in knots]) - log_analytic(place, sizes, constants)
    kept = {0, len(knots) - 1}
    while True:
        known = sorted(kept)
        gap = np.abs(np.interp(x, x[known], y[known]) - y)
        worst = int(np.argmax(gap))
        if gap[worst] <= STRAIGHT:
            return [knots[index] for index in known]
        kept.add(worst)


def fit(rows: Sequence[Timed]) -> CollectiveModel:
    """Constants and curves of `rows`; raises `ConfigError` without rows."""
    if not rows:
        raise ConfigError("no timed collective to fit: measure at least one curve")
    constants = fit_constants(rows)
    return CollectiveModel(constants=constants, curves=curves_of(rows, constants))


# ---- the law that everyone knows


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBandwidth:
    """T = latency x steps + stretch x bytes over the wire / rated bandwidth: the two-parameter law."""

    latency_s: float
    stretch: float

    def seconds(self, request: Request) -> float:
        """Seconds of one collective."""
        rows = columns([request])
        return float(self.latency_s * rows.steps[0] + self.stretch * rows.wire_bytes[0] / rows.rated[0])


def fit_latency_bandwidth(rows: Sequence[Timed]) -> LatencyBandwidth:
    """The law of `rows` with the least squares of relative errors; parameters are kept at 0 or above."""
    requests = columns([row.request for row in rows])
    seconds = np.array([row.seconds for row in rows])
    design = np.stack([requests.steps, requests.wire_bytes / requests.rated], axis=1) / seconds[:, None]
    latency_s, stretch = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    if latency_s < 0:
        latency_s, stretch = 0.0, _one(design[:, 1])
    elif stretch < 0:
        latency_s, stretch = _one(design[:, 0]), 0.0
    return LatencyBandwidth(latency_s=float(latency_s), stretch=float(stretch))


def _one(column: Floats) -> float:
    return float(column.sum() / (column @ column))
