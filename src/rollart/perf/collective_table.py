"""Collective operations from measurements: curves over bytes, carried to other sizes, ranks, operations and devices.

Owns: the measured curves (`tables/collectives.json`) and what is made of them. A curve is kept as the log of measured over
analytic time (`collectives`), at knots in log bytes. The stated order of what an estimate rests on:

1. `measured`, `interpolated`: the curve of this operation, device, library, fabric, ranks and domains exists; between knots the
   log ratio is linear in log bytes, beyond the ends it stays what it is at the end.
2. `carried`: curves of the same chip and tier exist. The log ratio is their best linear unbiased combination (kriging) under
   one covariance: near in ranks counts more, as do the same pattern, library and generation, and a drift with the log of ranks
   is carried on. Each curve is read at bytes x (its ranks / our ranks) ** `RANK_SHIFT`, as protocol switches move with ranks.
3. `analytic`: no curve of this chip on this tier. The same combination, which then leans on other devices of the generation and
   falls back to the constants alone.

A network slower than the one that the chip's table names obeys the law of a faster one (`felt_network`).

Invariant: one rank or no bytes moved costs what the analytic model says, a known curve is reproduced at its knots, and
nothing is read but the table. Why: a ring's law is right within a factor of two, a measurement is right where it was made, and
the ratio of the two is smooth enough to be carried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from math import exp, log2, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollart.perf.collectives import Floats, Request, analytic_seconds, columns
from rollart.perf.links import BYTES_PER_GB, Fabric, domains
from rollart.perf.links import fabric as listed

Basis = Literal["measured", "interpolated", "carried", "analytic"]
RANK_SHIFT = 0.5
"""Half of the ranks' ratio: NCCL chooses protocols by bytes per rank for rings and by bytes for what is latency-bound."""
CENTRE_LOG2_RANKS = 2.0
"""Ranks about which the drift turns: 4, the middle of what single nodes are measured at."""
MOST_LOG2_RANKS = 7.0
"""The drift with ranks is carried up to 128, the most that was measured, and stays what it is there beyond."""
LINE_SHARE = 0.94
"""Of a network card's rated bytes, what data gets at best: 23.5 GB/s of 25 (SimAI's constant of a ConnectX-6)."""
PATTERN = {"all_gather": "one pass", "reduce_scatter": "one pass"}
"""Operations that move the same bytes the same way say most of each other; the others stand alone."""
COVARIANCE = {
    "reach": 8.0, "tier": 0.00003, "generation": 0.034, "pattern": 0.0085, "source_ranks": 0.024, "source_pattern": 0.0045,
    "drift": 0.0028, "drift_chip": 0.0056, "drift_source_pattern": 0.0085, "noise": 0.0042,
}  # fmt: skip
"""Variances of the log ratio that two curves share, by what they have in common (`_covariance`); `reach` is in log2 ranks.

Chosen once for the least error on held-back ranks and curves of the public rows, then scaled so that 19 of 20 of those
errors lie within two standard deviations.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a curve was measured of; also what a request asks for."""

    op: str
    device: str
    library: str
    ranks: int
    domains: int
    fabric: Fabric

    @property
    def tier(self) -> str:
        """Curves of different tiers tell each other nothing."""
        return "network" if self.domains > 1 else self.fabric.kind


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds at rising bytes, (knots,) each."""

    place: Place
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds, what they rest on, and the standard deviation of their log (0: not estimated)."""

    seconds: float
    basis: Basis
    log_std: float = 0.0


def place_of(request: Request, device: str = "", library: str = "nccl") -> Place:
    """Where `request` stands; `device` as written in the measurements, the fabric's chip by default."""
    return Place(
        op=request.op,
        device=device or request.fabric.chip,
        library=library,
        ranks=request.ranks,
        domains=domains(request.ranks, request.fabric, request.nodes),
        fabric=request.fabric,
    )


def log_analytic(place: Place, payload_bytes: Sequence[float], constants: Mapping[str, float]) -> Floats:
    """Log of the analytic seconds of one place at many sizes, (n,)."""
    rows = columns(
        [
            Request(op=place.op, ranks=place.ranks, payload_bytes=size, fabric=place.fabric, nodes=place.domains)
            for size in payload_bytes
        ]
    )
    return np.log(analytic_seconds(rows, constants))


