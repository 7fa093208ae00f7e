"""Control's whole state between two steps, as a value: what a checkpoint holds beside the trainer's tensors.

Invariant: everything in it is of one instant, after a publish and before the next batch is released; nothing in it is
shared with the run that goes on. Random draws are named (`core.seeds`), so no generator has a state to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart.core.ledger import Ledger
from rollart.core.types import TaskInstance, Trajectory, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """Where a task's cursor stands."""

    epoch: int
    position: int
    """Instances of this epoch that were issued."""
    data: str
    """Digest of the data set that the cursor walks over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group that is open or buffered."""

    instance: TaskInstance
    order: int
    min_version: Version
    done: tuple[Trajectory, ...]
    attempts: Mapping[int, int]
    """Member -> number of its next attempt, of those that are not done; they are issued again."""
    given_up: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    seq: int
    """Of the last event before it."""
    t_s: float
    """Loop time since the run began."""
    step: int
    """Steps trained: the number of the next one."""
    version: Version
    """Of the weights that the trainer had published."""
    jumps: tuple[tuple[Version, Version], ...]
    """(version, number under which the same weights were published again): see `sched.staleness.Lineage`."""
    cursors: Mapping[str, CursorState]
    counts: Mapping[str, int]
    """Groups per task that were trained or still may be."""
    opened: int
    """Groups opened so far."""
    recent: tuple[Mapping[str, int], ...]
    """Trajectories per task of the last batches, for the mix over a window."""
    groups: tuple[GroupState, ...]
    ledger: Ledger
    sampled: Mapping[str, int]
    """The engines' books: tokens that each engine of the run has sampled so far."""
    undelivered: Mapping[str, int]
    """Of these, tokens of live requests, which control had not got."""
    unfinished: tuple[Mapping[str, Any], ...]
    """Of each attempt that lived: the fields of the event that ends it when it is rolled back."""
    evaluations: int
    """Evaluations begun so far."""
    evaluating: tuple[str, Version] | None
    """The evaluation that was under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """From where a run goes on. The world finds it, control takes it up."""

    snapshot: Snapshot | None
    """None: the run ended before its first checkpoint, so it begins anew, in the same log."""
    trainer: str = ""
    """Where the trainer's part of the checkpoint is."""
    lost: int = 0
    """Events in the log after the snapshot's: they are taken back."""
    highest_version: Version = -1
    """The highest ever published, in what is taken back too; numbering goes on above it."""
    notes: tuple[str, ...] = field(default=())
    """What the user must know of the way here: a checkpoint that was passed over, a torn line."""
