"""Communication of a training step: where a parallel group stands, and what its collectives take.

Owns the placement of groups on a fabric (tp innermost, then cp, dp, pp, as Megatron-LM numbers its ranks) and the two-tier
ring law in seconds. Invariant: time grows with bytes, and a group inside one domain is never slower than the same group
spread. Why: the same all-reduce differs tenfold with the ranks' stride, and a step has to know which it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollart.perf.links import Fabric

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often a ring moves (n-1)/n of the bytes past each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommLaw:
    """Ring efficiencies shared by all fabrics (see `tables/training_calibration.json`).

    `intra_fraction`, `inter_fraction`: of the stated rate that large messages reach; `half_bytes`: message size at which a rank reaches half
    of it; `intra_latency_s`, `inter_latency_s`: per collective, and per doubling of the ranks across domains.
    """

    intra_fraction: float = 0.78
    inter_fraction: float = 0.80
    half_bytes: float = 4e6
    intra_latency_s: float = 20e-6
    inter_latency_s: float = 15e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parallel group: its size, and how many of its ranks share a domain."""

    ranks: int
    local: int

    @property
    def domains(self) -> int:
        """Domains that the group spans."""
        return math.ceil(self.ranks / self.local)


def group(ranks: int, stride: int, fabric: Fabric) -> Group:
    """The group of `ranks` ranks that stand `stride` devices apart."""
    return Group(ranks=ranks, local=max(1, min(ranks, fabric.domain // stride)))


def collective_s(op: Collective, payload_bytes: float, where: Group, fabric: Fabric, law: CommLaw) -> float:
    """Seconds of one collective; `payload_bytes` is the whole tensor (gathered or before reduction), per rank for all-to-all.

    Across domains the ring's bandwidth is that of its `local` network cards together, at most the domain's own links.
    """
    if where.ranks <= 1 or payload_bytes <= 0:
        return 0.0
    local_rate = fabric.intra_bytes_per_s * law.intra_fraction
    latency_s = law.intra_latency_s * math.log2(where.ranks + 1)
    moved = PASSES[op] * payload_bytes * (where.ranks - 1) / where.ranks
    if where.domains == 1:
        return moved / (local_rate * payload_bytes / (payload_bytes + law.half_bytes)) + latency_s
    network = fabric.inter_bytes_per_s * law.inter_fraction
    latency_s += law.inter_latency_s * math.log2(where.domains + 1)
    if op == "all_to_all":
        outside = payload_bytes * (where.ranks - where.local) / where.ranks
        return outside / network + (moved - outside) / local_rate + latency_s
    rate = min(local_rate, network * where.local)
    per_domain = law.half_bytes * math.sqrt(where.domains)
    return moved / (rate * payload_bytes / (payload_bytes + per_domain)) + latency_s


def transfer_s(payload_bytes: float, *, stride: int, fabric: Fabric, law: CommLaw) -> float:
    """Seconds of a point-to-point transfer between ranks `stride` apart, all devices of a domain sending at once."""
    if payload_bytes <= 0:
        return 0.0
    if stride < fabric.domain:
        return payload_bytes / (fabric.intra_bytes_per_s * law.intra_fraction) + law.intra_latency_s
    return payload_bytes / (fabric.inter_bytes_per_s * law.inter_fraction) + law.intra_latency_s + law.inter_latency_s
