"""Reading a device's profile: the operator itself, or what those like it say of it.

Owns `Work` (an operator without its place in a trace) and `Table`. Invariant: an estimate lies, relative to the law,
between the neighbours that it is made of, and there is none further than `REACH` beyond what was measured, in any
dimension. Why: between shapes the law is off by a factor that changes slowly, while seconds themselves jump at tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rollart.optrace.ops import Op, Trace
from rollart.perf.device_profile import DeviceProfile, OpTime, Signature, Work, base_name, suspects

REACH = 2.0
"""So many times beyond the measured shapes an estimate is still made of them."""
NEIGHBOURS = 6
"""Measured shapes that an estimate is made of, the nearest ones."""
LEAST_ROWS = 3
"""With fewer rows of a kind its error cannot be told from the rows themselves."""
ONE_DIMENSION = ("pass",)
"""Kinds of which only the amount of work matters, not how a shape divides it."""


def work_of(op: Op) -> Work:
    """Of a traced operator; weight gradients read both operands of a product across their rows."""
    layout = "tn" if op.kind == "gemm" and op.weight_gradient else ""
    return Work(op.kind, op.name, op.dtype, op.shape, op.flops, op.moved_bytes, layout)


def kernel_name(op: Op) -> str:
    """Under which the slowdown of an operator beside a collective is kept and looked up: its kind, of a pass its name."""
    return op.kind if op.kind != "pass" else base_name(op.name)


def distinct(ops: Iterable[Op]) -> list[Op]:
    """The operators of the compute stream, each signature once, in the order of its first use."""
    found: dict[Signature, Op] = {}
    for op in ops:
        if op.stream == "compute":
            found.setdefault(work_of(op).signature, op)
    return list(found.values())


def measurable(trace: Trace) -> list[Op]:
    """What a profile has to hold so that nothing of `trace` is guessed, in the order of a step."""
    order = list(dict.fromkeys((trace.embedding, *trace.layers, trace.head)))
    parts = [trace.parts[name] for name in order]
    ops: list[Op] = [op for part in parts for op in part.forward]
    ops += [op for part in reversed(parts) for op in part.backward]
    ops += [*trace.step, *[op for part in parts for op in part.optimizer]]
    return distinct(ops)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The operators of a profile beside the law that carries them to other shapes."""

    profile: DeviceProfile
    analytic_s: Callable[[Work], float]

    @cached_property
    def _rows(self) -> dict[Signature, OpTime]:
        return {row.signature: row for row in self.profile.ops}

    @cached_property
    def _families(self) -> dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]]:
        """By (kind, name, dtype): log2 coordinates and log of measured over analytic. Passes also under the empty name."""
        doubted = suspects(self.profile)
        found: dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]] = {}
        for row in self.profile.ops:
            if row.signature in doubted:
                continue
            work = row.work
            point = _coordinates(work), math.log(row.seconds / self.analytic_s(work))
            for name in {row.signature.name, ""}:
                found.setdefault((row.kind, name, row.dtype), []).append(point)
        return found

    @cached_property
    def _spreads(self) -> dict[tuple[str, str, str], float | None]:
        """Filled as families are asked for: an operator left out against what the others say of it."""
        return {}

    def exact(self, work: Work) -> OpTime | None:
        """The row of this very operator."""
        return self._rows.get(work.signature)

    def near(self, work: Work) -> tuple[float, float | None] | None:
        """Seconds by the rows like `work`, and the standard deviation of their log (None: too few rows to tell).

        None where none is near enough. Of a pass, those of its own name go before all passes.
        """
        for name in dict.fromkeys((work.signature.name, "")):
            family = (work.kind, name, work.dtype)
            points = self._families.get(family, [])
            ratio = _carried(_coordinates(work), points)
            if ratio is not None:
                if family not in self._spreads:
                    self._spreads[family] = _left_out(points)
                return self.analytic_s(work) * math.exp(ratio), self._spreads[family]
        return None


def _coordinates(work: Work) -> tuple[float, ...]:
    """Where an operator stands among those of its kind, in log2: the sides of its shape and their product."""
    if work.kind in ONE_DIMENSION or not work.shape:
        return (math.log2(max(work.moved_bytes, 1.0)),)
    sizes = tuple(math.log2(max(size, 1)) for size in work.shape)
    return (*sizes, sum(sizes))


def _carried(at: tuple[float, ...], points: Sequence[tuple[tuple[float, ...], float]]) -> float | None:
    """The mean of the nearest points' values by inverse squared distance; None beyond `REACH` of what there is."""
    alike = [(where, value) for where, value in points if len(where) == len(at)]
    if not alike:
        return None
    slack = math.log2(REACH)
    for axis, own in enumerate(at):
        sizes = [where[axis] for where, _ in alike]
        if not min(sizes) - slack <= own <= max(sizes) + slack:
            return None
    if len(at) == 1:
        return _on_line(at[0], alike)
    distances = sorted(
        (sum((a - b) ** 2 for a, b in zip(at, where, strict=True)), value) for where, value in alike
    )[:NEIGHBOURS]  # fmt: skip
    touching = [value for distance, value in distances if distance == 0.0]
    if touching:
        return sum(touching) / len(touching)
    weights = [1.0 / distance for distance, _ in distances]
    return sum(weight * value for weight, (_, value) in zip(weights, distances, strict=True)) / sum(weights)


def _on_line(at: float, points: Sequence[tuple[tuple[float, ...], float]]) -> float:
    """Between the two points on either side (the mean of those at one place); the end's value beyond the ends."""
    places: dict[float, list[float]] = {}
    for (where,), value in points:
        places.setdefault(where, []).append(value)
    known = sorted((where, sum(values) / len(values)) for where, values in places.items())
    below = [point for point in known if point[0] <= at]
    above = [point for point in known if point[0] >= at]
    if not below or not above:
        return (above or below)[0 if above else -1][1]
    (low, first), (high, second) = below[-1], above[0]
    return first if high == low else first + (second - first) * (at - low) / (high - low)


def _left_out(points: Sequence[tuple[tuple[float, ...], float]]) -> float | None:
    """Root mean square of what each point differs from what the others say; None where too few say anything."""
    squares = []
    for index, (where, value) in enumerate(points):
        said = _carried(where, [*points[:index], *points[index + 1 :]])
        if said is not None:
            squares.append((said - value) ** 2)
    return math.sqrt(sum(squares) / len(squares)) if len(squares) >= LEAST_ROWS else None
