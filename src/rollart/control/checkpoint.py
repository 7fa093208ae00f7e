"""Checkpoints of a run: control's state of one instant beside the trainer's part, and the way back from them.

Invariant: what is restored stands in the log exactly as it was: events after the snapshot are taken back, attempts that
lived then end as `rolled_back`, their members are issued again, and both books of the token ledger go on from where they
were. Nothing that was complete is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from rollart.control.buffer import Buffer, Group
from rollart.control.ending import ENDED
from rollart.control.evaluate import Evaluator
from rollart.control.fleet import Fleet
from rollart.control.groups import Groups
from rollart.control.recovery import Recovery
from rollart.control.rollout import Rollout
from rollart.core.errors import RunFailed, StoreError, describe, store_failure
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.snapshot import GroupState, Snapshot
from rollart.core.types import Failure, Version
from rollart.ports import Checkpoints
from rollart.sched.staleness import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The parts of a run whose state a checkpoint keeps."""

    record: Recorder
    ledger: Ledger
    fleet: Fleet
    rollout: Rollout
    buffer: Buffer
    groups: Groups
    evaluator: Evaluator


def snapshot(parts: Kept, step: int, version: Version) -> Snapshot:
    """The state now, between two steps: `step` is the next one, `version` is what the trainer has published."""
    books = parts.fleet.books()  # may record what it finds, so it comes before the event counter is read
    buffer = parts.buffer
    return Snapshot(
        seq=parts.record.seq,
        t_s=parts.record.now_s,
        step=step,
        version=version,
        jumps=buffer.lineage.jumps,
        cursors={name: cursor.state for name, cursor in parts.groups.cursors.items()},
        counts=dict(buffer.counts),
        opened=buffer.opened,
        recent=tuple(dict(one) for one in buffer.recent),
        groups=tuple(group.state for group in buffer.groups.values()),
        ledger=deepcopy(parts.ledger),
        sampled={engine: sum(book.sampled.values()) for engine, book in books.items()},
        undelivered={
            engine: sum(live.n_tokens for live in books[engine].live.values()) for engine in parts.fleet.engines
        },
        unfinished=tuple(parts.rollout.unfinished()),
        evaluations=parts.evaluator.ordinal,
        evaluating=parts.evaluator.under_way,
    )


def restore(parts: Kept, state: Snapshot) -> dict[str, Mapping[int, int]]:
    """Bring the parts of a new incarnation to where `state` was; returns the attempts to be issued, by group.

    Records what became of everything that lived then.
    """
    _restore_tokens(parts, state)
    parts.evaluator.ordinal = state.evaluations
    if state.evaluating is not None:
        name, version = state.evaluating
        parts.record("eval_finished", eval=name, version=version, complete=False)
    same = {name: _restore_cursor(parts, name, state) for name in parts.groups.cursors}
    buffer = parts.buffer
    buffer.lineage = Lineage(jumps=state.jumps)
    buffer.next_release = state.step
    buffer.released = state.step
    buffer.opened = state.opened
    buffer.counts.update(state.counts)
    buffer.recent.extend(Counter(one) for one in state.recent)
    parts.fleet.min_version = buffer.min_version
    again: dict[str, Mapping[int, int]] = {}
    for one in state.groups:
        group = buffer.restore(one)
        if _goes_on(parts, group, one, same):
            again[group.id] = one.attempts
    return again


def _restore_tokens(parts: Kept, state: Snapshot) -> None:
    """Both books, and the ends of attempts and engines that lived."""
    own, old = parts.ledger, deepcopy(state.ledger)
    own.in_flight, own.buffered, own.trained, own.eval = old.in_flight, old.buffered, old.trained, old.eval
    own.dropped.update(old.dropped)
    own.delivered.update(old.delivered)
    parts.fleet.restore(state.sampled)
    for engine, tokens in state.undelivered.items():
        own.lose(engine, tokens)
        parts.record("engine_lost", engine=engine, failure="the run ended", lost_tokens=tokens)
    for fields in state.unfinished:
        parts.record(ENDED, **fields)
    own.drop("in_flight", "rolled_back", own.in_flight)


def _restore_cursor(parts: Kept, task: str, state: Snapshot) -> bool:
    """False: the task's data set is another one now."""
    kept, cursor = state.cursors.get(task), parts.groups.cursors[task]
    if kept is None:
        return True
    same = cursor.restore(kept)
    if not same:
        text = (
            f"the data set of {task} is not the one of the checkpoint: it is begun at its index 0, as epoch "
            f"{cursor.epoch}; groups of the old one that were not complete are dropped"
        )
        parts.record("advisory", code="data_changed", text=text)
    return same


def _goes_on(parts: Kept, group: Group, state: GroupState, same: Mapping[str, bool]) -> bool:
    """Whether the group's open members are to be issued again."""
    if state.complete:
        return False
    if same.get(state.instance.task, False):
        return True
    parts.buffer.drop(group, "rolled_back")
    return False


class Checkpointing:
    """Keeps a checkpoint every so many steps, where the world has a place for them."""

    def __init__(self, parts: Kept, recovery: Recovery, store: Checkpoints | None, *, every: int, last: int) -> None:
        self._parts = parts
        self._recovery = recovery
        self._store = store
        self._every = every
        self._last = last
        self._failed: Failure | None = None

    def due(self, step: int) -> bool:
        """Between step `step - 1` and step `step`."""
        return self._every > 0 and (step % self._every == 0 or step == self._last)

    async def save(self, step: int, version: Version) -> Version:
        """Keep the state between two steps; returns `version`, for `Recovery.through`.

        A checkpoint that cannot be kept is told of; the second in a row ends the run while the last one is not too old.
        Raises TrainerLost.
        """
        if self._store is None:
            return version
        started = asyncio.get_running_loop().time()
        self._recovery.under_way = True
        try:
            kept = await self._store.save(snapshot(self._parts, step, version), self._recovery.keep)
        except StoreError as error:
            kept = store_failure(error)
        finally:
            self._recovery.under_way = False
        if isinstance(kept, Failure):
            if self._failed is not None:
                raise RunFailed(f"two checkpoints in a row could not be kept, this one after step {step}", kept)
            self._failed = kept
            text = f"no checkpoint after step {step}: {describe(kept)}"
            self._parts.record("advisory", code="checkpoint_failed", text=text)
            return version
        self._failed = None
        self._recovery.kept(kept, step)
        seconds = round(asyncio.get_running_loop().time() - started, 6)
        self._parts.record("checkpointed", step=step, version=version, seconds=seconds)
        return version
