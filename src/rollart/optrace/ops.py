"""What a training step is made of: operators of one rank, the parts of a model that they belong to, and the whole trace.

Owns the records that capture writes, transformations rewrite and the composer places in time. Invariants: the ids of a pass
are 0, 1, .. in the order of execution and an operator depends on earlier ones only; an operator of the compute stream has
FLOPs or moves bytes, one of the comm stream has a payload and a group, so that no operator can cost nothing by omission; no
record holds a tensor, so a trace of any size weighs the same. Why parts: a model is a few kinds of layer repeated, and what a
prediction costs must not grow with its depth or with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.perf.train_plan import TrainingPlan

Stream = Literal["compute", "comm", "copy"]
Kind = Literal["gemm", "attention", "attention_backward", "pass", "collective", "send", "recv"]
"""`pass`: a kernel bound by memory (norm, activation, cast, gather, optimizer update). A `collective` or a transfer says which
in `collective`."""
Axis = Literal["", "tp", "cp", "ep", "dp", "pp"]
Pass = Literal["forward", "backward", "optimizer"]
ATTENTION_SHAPE = ("queries", "keys", "heads of all sequences", "query-key plus value dimension")
GEMM_SHAPE = ("rows", "columns", "inner", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel of one rank, for one micro-batch (or for the whole step in the optimizer)."""

    id: int
    name: str
    """As traced: `aten.mm`, `_c10d_functional.all_reduce`; derived ones say so: `derived.all_to_all`."""
    kind: Kind
    stream: Stream = "compute"
    deps: tuple[int, ...] = ()
    """Operators of the same pass that must have ended."""
    shape: tuple[int, ...] = ()
    """`GEMM_SHAPE` of a gemm, `ATTENTION_SHAPE` of attention, else the local shape of the largest operand."""
    dtype: str = "bf16"
    flops: float = 0.0
    moved_bytes: float = 0.0
    """Device memory read and written; of a gemm and of attention, each operand once."""
    written_bytes: float = 0.0
    """Of the moved bytes, those written: its results. 0: unknown, estimated from the shape."""
    saved_bytes: float = 0.0
    """What of its output stays for the backward pass and nothing before has kept."""
    collective: str = ""
    """As `perf.collectives` names operations: all_reduce, all_gather, reduce_scatter, alltoall, broadcast, send_recv."""
    payload_bytes: float = 0.0
    """A rank's whole buffer, as `perf.collectives.Request` counts it (all-gather: of the gathered result)."""
    axis: Axis = ""
    recomputed: bool = False
    """Run again in the backward pass because its result was not kept."""
    weight_gradient: bool = False
    """Nothing but the optimizer waits for it: zero-bubble schedules defer it."""

    def __post_init__(self) -> None:
        if any(dep >= self.id or dep < 0 for dep in self.deps):
            raise ConfigError(
                f"operator {self.id} ({self.name}) depends on {self.deps}: only earlier ones of its pass can be"
            )
        if self.stream == "comm" and not (self.collective and self.axis and self.payload_bytes > 0):
            raise ConfigError(
                f"operator {self.id} ({self.name}) communicates {self.payload_bytes} bytes by {self.collective!r} over "
                f"{self.axis!r}: all three must be given"
            )  # fmt: skip
        if self.stream == "compute" and not (self.flops > 0 or self.moved_bytes > 0):
            raise ConfigError(f"operator {self.id} ({self.name}) has no FLOPs and moves no bytes; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of the model as one rank runs it: the embedding, one layer of a kind, or the head with the loss."""

    name: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    optimizer: tuple[Op, ...] = ()
    """The update of this part's parameters on this rank."""
    parameters: float = 0.0
    """Elements that the rank holds before data parallelism shards them, experts left out."""
    expert_parameters: float = 0.0
    saved_bytes: float = 0.0
    """Activations of one micro-batch that stay from the forward to the backward pass."""
    boundary_bytes: float = 0.0
    """The hidden states that enter it, of one micro-batch on this rank: what full recomputation keeps and pipelines send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """A place where host code reads a value that other ranks had a say in, so that the trace holds for an assumption only."""

    where: str
    """Operator, and the line of the user's code that asked for it."""
    assumption: str
    """What was taken: `the norm is below the limit`, `tokens are spread evenly over experts`; empty: none was stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rank runs, by parts. `layers` names the part of each layer, first to last."""

    model: str
    plan: TrainingPlan
    """The plan whose degrees are in the operators; the others are still to be derived."""
    parts: Mapping[str, Part]
    layers: tuple[str, ...]
    embedding: str = "embedding"
    head: str = "head"
    step: tuple[Op, ...] = ()
    """Once a step and rank, whatever its parts: the norm of all gradients, its reduction over the groups, the clip."""
    reads: tuple[HostRead, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What was derived and not captured, and every stated assumption, one line each."""

    def __post_init__(self) -> None:
        missing = sorted({*self.layers, self.embedding, self.head} - set(self.parts))
        if missing:
            raise ConfigError(
                f"trace of {self.model}: no part called {', '.join(missing)}; it has {', '.join(self.parts)}"
            )


Provenance = Literal["measured", "interpolated", "analytic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Seconds of one operator alone, what they rest on, and the standard deviation of their log."""

    seconds: float
    provenance: Provenance
    log_std: float
    source: str = ""
    """The table, profile or law."""

    def __post_init__(self) -> None:
        if not 0.0 < self.seconds < float("inf"):
            raise ConfigError(
                f"an operator was priced at {self.seconds} s by {self.source}; need a finite time above 0"
            )
