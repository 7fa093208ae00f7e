"""What running at the same time costs: kernels beside a collective, and collectives that share a link.

Owns the step from the intervals of one placement to the durations of the next. Invariant: a node that nothing runs beside
keeps its time to the tick; a collective is never sped up. Why by task: what overlaps inside a task is the same every time it
runs, so it is found once; what a task's tail does to the task after it is left out. Sources: T = T0 (1 + s r) with s of
`perf.overlap` (levels 0, 1, 2), max-min fair links of `perf.links`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rollart.core.errors import ConfigError
from rollart.optrace.composer import TICKS_PER_S, seconds, ticks
from rollart.optrace.measured_ops import kernel_name
from rollart.optrace.ops import Op
from rollart.optrace.parallel_groups import placed
from rollart.perf.collective_table import packaged as collective_model
from rollart.perf.collectives import Request, transfer_of
from rollart.perf.links import Fabric, Transfer, shared_finish
from rollart.perf.overlap import DEFAULT_SMS, Kernel, Level, OverlapModel, packaged, slowdown
from rollart.perf.train_plan import TrainingPlan

Interval = tuple[int, int]
"""(start, end) in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Level 1 by two numbers: a kernel overlapped for a share r of its time takes 1 + compute x r as long, a collective 1 +
    comm x r."""

    compute: float
    comm: float

    def __post_init__(self) -> None:
        if not (self.compute >= 0 and self.comm >= 0):
            raise ConfigError(f"overlap factors {self.compute}, {self.comm}: a share by which work slows, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How much work slows beside other work."""

    plan: TrainingPlan
    overlap: OverlapModel | Factors | None = None
    """None: the model frozen in the package."""
    level: Level | None = None
    """0: nothing slows; None: the model's default."""
    sms: int = DEFAULT_SMS
    fabric: Fabric | None = None
    """None: links are not shared."""
    _alone: dict[tuple[int, int], tuple[Op, Transfer]] = field(default_factory=dict, compare=False, repr=False)

    def compute_factor(self, op: Op, solo_ticks: int) -> tuple[float, str]:
        """s of T = T0 (1 + s r) of a kernel beside a collective, with its basis (of `perf.overlap`, or `factors`)."""
        if self.level == 0:
            return 0.0, "none"
        if isinstance(self.overlap, Factors):
            return self.overlap.compute, "factors"
        kernel = Kernel(name=kernel_name(op), solo_s=seconds(solo_ticks), sms=self.sms)
        return slowdown(kernel, self.overlap or packaged(), self.level)

    def comm_factor(self) -> float:
        """The same of a collective beside kernels."""
        return self.overlap.comm if self.level != 0 and isinstance(self.overlap, Factors) else 0.0

    def transfer(self, op: Op, interval: Interval, solo_ticks: int, name: str) -> Transfer | None:
        """The collective as bytes on the link that bounds it; None where links are not shared."""
        if self.fabric is None:
            return None
        key = (id(op), solo_ticks)
        if key not in self._alone:
            self._alone[key] = op, self._transfer_alone(op, solo_ticks, self.fabric)
        return replace(self._alone[key][1], name=name, start_s=seconds(interval[0]))

    def _transfer_alone(self, op: Op, solo_ticks: int, fabric: Fabric) -> Transfer:
        where = placed(op, self.plan, fabric)
        request = Request(
            op=op.collective, ranks=where.ranks, payload_bytes=op.payload_bytes, fabric=fabric, nodes=where.domains
        )
        between = where.domains > 1
        links = ("network" if between else "domain",)
        alone = transfer_of(op.name, request, seconds(solo_ticks), links, collective_model().constants)
        cards = where.local if between else 1  # a ring enters a domain on the network cards of all its members there
        return replace(alone, payload_bytes=alone.payload_bytes / cards, cap_bytes_per_s=alone.cap_bytes_per_s / cards)


