"""What a world hands to the contract suite: its ports, and the few hooks that contracts need to bring about their cases.

A contract is an async function of a rig, written against the port's Protocol alone: it runs on any loop and assumes nothing
about times but that what it waits for comes within a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rollart.core.types import (
    Manifest,
    Observation,
    Purpose,
    Role,
    Sample,
    Segment,
    TaskInstance,
    Tokens,
    Trajectory,
    TurnRequest,
    Version,
)
from rollart.ports import Cluster, Engine, Env, Scorer, Trainer

POLLS = 5000
"""How often `until` looks before it gives up: with the rigs' ticks, a minute or so of their own time."""


def nothing() -> None:
    """A hook that has nothing to do in a world."""


class MakeRequest(Protocol):
    """A request that samples exactly `max_tokens` tokens if nothing stops it. `name` tells trajectories apart."""

    def __call__(
        self,
        name: str,
        *,
        turn: int = 0,
        context: Segment | None = None,
        max_tokens: int = 8,
        purpose: Purpose = "train",
        pin: Version | None = None,
        min_version: Version = 0,
    ) -> TurnRequest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRig:
    """An engine that serves version 0."""

    engine: Engine
    request: MakeRequest
    publish: Callable[[Version], Coroutine[Any, Any, Manifest]]
    """New weights, other than any before, that the engine can fetch."""
    lose: Callable[[], Coroutine[Any, Any, None]]
    """Kill the engine's process."""
    long_tokens: int
    """A turn of this length is certainly still running when its first tokens have just been seen."""
    tick_s: float
    """A short time, for polling."""
    hold: Callable[[], None] = nothing
    """From now on no turn gets beyond its first few tokens, until `go_on`. Nothing where an engine can only step while a
    contract waits for it: there `long_tokens` are steps enough."""
    go_on: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRig:
    env: Env
    instance: Callable[[int], TaskInstance]
    """Any well-behaved problem, by number. It takes more than one turn and ends within `most_turns`."""
    most_turns: int
    act: Callable[[Observation], tuple[Tokens, ...]]
    """What a policy might have answered."""
    stuck: TaskInstance
    """A problem whose step never returns."""
    raising: TaskInstance
    """A problem whose step raises."""
    unopenable: TaskInstance
    """A problem whose environment cannot be opened."""
    sessions: Callable[[], Coroutine[Any, Any, int]]
    """Environments that are open now."""
    step_s: float
    """A deadline that every call but a stuck one keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerRig:
    scorer: Scorer
    good: Trajectory
    broken: Trajectory
    """The scorer's own code fails on it."""
    slow: Trajectory
    """Scoring it takes longer than `score_s`."""
    score_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRig:
    trainer: Trainer
    twin: Trainer
    """Another trainer with the same weights."""
    samples: Callable[[int], list[Sample]]
    """Trainable rows, others for each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRig:
    cluster: Cluster
    roles: tuple[Role, ...]
    """What it can start."""
    lose_engine: Callable[[Engine], Coroutine[Any, Any, None]]
    """Kill its process, as the other two do."""
    lose_host: Callable[[str], Coroutine[Any, Any, None]]
    lose_trainer: Callable[[Trainer], Coroutine[Any, Any, None]]
    request: MakeRequest
    instance: TaskInstance
    samples: Callable[[int], list[Sample]]
    """Trainable rows, others for each number."""
    folder: str
    """Where a trainer can leave its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortWorld:
    """One world. Each context manager starts a port, with what it needs, and ends it."""

    name: str
    run: Callable[[Coroutine[Any, Any, None]], None]
    engine: Callable[[], AbstractAsyncContextManager[EngineRig]]
    env: Callable[[], AbstractAsyncContextManager[EnvRig]]
    scorer: Callable[[], AbstractAsyncContextManager[ScorerRig]]
    trainer: Callable[[], AbstractAsyncContextManager[TrainerRig]]
    cluster: Callable[[], AbstractAsyncContextManager[ClusterRig]]


async def until(condition: Callable[[], bool], *, tick_s: float, what: str) -> None:
    """Poll until the condition holds."""
    for _ in range(POLLS):
        if condition():
            return
        await asyncio.sleep(tick_s)
    raise AssertionError(f"waited in vain for {what}")