@dataclass(frozen=True, kw_only=True)
class CollectiveModel:
    """Constants and curves; what is derived from them is computed once."""

    constants: Mapping[str, float]
    curves: tuple[Curve, ...] = ()
    covariance: Mapping[str, float] = field(default_factory=lambda: COVARIANCE)

    @cached_property
    def _log_ratios(self) -> tuple[tuple[Floats, Floats], ...]:
        """(log2 bytes, log of measured over analytic) of every curve."""
        return tuple(
            (
                np.log2(np.array(curve.payload_bytes)),
                np.log(np.array(curve.seconds)) - log_analytic(curve.place, curve.payload_bytes, self.constants),
            )
            for curve in self.curves
        )

    @cached_property
    def _index(self) -> dict[Place, int]:
        return {curve.place: index for index, curve in enumerate(self.curves)}

    @cached_property
    def _inverse(self) -> NDArray[np.floating[Any]]:
        places = [curve.place for curve in self.curves]
        matrix = _covariance(places, places, self.covariance) + self.covariance["noise"] * np.eye(len(places))
        return np.linalg.inv(matrix)

    @cached_property
    def _weights(self) -> dict[Place, tuple[list[float], float]]:
        """Filled as places are asked for: solving for weights once per place, not once per size."""
        return {}

    def knows(self, place: Place) -> bool:
        """Whether the place has a curve of its own."""
        return place in self._index

    def basis_without_curve(self, place: Place) -> Basis:
        """`carried` where the chip has curves on this tier, else `analytic`."""
        same = any(c.place.fabric.chip == place.fabric.chip and c.place.tier == place.tier for c in self.curves)
        return "carried" if same else "analytic"

    def log_ratio(self, place: Place, log2_bytes: float) -> tuple[float, float]:
        """Log of measured over analytic time, and its standard deviation, for a place at one size."""
        index = self._index.get(place)
        if index is not None:
            return float(np.interp(log2_bytes, *self._log_ratios[index])), sqrt(self.covariance["noise"])
        if not self.curves:
            return 0.0, 0.0
        if place not in self._weights:
            cross = _covariance([curve.place for curve in self.curves], [place], self.covariance)[:, 0]
            combined = self._inverse @ cross
            own = float(_covariance([place], [place], self.covariance)[0, 0])
            unexplained = max(0.0, own - float(combined @ cross))
            self._weights[place] = (combined.tolist(), sqrt(unexplained + self.covariance["noise"]))
        weights, spread = self._weights[place]
        total = 0.0
        for weight, curve, (log2_knots, ratios) in zip(weights, self.curves, self._log_ratios, strict=True):
            if weight:
                shift = RANK_SHIFT * log2(curve.place.ranks / place.ranks)
                total += weight * float(np.interp(log2_bytes + shift, log2_knots, ratios))
        return total, spread


def _covariance(left: Sequence[Place], right: Sequence[Place], of: Mapping[str, float]) -> Floats:
    """Covariance of the log ratios of two lists of places, (left, right); 0 between tiers."""

    def same(read: Callable[[Place], str]) -> NDArray[np.bool_]:
        first, second = np.array([read(p) for p in left]), np.array([read(p) for p in right])
        return np.asarray(first[:, None] == second[None, :])

    first = np.minimum(np.log2([place.ranks for place in left]), MOST_LOG2_RANKS)[:, None]
    second = np.minimum(np.log2([place.ranks for place in right]), MOST_LOG2_RANKS)[None, :]
    near = np.exp(-np.abs(first - second) / of["reach"])
    drift = (first - CENTRE_LOG2_RANKS) * (second - CENTRE_LOG2_RANKS)
    pattern, chip = same(lambda place: PATTERN.get(place.op, place.op)), same(lambda place: place.fabric.chip)
    generation = same(lambda place: place.fabric.generation or place.fabric.chip)
    source = same(lambda place: f"{place.device}/{place.library}")
    shared = (
        of["tier"]
        + of["generation"] * generation
        + near * (of["pattern"] * pattern + source * (of["source_ranks"] + of["source_pattern"] * pattern))
        + drift * (of["drift"] + of["drift_chip"] * chip + of["drift_source_pattern"] * (source & pattern))
    )
    return np.where(same(lambda place: place.tier), shared, 0.0)


