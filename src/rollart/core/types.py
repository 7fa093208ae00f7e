"""The nouns of the system: what flows between decisions, loops and worlds.

Invariant: nothing here carries tensors or token arrays in the open. Control moves counts, version spans and an
opaque `payload`; only the world that made a payload looks into it (in the simulator it is None).
All times are absolute seconds of `loop.time()` unless the name says otherwise; all sizes are in the unit of the name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NewType

Version = int
"""One per publish; never reused, also not after a rollback (numbering goes on at highest + 1)."""
TrajId = NewType("TrajId", str)
"""`purpose/task/epoch/index/member`: made from counters, hence equal in every world and rerun."""
GroupId = NewType("GroupId", str)
"""`purpose/task/epoch/index`."""

Purpose = Literal["train", "eval", "external"]
Role = Literal["prefill", "decode", "mixed", "train", "env", "score", "serve"]
Boundary = Literal["env", "engine", "scorer", "trainer", "store", "cluster"]
Finish = Literal["stop", "length", "aborted", "failed"]
Status = Literal["done", "aborted", "failed"]
DropReason = Literal[
    "stale",
    "redundant",
    "tail_cut",
    "env_failed",
    "unscored",
    "zero_variance",
    "masked",
    "engine_lost",
    "rolled_back",
    "duplicate",
]
DROP_REASONS: tuple[DropReason, ...] = DropReason.__args__  # type: ignore[attr-defined]


class RequestId(NamedTuple):
    """One request to one engine, unique for ever. `part` counts re-sends of a turn (engine lost, aborted by an apply)."""

    traj: TrajId
    attempt: int
    turn: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An expected failure, as a value. `kind` is from the boundary's closed vocabulary in `core.errors`."""

    where: Boundary
    kind: str
    retryable: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens sampled under one version."""

    version: Version
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One contiguous piece: sampled by the policy (`spans` sum to `n_tokens`, versions never fall) or written by others."""

    n_tokens: int
    spans: tuple[Span, ...] = ()
    payload: object | None = None

    @property
    def sampled(self) -> bool:
        return bool(self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A trainable sequence. A broken prefix, a compaction or a sub-agent opens a new one beside it."""

    pieces: tuple[Tokens, ...] = ()
    parent: int | None = None
    """Index of the segment that this one branches from."""
    shared_tokens: int = 0
    """Leading tokens shared with the parent: trained once, in the parent."""
    _counted: int = field(default=-1, init=False, repr=False, compare=False)
    """Tokens of all pieces, once somebody has asked; a context is asked for it at every turn."""

    @property
    def n_tokens(self) -> int:
        counted = self._counted
        if counted < 0:
            counted = sum(piece.n_tokens for piece in self.pieces)
            object.__setattr__(self, "_counted", counted)
        return counted

    @property
    def spans(self) -> tuple[Span, ...]:
        """Version spans of the tokens sampled here, in order; those of the shared prefix are the parent's."""
        own: list[Span] = []
        start = 0
        for piece in self.pieces:
            at, start = start, start + piece.n_tokens
            for span in piece.spans:
                at += span.n_tokens
                beyond = min(span.n_tokens, at - self.shared_tokens)
                if beyond > 0:
                    own.append(Span(version=span.version, n_tokens=beyond))
        return tuple(own)

    @property
    def n_sampled(self) -> int:
        if self.shared_tokens:
            return sum(span.n_tokens for span in self.spans)
        return sum(span.n_tokens for piece in self.pieces for span in piece.spans)

    def extended(self, *pieces: Tokens) -> Segment:
        longer = Segment(pieces=self.pieces + pieces, parent=self.parent, shared_tokens=self.shared_tokens)
        if self._counted >= 0:
            object.__setattr__(longer, "_counted", self._counted + sum(piece.n_tokens for piece in pieces))
        return longer


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInstance:
    """One problem. `seed` decides the problem itself (same seed, same problem), whatever the epoch or purpose."""

    task: str
    epoch: int
    index: int
    seed: int
    purpose: Purpose = "train"

    @property
    def group_id(self) -> GroupId:
        return GroupId(f"{self.purpose}/{self.task}/{self.epoch}/{self.index}")

    def traj_id(self, member: int) -> TrajId:
        return TrajId(f"{self.purpose}/{self.task}/{self.epoch}/{self.index}/{member}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine draws a token. Temperature 0 is greedy; log-probabilities are then those at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a turn; the stop token itself is part of what was sampled."""
    seed: int = 0
    """A draw depends on (seed, position in the sequence) only, never on what else is in the batch."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One generation. `context` is the whole history: an engine that has none of it cached needs nothing else."""

    id: RequestId
    model: str
    purpose: Purpose
    domain: str
    """The task, for affinity between tasks and pools."""
    context: Segment
    max_tokens: int
    sampling: Sampling
    min_version: Version = 0
    """Sample under this version or a newer one: an older token could not be trained any more."""
    pin: Version | None = None
    """Evaluation: sample under this version only."""
    priority: int = 0
    """Serving before training before draft work; higher first."""
    draft_depth: int = 0
    deadline_s: float = float("inf")
    """Absolute; how long the whole turn may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine answers: the tokens of this request, across the versions applied meanwhile."""

    tokens: Tokens
    finish: Finish
    prefilled_tokens: int = 0
    """Prompt tokens computed for the first time; cached = context - prefilled - rebuilt."""
    rebuilt_tokens: int = 0
    """Tokens recomputed because new weights or a preemption threw their cache away."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What `turn(request)` answers: the pieces of one turn (several when it went on after an abort by an apply)."""

    pieces: tuple[Tokens, ...]
    finish: Finish
    failure: Failure | None = None

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's reply, already rendered and tokenised where the environment runs."""

    tokens: Tokens
    """The only new tokens of the context."""
    new_segment: Segment | None = None
    """Set when the template broke the prefix: the next turn goes on from this context instead."""
    terminated: bool = False
    truncated: bool = False
    reward: float | None = None
    bad_action: bool = False
    """The environment could not read the action; it said so in the observation. Counted, never a failure."""
    evidence: object | None = None
    """What a scorer or a reader may look at (text, test results); None in the simulator."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one task instance in its terminal state."""

    id: TrajId
    attempt: int
    group_id: GroupId
    instance: TaskInstance
    member: int
    segments: tuple[Segment, ...]
    status: Status
    finish_cause: str
    """stop | length | max_turns | env_done | truncated | a drop reason when aborted | the failure's kind when failed."""
    reward: float | None = None
    """Sum of the observations' rewards unless the task names a scorer. None: unscored, never 0."""
    failure: Failure | None = None
    turns: int = 0
    bad_actions: int = 0
    evidence: tuple[object, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds: open, generate, step, score, total."""

    @property
    def n_sampled(self) -> int:
        return sum(segment.n_sampled for segment in self.segments)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Version spans over all sampled tokens, each token once, in order, neighbours of one version merged."""
        merged: list[Span] = []
        for segment in self.segments:
            for span in segment.spans:
                if merged and merged[-1].version == span.version:
                    merged[-1] = Span(version=span.version, n_tokens=merged[-1].n_tokens + span.n_tokens)
                else:
                    merged.append(span)
        return tuple(merged)

    @property
    def oldest_version(self) -> Version | None:
        """Version of the oldest sampled token; None when nothing was sampled."""
        versions = [span.version for span in self.spans]
        return min(versions) if versions else None

    @property
    def newest_version(self) -> Version | None:
        versions = [span.version for span in self.spans]
        return max(versions) if versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row for the trainer. n trajectories stay n units of account however many segments they have."""

    traj: TrajId
    index: int = 0
    """Which segment of the trajectory."""
    task: str
    segment: Segment
    advantage: float
    weight: float = 1.0
    """Sums to 1 over a trajectory's segments."""
    min_version: Version = 0
    """Tokens sampled under an older version stay out of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Progress of one live request as the engine last reported it."""

    n_tokens: int
    oldest_version: Version | None
    """None: nothing sampled yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBook:
    """The engine's side of the token ledger, as of its last answer."""

    sampled: Mapping[Purpose, int] = field(default_factory=dict)
    """Cumulative tokens sampled per purpose since the engine started."""
    live: Mapping[RequestId, Live] = field(default_factory=dict)
    rebuilt_tokens: int = 0
    duplicates: int = 0
    """Tokens of answers that came for a request already answered; they were sampled and are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What is served. `digest` is bitwise over live tensors, or of the bytes handed over where an engine repacks them."""

    digest: str
    probe: tuple[float, ...] = ()
    """Log-probabilities of fixed prompts, compared within the engine's measured mismatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One published version. `location` is opaque: where the world keeps the bytes."""

    version: Version
    base: Version | None = None
    """None: a snapshot; else an exact delta on `base`."""
    shards: Mapping[str, int] = field(default_factory=dict)
    """`param/dim/start-stop/dtype` -> bytes."""
    buckets: int = 0
    fingerprint: Fingerprint = Fingerprint(digest="")
    location: object | None = None

    @property
    def n_bytes(self) -> int:
        return sum(self.shards.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Outcome of an apply: what is served now, and how long live requests stood still for it."""

    fingerprint: Fingerprint
    exposed_s: float = 0.0
    """Time in which the engine held live requests and did not step because of this apply."""
    live_requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """What control must know of a task; the text, the template and the tokenizer stay with the world."""

    name: str
    ratio: float
    train: Sequence[int]
    """Seeds of the training instances; one epoch visits each once."""
    held_out: Sequence[int] = ()
    """Seeds never trained on, for evaluation; empty: evaluation uses the training instances."""
    data: str = ""
    """Digest of what else decides the instances beside their seeds: a data set is another one when it changes."""
    success_at: float = 1.0
    """A trajectory with at least this reward counts as a success."""
    max_turns: int = 1
    max_tokens: int = 16
    """Tokens per turn."""
    max_context: int = 4096
    """Tokens per trajectory; a turn that would pass it ends the trajectory as truncated."""
    stop_ids: tuple[int, ...] = ()
    scored: bool = False
    """True: the scorer gives the reward; False: the sum of the observations' rewards."""


TurnFn = Callable[[TurnRequest], Awaitable[Turn]]
"""Routes, retries, records; rollouts that we drive and agents that drive us share it."""
