"""Links between devices: what connects them, how fast by the spec sheet, and what happens when transfers share one.

Owns: the table of links by chip (`tables/links.json`), the reading of an interconnect's written form, and max-min fair
sharing. Invariant: every rate is bytes per second, one direction, per device; sharing never gives a link more than its
capacity and never speeds a transfer up. Why: collectives and weight transfers need a fabric, not a device, and the same
chip stands on different ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from math import ceil, inf, isfinite
from typing import Any, Literal

from rollart.core.errors import ConfigError

Kind = Literal["nvlink", "pcie"]
"""`nvlink`: a switched or all-to-all fabric of the node (Infinity Fabric too); `pcie`: through the host's bridges."""
BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a group of equal devices talks over: one tier inside a domain, one between domains."""

    chip: str
    """Name in the table of links, or the cleaned name as written where the table has none."""
    kind: Kind
    intra_bytes_per_s: float
    """Of one device to its peers in the domain, one direction, all links together."""
    inter_bytes_per_s: float
    """Of one device's share of the network, one direction."""
    domain: int
    """Devices that the first tier joins: 8 of a node, 72 of an NVL72."""
    nvls_bytes_per_s: float = 0.0
    """Most that reduction in the switch gives as bus bandwidth; 0: the switch cannot."""
    generation: str = ""
    """Of the chip; devices of one generation run the same collective kernels."""
    provenance: str = "public table"


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    loaded: dict[str, Any] = json.loads((files("rollart.perf") / "tables" / "links.json").read_text(encoding="utf-8"))
    return loaded


def chip_name(device: str) -> str | None:
    """The table's name of the chip that `device` speaks of, or None: `A100-SXM4-40GB` and `A100 DGX` are A100."""
    words = re.findall(r"[A-Z0-9]+", re.sub(r"\(.*?\)", " ", device.upper()))
    words += [first + second for first, second in pairwise(words)]
    known = [name for name in _table()["devices"] if name.upper() in words]
    return max(known, key=len) if known else None


def _stated_rates(interconnect: str) -> tuple[float | None, float | None]:
    """Bytes per second of the two tiers as far as the text says: `600GB/s` is both directions, `200 Gb/s` one."""
    fast = re.search(r"(\d+(?:\.\d+)?)\s*GB/s", interconnect)
    network = re.search(r"(\d+(?:\.\d+)?)\s*Gb(?:/s|ps)", interconnect)
    return (
        float(fast[1]) / 2 * BYTES_PER_GB if fast else None,
        float(network[1]) / 8 * BYTES_PER_GB if network else None,
    )


@lru_cache(maxsize=1024)
def fabric(device: str, interconnect: str = "") -> Fabric:
    """The fabric of `device` (a chip as people write it) over `interconnect` (free text, may be empty).

    An unlisted device is never refused: it takes the rates that the text states and the rest from the stand-in of
    `tables/links.json`, and its provenance says `assumed`.
    """
    table = _table()
    text = f"{device} {interconnect}".lower()
    says_pcie = "pcie" in text and "nvlink" not in text
    chip = chip_name(device)
    entry = table["devices"][chip] if chip else table["devices"][table["fallback"]["pcie" if says_pcie else "nvlink"]]
    kind: Kind = "pcie" if says_pcie else entry["kind"]
    rated = entry if kind == entry["kind"] else table["devices"][table["fallback"]["pcie"]]
    intra, inter = _stated_rates(interconnect)
    return Fabric(
        chip=chip or " ".join(re.sub(r"\(.*?\)", " ", device).split()),
        kind=kind,
        intra_bytes_per_s=intra or rated["intra_GBps"] * BYTES_PER_GB,
        inter_bytes_per_s=inter or entry["nic_GBps"] * BYTES_PER_GB,
        domain=int(rated["domain"]),
        nvls_bytes_per_s=rated["nvls_GBps"] * BYTES_PER_GB,
        generation=entry["generation"] if chip else "",
        provenance=entry["provenance"] if chip else "assumed",
    )


