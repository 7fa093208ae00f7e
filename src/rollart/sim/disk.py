"""What outlives a simulated driver: its event log and its checkpoints, in memory.

Invariants: a checkpoint counts only with its mark, which is written last; what a driver writes after it was killed
(`cut`) is nowhere. Why: a resume must find what a real disk would hold, and nothing that only the dead process knew.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollart.core.events import Sink
from rollart.core.snapshot import Resumed, Snapshot
from rollart.core.types import Failure, Sample

Row = Mapping[str, Any]
SaveFault = Failure | Literal["torn"]
"""The disk refuses (full, say); torn: the driver dies before the mark is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A simulated trainer's whole state: what its weights were trained on."""

    batches: tuple[tuple[Sample, ...], ...] = ()
    """One per optimiser step, since the beginning of the run."""
    moves: int = 0
    digest: str = ""
    """Over the ordered samples of all batches."""


@dataclass(slots=True, kw_only=True)
class Kept:
    """One checkpoint. The snapshot is pickled, so that nothing in it is shared with the run that goes on."""

    path: str
    snapshot: bytes
    whole: bool = False


@dataclass(kw_only=True)
class SimDisk:
    log: list[Row] = field(default_factory=list)
    """Events of all incarnations as they were written, those that were taken back as well."""
    parts: dict[str, Weights] = field(default_factory=dict)
    """Path -> the trainer's part of a checkpoint."""
    checkpoints: list[Kept] = field(default_factory=list)
    incarnation: int = 0

    def cut(self) -> None:
        """The driver is dead: what it still tries to write is lost."""
        self.incarnation += 1

    def sink(self) -> Sink:
        """Writes the log of the present incarnation."""
        own, log = self.incarnation, self.log

        def take(event: Row) -> None:
            if self.incarnation == own:
                log.append(event)

        return take

    def surviving(self) -> list[Row]:
        """The log as one run: without what was taken back."""
        return surviving(self.log)

    def resumed(self) -> Resumed:
        """Where the next incarnation goes on from."""
        whole = next((kept for kept in reversed(self.checkpoints) if kept.whole), None)
        torn = tuple(f"{kept.path} was not completed" for kept in self.checkpoints if not kept.whole)
        snapshot: Snapshot | None = None if whole is None else pickle.loads(whole.snapshot)
        seq = 0 if snapshot is None else snapshot.seq
        published = [row["version"] for row in self.log if row["kind"] == "published"]
        return Resumed(
            snapshot=snapshot,
            trainer="" if whole is None else whole.path,
            lost=sum(row["seq"] > seq for row in self.surviving()),
            highest_version=max(published, default=-1),
            notes=torn,
        )


def surviving(log: list[Row]) -> list[Row]:
    """Events that no `resumed` has taken back. Of what stands after `from_seq`, nothing survives."""
    kept: list[Row] = []
    for row in log:
        if row["kind"] == "resumed":
            kept = kept[: row["data"]["from_seq"]]
        kept.append(row)
    return kept


class TrainerParts:
    """`ports.Checkpoints` of a run that nobody resumes: of the last `keep`, the trainer's part alone."""

    def __init__(self, disk: SimDisk, *, keep: int) -> None:
        self._disk = disk
        self._keep = keep
        self._paths: list[str] = []
        self._saves = 0

    async def save(self, snapshot: Snapshot, keep_trainer: Callable[[str], Awaitable[None]]) -> str | Failure:
        path = f"checkpoint-{self._saves}"
        self._saves += 1
        await keep_trainer(path)
        self._paths.append(path)
        for old in self._paths[: -self._keep]:
            del self._disk.parts[old]
        self._paths = self._paths[-self._keep :]
        return path


class SimCheckpoints:
    """`ports.Checkpoints` on a simulated disk."""

    def __init__(
        self, disk: SimDisk, *, save_s: float = 0.0, fault: Callable[[int], SaveFault | None] = lambda nth: None,
        torn: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """fault: (saves before) -> what goes wrong; torn: kills the driver, called when a save is to end without mark."""
        self._disk = disk
        self._incarnation = disk.incarnation
        self._save_s = save_s
        self._fault = fault
        self._torn = torn
        self.saves = 0

    async def save(self, snapshot: Snapshot, keep_trainer: Callable[[str], Awaitable[None]]) -> str | Failure:
        disk, nth = self._disk, self.saves
        self.saves += 1
        fault = self._fault(nth)
        path = f"checkpoint-{self._incarnation}-{nth}"
        kept = Kept(path=path, snapshot=pickle.dumps(snapshot))
        await keep_trainer(path)
        await asyncio.sleep(self._save_s)
        if isinstance(fault, Failure):
            disk.parts.pop(path, None)
            return fault
        if disk.incarnation == self._incarnation:
            disk.checkpoints.append(kept)
        if fault == "torn":
            self._torn()
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        kept.whole = disk.incarnation == self._incarnation
        return path
