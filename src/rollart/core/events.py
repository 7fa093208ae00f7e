"""The run's record: a closed set of event kinds, each with required fields.

A run is its event log. Every metric, timeline, report and replay is computed from it, so the body holds no wall clock,
process id, host name or random id: `t` is loop time since the run began and ids come from counters.

    {"schema": 1, "run": .., "incarnation": .., "clock": "virtual"|"monotonic", "world": .., "git": ..}     the header
    {"seq": 1, "t": 0.25, "kind": "turn_done", "traj": .., "attempt": 0, "turn": 2, "data": {..}}            each event
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollart.core.errors import InvariantBroken

SCHEMA = 1
IDS = ("task", "group", "traj", "attempt", "turn", "engine", "host", "step", "version", "eval")
"""Fields that stand at the top level of an event; everything else goes into `data`."""

KINDS: Mapping[str, tuple[str, ...]] = {
    # the run
    # mix: task -> wanted share of what is trained; success_at: task -> reward from which a trajectory is a success
    "run_started": ("recipe", "steps", "batch", "group_size", "max_staleness", "sync_order", "mix", "success_at"),
    # from_seq: the last event that stands; lost: how many after it are taken back
    "resumed": ("from_seq", "lost"),
    "checkpointed": ("step", "version", "seconds"),
    "advisory": ("code", "text"),
    "wait_expired": ("what", "waited_s"),
    # how late the control loop woke in the last `seconds`, at worst and at the 99th percentile
    "loop_lag": ("worst_s", "p99_s", "seconds"),
    # what a model of this machine is fitted to, once: its cores, its processor, versions by name
    "machine": ("cores", "cpu", "versions"),
    # since the run began: CPU seconds by role, batches sent and polls answered by role, each engine's work
    "usage": ("cpu_s", "traffic", "work"),
    # of a simulated run: what its figures rest on and what to know of it, lines; pool -> cost of a second of all its
    # devices (an H20's = 1), and -> devices
    "simulated": ("basis", "notes", "costs", "devices", "trains"),
    # of a simulated run: a fault of its cluster happened; what: engine, node, env_host, trainer, weights or rewards
    "fault": ("what", "subject"),
    # what a simulated run's reward service came to, in seconds and the same cost
    "rewards_used": ("calls", "timeouts", "busy_s", "queue_s", "cold_s", "cost"),
    "ledger": ("sampled", "trained", "dropped", "buffered", "in_flight", "eval", "engines"),
    "run_finished": ("status", "why"),
    # before and beside training
    "baseline": ("task", "policy", "success", "episodes", "answer"),
    "warm_started": ("steps", "tokens", "loss", "seconds"),
    "eval_started": ("eval", "version", "tasks"),
    "eval_scored": ("eval", "task", "version", "split", "sampling", "episodes", "success", "reward_mean", "complete"),
    "eval_finished": ("eval", "version", "complete"),
    # the cluster
    # to: train | rollout, whose the devices are that both share; engines: how many slept or woke for it
    "devices_switched": ("to", "engines", "seconds"),
    "engine_joined": ("engine", "pool", "version"),
    "engine_lost": ("engine", "failure", "lost_tokens"),
    "host_joined": ("host",),
    "host_lost": ("host", "failure"),
    "trainer_lost": ("failure",),
    # steps: how many were repeated from the checkpoint to get to the weights that were lost
    "trainer_restarted": ("steps", "seconds"),
    # groups and trajectories
    "group_opened": ("group", "task", "members", "room"),
    "group_completed": ("group", "task", "members", "reward_mean", "oldest_version"),
    "group_dropped": ("group", "task", "reason"),
    "traj_started": ("traj", "attempt", "group", "task", "purpose"),
    "env_opened": ("traj", "attempt", "host", "seconds"),
    "turn_routed": ("traj", "attempt", "turn", "part", "engine", "load", "sticky"),
    "turn_done": (
        "traj",
        "attempt",
        "turn",
        "part",
        "engine",
        "seconds",
        "sampled",
        "spans",
        "finish",
        "prefilled",
        "rebuilt",
    ),
    "env_stepped": ("traj", "attempt", "turn", "seconds", "bad_action"),
    "scored": ("traj", "attempt", "seconds", "reward"),
    # seconds: open, generate, step, score, total; spans: how many version spans
    "traj_finished": (
        "traj",
        "attempt",
        "group",
        "task",
        "purpose",
        "status",
        "cause",
        "reward",
        "turns",
        "bad_actions",
        "sampled",
        "context",
        "oldest_version",
        "newest_version",
        "spans",
        "metrics",
        "seconds",
    ),
    "failure_decided": ("traj", "attempt", "failure", "decision"),
    "abort_requested": ("traj", "attempt", "reason"),
    "tokens_dropped": ("reason", "tokens"),
    # training
    "batch_released": (
        "step",
        "version",
        "groups",
        "trajectories",
        "tokens",
        "staleness_mean",
        "staleness_max",
        "waited_s",
        "quota",
    ),
    "step_started": ("step", "version"),
    # trained_tokens: in the loss; with masked_tokens, which corrections took out of it, all tokens of the batch
    "step_finished": ("step", "version", "seconds", "trained_tokens", "metrics"),
    "published": ("step", "version", "seconds", "bytes", "buckets", "digest"),
    "prefetched": ("engine", "version", "seconds"),
    "applied": ("engine", "version", "seconds", "exposed_s", "live", "digest", "matches"),
}

_REQUIRED = {kind: frozenset(names) for kind, names in KINDS.items()}
_IDS = frozenset(IDS)
_OWN_IDS = {kind: tuple(name for name in names if name in _IDS) for kind, names in KINDS.items()}
_EXACT_S = 1e9
"""Up to so many seconds a microsecond is told apart from the next."""


def rounded_s(seconds: float) -> float:
    """Seconds in whole microseconds; `round(seconds, 6)` at a tenth of its cost, which several times in every turn is felt."""
    if 0.0 <= seconds < _EXACT_S:
        return int(seconds * 1e6 + 0.5) / 1e6
    return round(seconds, 6)


Sink = Callable[[Mapping[str, Any]], None]
"""Takes one finished event. A world provides it; it must not block (buffer, and write elsewhere)."""


class Recorder:
    """Numbers events, stamps them with loop time since `origin`, checks their fields and hands them to sinks.

    Raises InvariantBroken for an unknown kind or a missing field, at the line that emitted it.
    """

    __slots__ = ("_now", "_sinks", "origin", "seq")

    def __init__(
        self, sinks: tuple[Sink, ...], now: Callable[[], float], *, seq: int = 0, origin: float | None = None
    ) -> None:
        self._sinks = sinks
        self._now = now
        self.seq = seq
        self.origin = now() if origin is None else origin

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._now() - self.origin

    def __call__(self, kind: str, **fields: Any) -> None:
        required = _REQUIRED.get(kind)
        if required is None:
            raise InvariantBroken(f"event kind {kind!r} is not in the closed set; add it to core.events.KINDS")
        if not fields.keys() >= required:
            missing = next(name for name in KINDS[kind] if name not in fields)
            raise InvariantBroken(f"event {kind!r} lacks its required field {missing!r}")
        self.seq += 1
        event: dict[str, Any] = {"seq": self.seq, "t": rounded_s(self._now() - self.origin), "kind": kind}
        for name in _OWN_IDS[kind]:
            event[name] = fields.pop(name)
        if not _IDS.isdisjoint(fields):
            for name in [name for name in fields if name in _IDS]:
                event[name] = fields.pop(name)
        event["data"] = fields
        for sink in self._sinks:
            sink(event)


def header(*, run: str, incarnation: int, clock: str, world: str, git: str) -> dict[str, Any]:
    """The first line of an event log."""
    return {"schema": SCHEMA, "run": run, "incarnation": incarnation, "clock": clock, "world": world, "git": git}
