"""Communication of a training step: where a parallel group stands, and what its collectives and transfers take.

Owns the placement of groups on a fabric (tp innermost, then cp, dp, pp, as Megatron-LM numbers its ranks). Invariant: one
rank communicates nothing and no time; a group's ranks are spread evenly over the domains that its stride makes it span.
Why: the same all-reduce differs tenfold with the ranks' stride, and a step has to know which it is; the seconds
themselves are those of `collective_table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rollart.perf.collective_table import collective_estimate
from rollart.perf.collectives import Request
from rollart.perf.links import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parallel group: its size, and how many of its ranks share a domain."""

    ranks: int
    local: int

    @property
    def domains(self) -> int:
        """Domains that the group spans."""
        return math.ceil(self.ranks / self.local)


Collectives = Callable[[str, float, Group, Fabric], float]
"""(operation, bytes of a rank's whole buffer, group, fabric) -> seconds; operations as `collectives.Op` names them."""


def group(ranks: int, stride: int, fabric: Fabric) -> Group:
    """The group of `ranks` ranks that stand `stride` devices apart."""
    return Group(ranks=ranks, local=max(1, min(ranks, fabric.domain // stride)))


def collective_s(op: str, payload_bytes: float, where: Group, fabric: Fabric) -> float:
    """Seconds of one collective by the packaged model; 0 for one rank or no bytes."""
    if where.ranks <= 1 or payload_bytes <= 0:
        return 0.0
    asked = Request(op=op, ranks=where.ranks, payload_bytes=payload_bytes, fabric=fabric, nodes=where.domains)
    return collective_estimate(asked).seconds


def transfer_s(payload_bytes: float, *, stride: int, fabric: Fabric, collectives: Collectives = collective_s) -> float:
    """Seconds of a point-to-point transfer between ranks `stride` apart, all devices of a domain sending at once."""
    apart = Group(ranks=2, local=2 if stride < fabric.domain else 1)
    return collectives("send_recv", payload_bytes, apart, fabric)