def overlapped_ticks(interval: Interval, others: Sequence[Interval], starts: Sequence[int]) -> int:
    """Ticks of `interval` that `others` (disjoint, rising, beginning at `starts`) cover."""
    begin, end = interval
    first = max(0, bisect_right(starts, begin) - 1)
    covered = 0
    for other_begin, other_end in others[first : bisect_left(starts, end)]:
        covered += max(0, min(end, other_end) - max(begin, other_begin))
    return covered


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint rising intervals that cover the same ticks."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def slowed(
    ops: Sequence[Op], lanes: Sequence[str], solo: Sequence[int], placed: Sequence[Interval], of: Beside,
    inside: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Ticks that each operator takes, given where all of them stood: `placed` (with their present durations).

    `inside`: positions of collectives that run for the most part inside products, whose rate is not known, so that they
    share no link.
    """
    working = union([at for at, lane in zip(placed, lanes, strict=True) if lane == "compute"])
    talking = union([at for at, op in zip(placed, ops, strict=True) if op.stream == "comm"])
    work_starts, talk_starts = [at[0] for at in working], [at[0] for at in talking]
    comm_factor = of.comm_factor()
    found = list(solo)
    for position, (op, lane, at) in enumerate(zip(ops, lanes, placed, strict=True)):
        if lane == "compute":
            beside = overlapped_ticks(at, talking, talk_starts)
            factor = of.compute_factor(op, solo[position])[0] if beside else 0.0
        elif op.stream == "comm" and comm_factor:
            beside, factor = overlapped_ticks(at, working, work_starts), comm_factor
        else:
            continue
        found[position] = max(1, round(solo[position] * (1 + factor * beside / (at[1] - at[0]))))
    for position, shared in _shared(ops, lanes, solo, placed, of, inside).items():
        found[position] = max(found[position], shared)
    return found


def basis_ticks(
    ops: Sequence[Op], lanes: Sequence[str], solo: Sequence[int], placed: Sequence[Interval], of: Beside
) -> dict[str, int]:
    """Ticks in which the compute lane runs beside a collective, by what the slowdown of the operator there rests on."""
    talking = union([at for at, op in zip(placed, ops, strict=True) if op.stream == "comm"])
    starts = [at[0] for at in talking]
    found: dict[str, int] = {}
    for op, lane, alone, at in zip(ops, lanes, solo, placed, strict=True):
        beside = overlapped_ticks(at, talking, starts) if lane == "compute" else 0
        if beside:
            basis = of.compute_factor(op, alone)[1]
            found[basis] = found.get(basis, 0) + beside
    return found


def _shared(
    ops: Sequence[Op], lanes: Sequence[str], solo: Sequence[int], placed: Sequence[Interval], of: Beside,
    inside: Collection[int],
) -> dict[int, int]:  # fmt: skip
    """Ticks of the collectives that stood beside another one on the same link."""
    if of.fabric is None:
        return {}
    by_link: dict[str, list[tuple[int, Transfer]]] = {}
    for position, op in enumerate(ops):
        if op.stream == "comm" and position not in inside:
            transfer = of.transfer(op, placed[position], solo[position], str(position))
            if transfer is not None:
                by_link.setdefault(transfer.links[0], []).append((position, transfer))
    found: dict[int, int] = {}
    for link, uses in by_link.items():
        if len({lanes[position] for position, _ in uses}) < 2:  # one lane never overlaps itself
            continue
        met = _overlapping([(placed[position], position) for position, _ in uses])
        sharing = [transfer for position, transfer in uses if position in met]
        if not sharing:
            continue
        nominal = of.fabric.inter_bytes_per_s if link == "network" else of.fabric.intra_bytes_per_s
        capacity = max(nominal, *(transfer.cap_bytes_per_s for transfer in sharing if transfer.payload_bytes > 0), 1.0)
        ends = shared_finish(sharing, {link: capacity})
        for transfer in sharing:
            found[int(transfer.name)] = ticks(max(ends[transfer.name] - transfer.start_s, 1 / TICKS_PER_S))
    return found


def _overlapping(intervals: Sequence[tuple[Interval, int]]) -> set[int]:
    """Names of the intervals that some other one overlaps."""
    found: set[int] = set()
    reach: tuple[int, int] | None = None  # (latest end so far, whose)
    for (begin, end), name in sorted(intervals):
        if reach is not None and begin < reach[0]:
            found |= {name, reach[1]}
        if reach is None or end > reach[0]:
            reach = (end, name)
    return found
