"""The six ports between control and a world. `runtime/` implements them with devices, `sim/` with cost models.

What the signatures cannot say: control carries counts and opaque payloads, never token arrays; abort is a value and
cancelling an await means shutdown; expected failures are returned, a port raises only for misuse or a dead world; times
are absolute seconds of `asyncio.get_running_loop().time()`; every method may be called from one event loop only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollart.core.events import Recorder, Sink
from rollart.core.resources import Change, Degrees, EngineInfo, Lease, Limits
from rollart.core.snapshot import Resumed, Snapshot
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Generation,
    Manifest,
    Observation,
    RequestId,
    Role,
    Sample,
    TaskInstance,
    TaskSpec,
    Tokens,
    Trajectory,
    TrajId,
    TurnFn,
    TurnRequest,
    Version,
)


class Engine(Protocol):
    """One inference server of 1..n ranks. Commands take effect between steps, never inside one."""

    info: EngineInfo

    async def generate(self, request: TurnRequest) -> Generation:
        """Sample one turn. Ends in `stop`, `length`, `aborted` (with the tokens so far) or `failed`; answers once."""
        ...

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Ask that these `generate` calls answer `aborted` within one step. Unknown ids are ignored."""
        ...

    def forget(self, traj: TrajId, attempt: int) -> None:
        """A hint: nothing more comes for this attempt, so its cache may go."""
        ...

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        """Bring a version's bytes near; serving goes on. Idempotent."""
        ...

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        """Serve a prefetched version from the next step on.

        Live requests pinned to the served version delay it until they end or until `pinned_deadline_s`, then are aborted.
        Other live requests are kept (their cache is rebuilt from tokens when they next decode) or answer `aborted`.
        """
        ...

    def book(self) -> EngineBook:
        """The engine's count of its own tokens, as of its last answer, consistent with the generations delivered so far."""
        ...

    async def limit(self, limits: Limits) -> None: ...

    async def sleep(self) -> None:
        """Free the device's memory: colocated training, a lease given back."""
        ...

    async def wake(self, degrees: Degrees | None = None) -> None: ...


class Session(Protocol):
    """One environment for one trajectory. Pull: control drives `reset` and `step`; push: `run` drives and calls `turn`.

    A call that is not done by its deadline answers `Failure("env", "timeout")`; the session is then dead.
    """

    host: str

    async def reset(self, *, deadline_s: float) -> Observation | Failure: ...

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure: ...

    async def run(self, turn: TurnFn) -> Trajectory | Failure: ...

    async def close(self) -> None:
        """Idempotent and safe on half-started sessions."""
        ...


class Env(Protocol):
    """Env hosts: many sessions in processes of their own. They render and tokenise, control never does."""

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> Session | Failure: ...


class Scorer(Protocol):
    async def score(self, trajectory: Trajectory, *, deadline_s: float) -> float | Failure: ...


class Trainer(Protocol):
    """1..n training ranks. How samples are split over ranks and micro-batches changes no gradient."""

    async def begin(self, step: int, *, total_weight: float | None) -> None:
        """Start a step and forget gradients of an unfinished one. None: the total weight is known only at `finish`."""
        ...

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Add gradients only; may be called many times a step."""
        ...

    async def finish(self) -> Mapping[str, float]:
        """Normalise, clip, one optimiser step. Metrics hold at least loss, grad_norm, lr and weights_changed (0 or 1).

        Tokens that corrections took out of the loss are counted in masked_tokens, rejected_tokens and old_tokens.
        """
        ...

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        """Recompute log-probabilities under the present weights and keep them as the old ones of these samples."""
        ...

    async def publish(self, version: Version) -> Manifest:
        """Offer the present weights; returns when every shard is complete."""
        ...

    async def resize(self, leases: Sequence[str]) -> None: ...

    async def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None: ...


class WeightStore(Protocol):
    """The book of versions. Bytes move between trainer ranks and engines, not through here."""

    async def offer(self, manifest: Manifest) -> None: ...

    async def chain(self, have: Version | None, want: Version) -> tuple[Manifest, ...]:
        """What takes an engine from `have` to `want`: deltas in order, or one snapshot."""
        ...

    async def retire(self, below: Version) -> None: ...


class Checkpoints(Protocol):
    """Where checkpoints are kept: control's snapshot and the trainer's tensors, whole or not at all."""

    async def save(self, snapshot: Snapshot, keep_trainer: Callable[[str], Awaitable[None]]) -> str | Failure:
        """Keep both; the mark that makes them count is written last. `keep_trainer(path)` writes the trainer's part.

        Returns where the trainer's part is, for `Trainer.checkpoint(.., "load")`. A failure leaves what was kept before.
        """
        ...


Port = Engine | Env | Scorer | Trainer


class Cluster(Protocol):
    """Devices and processes."""

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure: ...

    async def release(self, lease: str) -> None:
        """Idempotent; safe on half-started things."""
        ...

    async def start(self, lease: Lease) -> Port | Failure:
        """Start what the lease's role needs on its devices.

        One engine, trainer or scorer per lease. Each env lease adds one host to the same `Env`, which it returns.
        """
        ...

    def changes(self) -> AsyncIterator[Change]:
        """Joins, losses, revocations, load, preemptions, as they come, until the reader is cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that a run needs from outside. A world is a value: control cannot tell one from another."""

    name: str
    """fake | local | cluster | virtual; goes into the log's header, decides nothing."""
    cluster: Cluster
    store: WeightStore
    tasks: tuple[TaskSpec, ...]
    sinks: tuple[Sink, ...] = ()
    keep: Callable[[Trajectory], None] = field(default=lambda trajectory: None)
    """Takes every terminal trajectory (payloads and all) for the record; must not block."""
    prepare: Callable[[Trainer, Recorder], Awaitable[None]] | None = None
    """Runs once before the first weights are published: warm start, baselines."""
    checkpoints: Checkpoints | None = None
    """None: nothing is kept, and a trainer that is lost ends the run."""
    resumed: Resumed | None = None
    """Set: go on from there."""
    beside: Callable[[Recorder], AbstractAsyncContextManager[None]] | None = None
    """Goes on beside the run and has its record: watches over the loop's health."""
    conclude: Callable[[Manifest], Awaitable[None]] | None = None
    """Runs once after the last step with the last published version: keep the model."""
