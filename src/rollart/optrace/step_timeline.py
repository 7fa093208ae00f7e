"""A composed step: its length, where each rank class spends it, and every operator in time.

Owns these records. Invariant: the seconds of a class sum to the step to the tick, and a slice is where the composer placed it.
Why slices are made on demand: a step has hundreds of thousands of operators, of which a report needs none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.optrace.blocks import Settled
from rollart.optrace.classes import RankClass
from rollart.optrace.composer import NEVER, seconds
from rollart.optrace.ops import Provenance

Detail = Literal["tasks", "ops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Operators of one kind that rest on one source, run by one rank in one step."""

    kind: str
    axis: str
    provenance: Provenance
    source: str
    seconds: float
    error_s: float
    """Sum of seconds x standard deviation of their log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """A step of one rank class: `busy_s` + `optimizer_s` + `host_s` + `exposed_s` + `bubble_s` is the step."""

    rank_class: RankClass
    busy_s: float
    """Computation of all tasks, with what overlap slows it by."""
    slowed_s: float
    """Part of `busy_s`: what overlap slows it by."""
    optimizer_s: float
    """Computation after the last backward: norm, clip, update."""
    host_s: float
    """What the device waits for the host that launches its kernels."""
    exposed_s: Mapping[str, float]
    """Waiting for communication, by axis."""
    comm_s: Mapping[str, float]
    """All communication that it takes part in, by axis, hidden or not."""
    bubble_s: float
    """Waiting for other ranks to get there."""
    usage: tuple[Usage, ...]
    overlapped_s: Mapping[str, float] = field(default_factory=dict)
    """Computation beside communication, by what its slowdown rests on: `physical` is level 1, a name of a kernel level 2."""

    @property
    def name(self) -> str:
        """Of the class."""
        return self.rank_class.name

    @property
    def stage(self) -> int:
        """Of the pipeline."""
        return self.rank_class.stage

    @property
    def ranks(self) -> int:
        """That the class stands for."""
        return self.rank_class.ranks

    @property
    def provenance_s(self) -> dict[str, float]:
        """Seconds of operators by what they rest on."""
        found: dict[str, float] = {"measured": 0.0, "interpolated": 0.0, "analytic": 0.0}
        for use in self.usage:
            found[use.provenance] += use.seconds
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Something that one stream of one rank class did; seconds since the step began."""

    rank_class: str
    stream: str
    name: str
    start_s: float
    end_s: float
    provenance: str
    micro_batch: int
    """-1: of the whole step."""
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One task (or the update) of one class: an operator starts at the latest of (input + lag)."""

    rank_class: int
    kind: str
    micro_batch: int
    chunk: int
    begin: int
    end: int
    settled: Settled
    inputs: tuple[int, ...]
    lags: tuple[tuple[int, ...], ...]
    """(items, inputs)."""

    def starts(self) -> Iterator[int]:
        """Ticks at which each item starts."""
        known = [(column, at) for column, at in enumerate(self.inputs) if at > NEVER // 2]
        for lags in self.lags:
            yield max(at + lags[column] for column, at in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A pipeline transfer, as its sender sees it."""

    rank_class: int
    kind: str
    micro_batch: int
    chunk: int
    begin: int
    end: int
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step of a plan."""

    step_s: float
    classes: tuple[ClassTime, ...]
    head_layers: float
    """What the output head costs, in layers: with it the layers were split over the stages."""
    passes: int
    """Times that the task which took most was placed before overlap changed nothing more."""
    placed: tuple[Placed, ...]
    sent: tuple[Sent, ...]

    @property
    def bubble_share(self) -> float:
        """Share of the step, mean over ranks."""
        ranks = sum(one.ranks for one in self.classes)
        return sum(one.bubble_s * one.ranks for one in self.classes) / (ranks * self.step_s)

    def slices(self, detail: Detail = "tasks", *, rank_classes: Collection[str] | None = None) -> Iterator[Slice]:
        """Slices by class, in the order of execution: whole tasks, or every operator. Raises ConfigError for no such class."""
        names = [one.name for one in self.classes]
        wanted = set(names if rank_classes is None else rank_classes)
        if wanted - set(names):
            raise ConfigError(
                f"no rank class called {', '.join(sorted(wanted - set(names)))}; there are {', '.join(names)}"
            )
        for index, name in enumerate(names):
            if name in wanted:
                yield from self._of_class(index, name, detail)

    def _of_class(self, index: int, name: str, detail: Detail) -> Iterator[Slice]:
        for task in self.placed:
            if task.rank_class != index:
                continue
            if detail == "tasks":
                whole = "update" if task.kind == "update" else f"{task.kind} {task.micro_batch}"
                yield Slice(
                    rank_class=name, stream="compute", name=whole, start_s=seconds(task.begin), end_s=seconds(task.end),
                    provenance="", micro_batch=task.micro_batch, chunk=task.chunk,
                )  # fmt: skip
                continue
            settled = task.settled
            for item, cost, length, start in zip(
                settled.items, settled.costs, settled.durations, task.starts(), strict=True
            ):
                yield Slice(
                    rank_class=name, stream=item.lane if item.lane in ("compute", "copy") else f"comm {item.lane}",
                    name=item.op.name, start_s=seconds(start), end_s=seconds(start + length),
                    provenance=cost.priced.provenance, micro_batch=task.micro_batch, chunk=task.chunk,
                )  # fmt: skip
        for sent in self.sent:
            if sent.rank_class == index:
                yield Slice(
                    rank_class=name, stream=f"comm pp {sent.kind}", name=f"send {sent.kind} {sent.micro_batch}",
                    start_s=seconds(sent.begin), end_s=seconds(sent.end), provenance=sent.provenance,
                    micro_batch=sent.micro_batch, chunk=sent.chunk,
                )  # fmt: skip