def felt_network(fabric: Fabric, constants: Mapping[str, float]) -> Fabric:
    """The fabric whose law a slower network obeys, up to the network of the chip's table.

    What keeps collectives there below the rate of the cards (the host's buses, the switches, the library's channels) is a rate
    and no share of the cards': on a slower network they reach as much, up to `LINE_SHARE` of it.
    """
    own, rated = fabric.inter_bytes_per_s, listed(fabric.chip).inter_bytes_per_s
    if own >= rated:
        return fabric
    return replace(fabric, inter_bytes_per_s=min(rated, own * max(1.0, LINE_SHARE / constants["network_wire_simple"])))


def estimate(model: CollectiveModel, request: Request, device: str = "", library: str = "nccl") -> Estimate:
    """Seconds of `request` and what they rest on (the order of the module's head)."""
    place = place_of(request, device, library)
    known = model.knows(place)
    if not known and place.domains > 1:
        request = replace(request, fabric=felt_network(place.fabric, model.constants))
        rated = max(place.fabric.inter_bytes_per_s, listed(place.fabric.chip).inter_bytes_per_s)
        place = replace(
            place, fabric=replace(place.fabric, inter_bytes_per_s=rated)
        )  # the ratio is of the table's network
    seconds = float(analytic_seconds(columns([request]), model.constants)[0])
    if request.ranks <= 1 or request.payload_bytes <= 0:
        return Estimate(seconds=seconds, basis="analytic")
    ratio, spread = model.log_ratio(place, log2(request.payload_bytes))
    if not known:
        return Estimate(seconds=seconds * exp(ratio), basis=model.basis_without_curve(place), log_std=spread)
    knots = next(curve.payload_bytes for curve in model.curves if curve.place == place)
    basis: Basis = "measured" if request.payload_bytes in knots else "interpolated"
    return Estimate(seconds=seconds * exp(ratio), basis=basis, log_std=spread)


@lru_cache(maxsize=65536)
def collective_estimate(request: Request, device: str = "", library: str = "nccl") -> Estimate:
    """`estimate` by the model frozen in the package; equal requests are computed once."""
    return estimate(packaged(), request, device, library)


# ---- the table


@lru_cache(maxsize=1)
def packaged() -> CollectiveModel:
    """The model frozen in the package."""
    return model_from(json.loads((files("rollart.perf") / "tables" / "collectives.json").read_text(encoding="utf-8")))


def model_from(table: Mapping[str, Any]) -> CollectiveModel:
    """A model from a table in the format of `tables/collectives.json` (as `curve_entry` writes its curves)."""
    return CollectiveModel(
        constants={name: entry["value"] for name, entry in table["constants"].items()},
        curves=tuple(_curve(entry) for entry in table["curves"]),
    )


_FABRIC_FIELDS = ("chip", "kind", "domain", "generation", "provenance")


def curve_entry(curve: Curve) -> dict[str, Any]:
    """A curve as plain values, in microseconds."""
    place = curve.place
    return {
        "op": place.op, "device": place.device, "library": place.library, "ranks": place.ranks, "domains": place.domains,
        "fabric": {name: getattr(place.fabric, name) for name in _FABRIC_FIELDS}
        | {
            "intra_GBps": place.fabric.intra_bytes_per_s / BYTES_PER_GB,
            "inter_GBps": place.fabric.inter_bytes_per_s / BYTES_PER_GB,
            "nvls_GBps": place.fabric.nvls_bytes_per_s / BYTES_PER_GB,
        },
        "provenance": "measured", "source": curve.source,
        "bytes": [round(size) for size in curve.payload_bytes],
        "time_us": [float(f"{seconds * 1e6:.4g}") for seconds in curve.seconds],
    }  # fmt: skip


def _curve(entry: Mapping[str, Any]) -> Curve:
    fabric = entry["fabric"]
    return Curve(
        place=Place(
            op=entry["op"], device=entry["device"], library=entry["library"], ranks=entry["ranks"], domains=entry["domains"],
            fabric=Fabric(
                **{name: fabric[name] for name in _FABRIC_FIELDS},
                intra_bytes_per_s=fabric["intra_GBps"] * BYTES_PER_GB,
                inter_bytes_per_s=fabric["inter_GBps"] * BYTES_PER_GB,
                nvls_bytes_per_s=fabric["nvls_GBps"] * BYTES_PER_GB,
            ),
        ),
        payload_bytes=tuple(float(size) for size in entry["bytes"]),
        seconds=tuple(time * 1e-6 for time in entry["time_us"]),
        source=entry["source"],
    )  # fmt: skip