def domains(ranks: int, fabric: Fabric, nodes: int | None = None) -> int:
    """First-tier domains that `ranks` stand in; one rule where it is not said, or where what is said cannot be."""
    fewest = ceil(ranks / fabric.domain)
    return max(nodes or 1, fewest) if fabric.domain <= 8 else fewest


# ---- sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes that move over a set of links at once."""

    name: str
    payload_bytes: float
    links: tuple[str, ...]
    start_s: float = 0.0
    latency_s: float = 0.0
    """Seconds after the start in which it moves nothing."""
    cap_bytes_per_s: float = inf
    """What it could use alone: its algorithm's bandwidth."""


def fair_rates(transfers: Sequence[Transfer], capacity: Mapping[str, float]) -> dict[str, float]:
    """Max-min fair bytes per second of each transfer, O(transfers x links).

    Raises `ConfigError` for a link without a capacity, or a transfer that nothing bounds.
    """
    _check(transfers, capacity)
    left = dict(capacity)
    rates: dict[str, float] = {}
    waiting = {transfer.name: transfer for transfer in transfers}
    while waiting:
        users: dict[str, int] = {}
        for transfer in waiting.values():
            for link in transfer.links:
                users[link] = users.get(link, 0) + 1
        share = {link: left[link] / count for link, count in users.items()}
        fair = {
            name: min([transfer.cap_bytes_per_s, *(share[link] for link in transfer.links)])
            for name, transfer in waiting.items()
        }
        level = min(fair.values())
        for name in [name for name, rate in fair.items() if rate <= level]:
            transfer = waiting.pop(name)
            rates[name] = level
            for link in transfer.links:
                left[link] = max(0.0, left[link] - level)
    return rates


def _check(transfers: Iterable[Transfer], capacity: Mapping[str, float]) -> None:
    names: set[str] = set()
    for transfer in transfers:
        if transfer.name in names:
            raise ConfigError(f"two transfers are called {transfer.name!r}: give each its own name")
        names.add(transfer.name)
        begins_s = transfer.start_s + transfer.latency_s
        if not (isfinite(transfer.payload_bytes) and transfer.payload_bytes >= 0 and isfinite(begins_s)):
            raise ConfigError(
                f"transfer {transfer.name!r}: {transfer.payload_bytes} bytes from {begins_s} s: need numbers, bytes 0 or more"
            )
        if not transfer.links and transfer.cap_bytes_per_s == inf:
            raise ConfigError(f"transfer {transfer.name!r} crosses no link and has no cap: nothing bounds its rate")
        if transfer.cap_bytes_per_s <= 0:
            raise ConfigError(f"transfer {transfer.name!r}: cap of {transfer.cap_bytes_per_s} bytes/s must be above 0")
        for link in transfer.links:
            if not capacity.get(link, 0.0) > 0:
                raise ConfigError(f"link {link!r} of transfer {transfer.name!r} has capacity {capacity.get(link)}")


def shared_finish(transfers: Sequence[Transfer], capacity: Mapping[str, float]) -> dict[str, float]:
    """Second at which each transfer ends when all that are under way share their links fairly (a fluid model)."""
    _check(transfers, capacity)
    pending = sorted(transfers, key=lambda transfer: (transfer.start_s + transfer.latency_s, transfer.name))
    active: dict[str, Transfer] = {}
    left: dict[str, float] = {}
    ends: dict[str, float] = {}
    now_s = pending[0].start_s + pending[0].latency_s if pending else 0.0
    while pending or active:
        while pending and pending[0].start_s + pending[0].latency_s <= now_s:
            transfer = pending.pop(0)
            active[transfer.name], left[transfer.name] = transfer, transfer.payload_bytes
        rates = fair_rates(list(active.values()), capacity)
        waits = {name: left[name] / rate if rate > 0 else inf for name, rate in rates.items()}
        next_end_s = now_s + min(waits.values(), default=inf)
        next_s = min(next_end_s, pending[0].start_s + pending[0].latency_s if pending else inf)
        for name, rate in rates.items():
            left[name] -= rate * (next_s - now_s)
            if now_s + waits[name] <= next_s:
                ends[name] = next_s
                del active[name]
        now_s = next_s
    return ends
