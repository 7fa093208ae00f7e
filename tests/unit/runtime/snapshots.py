"""Snapshots as control makes them, with payloads of the local world, for tests of what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollart.core.errors import failure
from rollart.core.ledger import Ledger
from rollart.core.snapshot import CursorState, GroupState, Snapshot
from rollart.core.types import Segment, Span, TaskInstance, Tokens, Trajectory
from rollart.runtime.payload import TokenPayload

TASKS = ("frozen_lake", "max_digit")


def tokens(n: int, version: int | None, *, truncated: bool = False) -> Tokens:
    ids = np.arange(n, dtype=np.int32)
    if version is None:
        return Tokens(n_tokens=n, payload=TokenPayload(ids=ids))
    logprobs = np.linspace(-3, -1, n, dtype=np.float32)
    payload = TokenPayload(ids=ids, logprobs=logprobs, log_kept_mass=-logprobs if truncated else None)
    return Tokens(n_tokens=n, spans=(Span(version=version, n_tokens=n),), payload=payload)


def trajectory(instance: TaskInstance, member: int, **changes: Any) -> Trajectory:
    first = Segment(pieces=(tokens(5, None), tokens(3, 4)))
    second = Segment(pieces=(tokens(4, None), tokens(2, 5, truncated=True)), parent=0, shared_tokens=2)
    fields: dict[str, Any] = {
        "id": instance.traj_id(member), "attempt": 1, "group_id": instance.group_id, "instance": instance,
        "member": member, "segments": (first, second), "status": "done", "finish_cause": "env_done", "reward": 0.5,
        "turns": 2, "metrics": {"path": np.float64(2.0)}, "timings": {"total": 1.25},
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def snapshot(step: int = 10, *, seq: int = 100, evidence: tuple[object, ...] = (), members: int = 2) -> Snapshot:
    """Two tasks with cursors of their own, an open and a buffered group."""
    groups = []
    for index, task in enumerate(TASKS):
        instance = TaskInstance(task=task, epoch=1, index=index, seed=7 + index)
        done = tuple(trajectory(instance, member, evidence=evidence) for member in range(members))
        groups.append(
            GroupState(
                instance=instance,
                order=index,
                min_version=4,
                done=done,
                attempts={members: 1},
                given_up=0,
                complete=bool(index),
            )
        )
    ledger = Ledger()
    ledger.deliver("engine-0", 40, "train")
    ledger.move("in_flight", "buffered", 20)
    return Snapshot(
        seq=seq, t_s=12.5, step=step, version=step, jumps=((3, 5),),
        cursors={
            "frozen_lake": CursorState(epoch=1, position=17, data="lake"),
            "max_digit": CursorState(epoch=0, position=400, data="digits"),
        },
        counts={"frozen_lake": 12, "max_digit": 12}, opened=24,
        recent=({"frozen_lake": 8, "max_digit": 8},), groups=tuple(groups), ledger=ledger,
        sampled={"engine-0": 40, "engine-3": 0}, undelivered={"engine-0": 0},
        unfinished=({"traj": "train/max_digit/1/1/2", "attempt": 0, "cause": failure("env", "lost").kind},),
        evaluations=1, evaluating=("step-10", 10),
    )  # fmt: skip
