"""Collective operations from constants: the fastest of the algorithms and protocols that a fabric allows.

Owns: the closed forms of ring, tree, direct exchange and reduction in the switch under the three protocols of NCCL, over
the tiers of `links.Fabric`. Invariant: time grows with bytes, never falls below the wire time at the rate of the link (or
of the switch that reduces), is 0 for one rank, and a ring's all-reduce takes as long as its reduce-scatter or all-gather of
equal bytes, or longer. Why: this
is what is left when nothing was measured, and the shape along which measured curves are carried to other sizes and
ranks (`collective_table`).

Bytes are those of `nccl-tests`: the whole buffer of a rank (gathered output, reduced input, sent input of all-to-all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import ConfigError
from rollart.perf.links import Fabric, Transfer, domains

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "send_recv"]
OPS: tuple[str, ...] = get_args(Op)
PROTOCOLS = ("ll", "ll128", "simple")
PCIE_PAIR = 2
"""Devices that one PCIe switch joins; the rings of more cross the host's bridges, whose rate they share."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Collectives as columns, one row each; all arrays are (n,)."""

    op: NDArray[np.int64]
    """Index in `OPS`."""
    ranks: Floats
    domains: Floats
    payload_bytes: Floats
    intra: Floats
    inter: Floats
    nvls: Floats
    pcie: NDArray[np.bool_]
    share: Floats
    """Bytes over a rank's busiest link direction, as a share of the payload (`wire_share`)."""
    steps: Floats
    """Hops one after the other round a ring (`ring_steps`)."""

    @property
    def wire_bytes(self) -> Floats:
        """Bytes over a rank's busiest link direction, (n,)."""
        return self.share * self.payload_bytes

    @property
    def rated(self) -> Floats:
        """Bytes per second of the tier that binds a ring, (n,): the devices' links, or a domain's network cards together."""
        return np.where(self.domains > 1, np.minimum(self.intra, self.inter * self.ranks / self.domains), self.intra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective of `ranks` devices spread evenly over `nodes` hosts (None: the fewest that hold them)."""

    op: str
    ranks: int
    payload_bytes: float
    fabric: Fabric
    nodes: int | None = None


def columns(requests: Sequence[Request]) -> Requests:
    """Requests as arrays; raises `ConfigError` for an unknown operation, no ranks or bytes that are no number."""
    for request in requests:
        if request.op not in OPS:
            raise ConfigError(f"unknown collective {request.op!r}; known: {', '.join(OPS)}")
        if request.ranks < 1 or not np.isfinite(request.payload_bytes) or request.payload_bytes < 0:
            raise ConfigError(
                f"{request.op} of {request.payload_bytes} bytes among {request.ranks} ranks: need 1 or more"
            )
    op = np.array([OPS.index(request.op) for request in requests], dtype=np.int64)
    ranks = _floats(request.ranks for request in requests)
    return Requests(
        op=op,
        ranks=ranks,
        domains=_floats(domains(request.ranks, request.fabric, request.nodes) for request in requests),
        payload_bytes=_floats(request.payload_bytes for request in requests),
        intra=_floats(request.fabric.intra_bytes_per_s for request in requests),
        inter=_floats(request.fabric.inter_bytes_per_s for request in requests),
        nvls=_floats(request.fabric.nvls_bytes_per_s for request in requests),
        pcie=np.array([request.fabric.kind == "pcie" for request in requests], dtype=np.bool_),
        share=wire_share(op, ranks),
        steps=ring_steps(op, ranks),
    )


def _floats(values: object) -> Floats:
    return np.array(list(values), dtype=np.float64)  # type: ignore[call-overload]


# ---- closed forms


def wire_share(op: NDArray[np.int64], ranks: Floats) -> Floats:
    """Bytes over a rank's busiest link direction, as a share of the payload, (n,)."""
    others = (ranks - 1) / ranks
    table = {"all_reduce": 2 * others, "broadcast": np.ones_like(ranks), "send_recv": np.ones_like(ranks)}
    return np.select([op == OPS.index(name) for name in table], list(table.values()), others)


def ring_steps(op: NDArray[np.int64], ranks: Floats) -> Floats:
    """Hops that a byte waits for one after the other: twice round the ring for a reduction that is handed back."""
    table = {"all_reduce": 2 * (ranks - 1), "send_recv": np.ones_like(ranks)}
    return np.select([op == OPS.index(name) for name in table], list(table.values()), ranks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One algorithm under one protocol, with its seconds for all rows ((n,), inf where it does not apply)."""

    name: str
    seconds: Floats


def _ring(rows: Requests, constants: Mapping[str, float], protocol: str) -> Floats:
    per_domain = rows.ranks / rows.domains
    exchange = rows.op == OPS.index("alltoall")
    # an exchange posts all its sends at once; what is left of a hop is issuing it
    hop_s = constants[f"hop_{protocol}_us"] * 1e-6 * np.where(exchange, constants["exchange_hop"], 1.0)
    network_share = np.where(
        rows.domains > 1, np.where(exchange, 1 - per_domain / rows.ranks, rows.domains / rows.ranks), 0.0
    )
    network_hop_s = constants[f"network_ring_{protocol}_us"] * 1e-6
    latency_s = constants[f"base_{protocol}_us"] * 1e-6 + rows.steps * (
        (1 - network_share) * hop_s + network_share * np.where(exchange, hop_s, network_hop_s)
    )
    seconds: Floats = latency_s + _wire_seconds(rows, constants, protocol)
    return seconds


def _tree(rows: Requests, constants: Mapping[str, float], protocol: str) -> Floats:
    """Double binary tree between domains, a chain inside: the network's latency grows with the log of the domains."""
    per_domain = rows.ranks / rows.domains
    latency_s = 1e-6 * (
        constants[f"base_{protocol}_us"]
        + 2 * (per_domain - 1) * constants[f"hop_{protocol}_us"]
        + 2 * np.log2(rows.domains) * constants[f"network_tree_{protocol}_us"]
    )
    applies = (rows.op == OPS.index("all_reduce")) & (rows.domains > 1)
    return np.where(applies, latency_s + _wire_seconds(rows, constants, protocol) / constants["tree_wire"], np.inf)


def _switch(rows: Requests, constants: Mapping[str, float]) -> Floats:
    """All-reduce in the switch: bus bandwidth up to the switch's cap, whatever the ranks."""
    applies = (rows.op == OPS.index("all_reduce")) & (rows.domains == 1) & (rows.nvls > 0) & (rows.ranks > PCIE_PAIR)
    rate = np.where(rows.nvls > 0, rows.nvls, 1.0) * constants["wire_nvls"]
    seconds = constants["base_nvls_us"] * 1e-6 + rows.wire_bytes / rate
    return np.where(applies, seconds, np.inf)


def _wire_seconds(rows: Requests, constants: Mapping[str, float], protocol: str) -> Floats:
    """Seconds on the busiest wire plus the rank's own share, which is copied on the device at a rate of its own."""
    reach = np.where(rows.pcie, np.minimum(1.0, PCIE_PAIR / rows.ranks) ** constants["pcie_sharing"], 1.0)
    local = rows.intra * reach * constants[f"wire_{protocol}"]
    per_domain = rows.ranks / rows.domains
    network = rows.inter * constants[f"network_wire_{protocol}"]
    exchange = rows.op == OPS.index("alltoall")
    # a ring enters a domain once and leaves it once, on the network cards of all its devices together
    ring_rate = np.where(rows.domains > 1, np.minimum(local, per_domain * network), local)
    ring_s = rows.wire_bytes / ring_rate
    remote = np.where(rows.domains > 1, 1 - per_domain / rows.ranks, 0.0)
    exchange_s = rows.payload_bytes * np.maximum((rows.share - remote) / local, remote / network)
    own_s = rows.payload_bytes / rows.ranks / (rows.intra * constants["own_copy"])
    seconds: Floats = np.where(exchange, exchange_s, ring_s) + np.where(rows.op == OPS.index("send_recv"), 0.0, own_s)
    return seconds


def analytic_ways(rows: Requests, constants: Mapping[str, float]) -> tuple[tuple[str, ...], Floats]:
    """Names of the algorithm-and-protocol pairs and their seconds, (ways, n); inf where a pair does not apply."""
    ways = [_Way(name="nvls/simple", seconds=_switch(rows, constants))]
    algorithms: tuple[tuple[str, Callable[[Requests, Mapping[str, float], str], Floats]], ...] = (
        ("ring", _ring),
        ("tree", _tree),
    )
    for name, algorithm in algorithms:
        for protocol in PROTOCOLS:
            seconds = algorithm(rows, constants, protocol)
            if protocol == "ll128":
                # 128-byte stores stay whole on NVLink only
                seconds = np.where(rows.pcie, np.inf, seconds)
            ways.append(_Way(name=f"{name}/{protocol}", seconds=seconds))
    return tuple(way.name for way in ways), np.stack([way.seconds for way in ways])


def analytic_seconds(rows: Requests, constants: Mapping[str, float]) -> Floats:
    """Seconds of the fastest way, (n,); 0 where there is one rank."""
    _, seconds = analytic_ways(rows, constants)
    return np.where(rows.ranks <= 1, 0.0, seconds.min(axis=0))


def fastest_way(request: Request, constants: Mapping[str, float]) -> str:
    """`algorithm/protocol` that the model takes for `request`."""
    names, seconds = analytic_ways(columns([request]), constants)
    return names[int(np.argmin(seconds[:, 0]))]


def transfer_of(
    name: str,
    request: Request,
    seconds: float,
    links: tuple[str, ...],
    constants: Mapping[str, float],
    start_s: float = 0.0,
) -> Transfer:
    """A collective that takes `seconds` alone, as the bytes of one rank that cross `links` at once with others.

    Alone, with capacities of at least its own rate, `links.shared_finish` gives `start_s + seconds` back.
    """
    empty = columns([replace(request, payload_bytes=0.0)])
    latency_s = min(seconds, float(analytic_seconds(empty, constants)[0]))
    wire_bytes = float(columns([request]).wire_bytes[0])
    flowing_s = seconds - latency_s
    return Transfer(
        name=name,
        payload_bytes=wire_bytes if flowing_s > 0 else 0.0,
        links=links,
        start_s=start_s,
        latency_s=latency_s,
        cap_bytes_per_s=wire_bytes / flowing_s if flowing_s > 0 and wire_bytes > 0 else inf,
    )
