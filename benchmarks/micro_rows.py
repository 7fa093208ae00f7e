"""Rows of `collectives.csv` and `overlap_slowdown.csv`, and which of them the package's tables were fitted on.

A row that was fitted on is known by the digest of its contents, kept in the table; the rows themselves are not kept. A row
that another file has changed, or that is new, is a row not seen.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import TypeVar

from rollart.perf.collectives import OPS, Request
from rollart.perf.links import domains, fabric
from rollart.perf.overlap import DEFAULT_SMS, Kernel
from rollart.perf.overlap_fit import Measured

LEAST_SOLO_S = 5e-6
"""Kernels shorter than this are dominated by launch and the profiler's resolution: left out and counted."""
NAMES = {
    "all_to_all": "alltoall",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}
"""Other spellings of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """One row that can be scored."""

    measured: Measured
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One row that can be scored. `library` is the family (see `library_family`), `device` the chip as written."""

    request: Request
    device: str
    library: str
    source: str
    seconds: float
    digest: str

    @property
    def cell(self) -> tuple[str, str, int, int, float]:
        """Rows that are equal in this stay on one side of every split."""
        return (self.request.op, self.device, self.request.ranks, self.request.nodes or 1, self.request.payload_bytes)


Row = TypeVar("Row", OverlapRow, CollectiveRow)


def digest(*values: object) -> str:
    """Four bytes of a row's contents: enough to know it again among thousands."""
    return blake2b("\x1f".join(str(value) for value in values).encode(), digest_size=4).hexdigest()


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if isfinite(value) else None


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def overlap_rows(directory: Path) -> tuple[list[OverlapRow], Counter[str]]:
    """Rows of `overlap_slowdown.csv` (nanoseconds) in file order, and how many were left out, by reason."""
    rows: list[OverlapRow] = []
    unscored: Counter[str] = Counter()
    for row in _table(directory / "overlap_slowdown.csv"):
        solo_ns, seconds_ns, ratio = (_number(row, name) for name in ("ground_truth", "duration", "overlap_ratio"))
        name = (row.get("Kernel Name") or row.get("kShortName") or "").strip()
        if solo_ns is None or seconds_ns is None or ratio is None or seconds_ns <= 0 or not name or not 0 <= ratio <= 1:
            unscored["a time, the overlap ratio or the kernel's name is missing or no such thing"] += 1
        elif solo_ns * 1e-9 < LEAST_SOLO_S:
            unscored["under 5 us alone"] += 1
        else:
            full_name = (row.get("kDemangledName") or "").strip()
            kernel = Kernel(
                name=name, full_name=full_name, solo_s=solo_ns * 1e-9, sms=int(_number(row, "SM") or DEFAULT_SMS)
            )
            rows.append(
                OverlapRow(
                    measured=Measured(kernel=kernel, overlap_ratio=ratio, seconds=seconds_ns * 1e-9),
                    digest=digest(full_name, solo_ns, seconds_ns, ratio),
                )
            )
    return rows, unscored


def library_family(library: str) -> str:
    """`nccl`, `nccl under torch` (timed through the framework), or the first word of another library."""
    text = library.lower()
    if "torch" in text:
        return "nccl under torch"
    return "nccl" if "nccl" in text or not text.strip() else text.split()[0]


def collective_rows(directory: Path) -> tuple[list[CollectiveRow], Counter[str]]:
    """Rows of `collectives.csv` in file order, and how many were left out, by reason.

    A missing or impossible number of nodes is filled by one rule: the fewest first-tier domains that hold the ranks.
    """
    rows: list[CollectiveRow] = []
    unscored: Counter[str] = Counter()
    for row in _table(directory / "collectives.csv"):
        ranks, payload, time_us = (_number(row, name) for name in ("num_gpus", "msg_bytes", "time_us"))
        written = (row.get("op") or "").strip().lower()
        op = NAMES.get(written, written)
        device = (row.get("gpu") or "").strip()
        if op not in OPS:
            unscored[f"operation {op!r} is none of ours"] += 1
        elif ranks is None or payload is None or time_us is None or time_us <= 0 or payload <= 0 or not device:
            unscored["device, ranks, bytes or time is missing or no such thing"] += 1
        elif ranks < 2:
            unscored["one rank"] += 1
        else:
            reach = fabric(device, row.get("interconnect") or "")
            nodes = domains(int(ranks), reach, int(_number(row, "num_nodes") or 0) or None)
            rows.append(
                CollectiveRow(
                    request=Request(op=op, ranks=int(ranks), payload_bytes=payload, fabric=reach, nodes=nodes),
                    device=device,
                    library=library_family(row.get("library") or ""),
                    source=(row.get("source") or row.get("suite") or "").strip(),
                    seconds=time_us * 1e-6,
                    digest=digest(
                        op, device, ranks, nodes, payload, time_us, row.get("library"), row.get("interconnect")
                    ),
                )
            )
    return rows, unscored


def split_seen(rows: Iterable[Row], digests: Iterable[str]) -> tuple[list[Row], list[Row]]:
    """Rows that the frozen tables were fitted on, and the others."""
    fitted = set(digests)
    seen: list[Row] = []
    unseen: list[Row] = []
    for row in rows:
        (seen if row.digest in fitted else unseen).append(row)
    return seen, unseen
