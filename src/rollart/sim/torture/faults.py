"""What may go wrong in a scenario, and where the simulated world asks whether it goes wrong now.

Invariant: a fault happens once in a scenario, at the `nth` call of its kind (or the `nth` event of the log) since the run
began, counted over all incarnations; with the same scenario it hits the same call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollart.core.types import Boundary

Hook = Literal["env", "engine", "scorer", "trainer", "start", "save", "event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    hook: Hook
    """Who asks for it: a port's call, the start of a worker, a checkpoint, or the event log."""
    calls: tuple[str, ...]
    """Which calls it may hit; of events, their kinds, and "" for any."""
    explains: tuple[Boundary, ...] = ()
    """Boundaries whose failures may end a run because of it."""
    hits: tuple[str, ...] = ()
    """Lifecycle states in which it can find what it hits."""


ATTEMPTS = ("attempt opening", "attempt generating", "attempt stepping", "attempt scoring")
GROUPS = ("group open", "group buffered", "group training")
OF_ATTEMPT = ("group open", "group buffered", "group training", "group trained", "group dropped")
PHASES = tuple(f"trainer {phase}" for phase in ("idle", "begin", "accumulate", "finish", "logprobs", "publish", "save"))
EVERYTHING = (*ATTEMPTS, *GROUPS, *PHASES, "trainer load", "trainer none")
_SESSION = ("attempt opening", "attempt stepping", "attempt scoring", *OF_ATTEMPT)
_ENV = ("open", "reset", "step", "close")
_TURN = ("attempt generating", "group open")
"""Members of a group that is over are told to stop, so none of them asks an engine again."""
_ROUTED = ATTEMPTS[1:]
"""Attempts that have an engine."""
_TRAINER = ("begin", "accumulate", "finish", "logprobs", "publish", "save", "load")
_ROLES = ("train", "env", "mixed", "score")


EVENTS = (
    "run_started", "resumed", "checkpointed", "published", "step_started", "trainer_lost", "trainer_restarted",
    "engine_lost", "host_lost", "eval_started",
)  # fmt: skip
"""Moments of a run that are too short for a fault at any event to meet them often."""


def _env(*explains: Boundary) -> Kind:
    return Kind(hook="env", calls=_ENV, explains=explains or ("env",), hits=_SESSION)


def _turn(*explains: Boundary) -> Kind:
    return Kind(hook="engine", calls=("generate",), explains=explains, hits=_TURN)


def _weights(call: str) -> Kind:
    return Kind(hook="engine", calls=(call,), explains=("engine", "cluster"), hits=(*_ROUTED, *PHASES))


def _world(*explains: Boundary, hits: tuple[str, ...] = EVERYTHING) -> Kind:
    return Kind(hook="event", calls=("",) * len(EVENTS) + EVENTS, explains=explains, hits=hits)


KINDS: Mapping[str, Kind] = {
    "env_hangs": _env(),
    "env_raises": _env(),
    "env_refuses": _env(),
    "env_slow": _env(),
    "env_dead": _env(),
    "engine_raises": _turn("engine"),
    "answer_lost": _turn("engine"),
    "answer_late": _turn("engine"),
    "answer_twice": _turn(),
    "answer_deaf": _turn("engine"),
    "answer_partial": _turn("engine"),
    "engine_slow": _turn("engine"),
    "prefetch_fails": _weights("prefetch"),
    "prefetch_hangs": _weights("prefetch"),
    "apply_fails": _weights("apply"),
    "apply_hangs": _weights("apply"),
    "apply_flipped": _weights("apply"),
    "scorer_raises": Kind(hook="scorer", calls=("score",), explains=("scorer",), hits=("attempt scoring", *OF_ATTEMPT)),
    "scorer_slow": Kind(hook="scorer", calls=("score",), explains=("scorer",), hits=("attempt scoring", *OF_ATTEMPT)),
    "scorer_nan": Kind(hook="scorer", calls=("score",), explains=("scorer",), hits=("attempt scoring", *OF_ATTEMPT)),
    "scorer_dead": Kind(hook="scorer", calls=("score",), explains=("scorer",), hits=("attempt scoring", *OF_ATTEMPT)),
    "trainer_dies": Kind(
        hook="trainer", calls=_TRAINER, explains=("trainer",), hits=(*PHASES[1:], "trainer load", *GROUPS)
    ),
    "trainer_hangs": Kind(
        hook="trainer", calls=_TRAINER, explains=("trainer",), hits=(*PHASES[1:], "trainer load", *GROUPS)
    ),
    "trainer_lost": _world("trainer", hits=(*PHASES, "trainer load", *GROUPS)),
    "engine_lost": _world("engine", "cluster", hits=_ROUTED),
    "engines_lost": _world("engine", "cluster", hits=_ROUTED),
    "host_lost": _world("env", "cluster", hits=ATTEMPTS),
    "hosts_lost": _world("env", "cluster", hits=ATTEMPTS),
    "start_fails": Kind(hook="start", calls=_ROLES, explains=("cluster",), hits=EVERYTHING),
    "start_hangs": Kind(hook="start", calls=_ROLES, explains=("cluster",), hits=EVERYTHING),
    "checkpoint_full": Kind(hook="save", calls=("",), explains=("store",), hits=(*ATTEMPTS, *GROUPS[:2])),
    "checkpoint_torn": Kind(hook="save", calls=("",), explains=(), hits=(*ATTEMPTS, *GROUPS[:2])),
    "driver_killed": _world(),
    "run_cancelled": _world(),
}
ENDS_INCARNATION = ("checkpoint_torn", "driver_killed", "run_cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a scenario."""

    kind: str
    call: str = ""
    nth: int = 0
    """It hits this call, counted from 0, or the first one after it that it can hit."""
    seconds: float = 0.0
    """slow: by how much; losses: until they are told; ends of the driver: from the event to the end."""


class Faults:
    """The faults of one scenario that have not happened yet, and those that have."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._pending: dict[tuple[Hook, str], list[Fault]] = defaultdict(list)
        for fault in sorted(faults, key=lambda one: -one.nth):
            self._pending[KINDS[fault.kind].hook, fault.call].append(fault)
        self._calls: Counter[tuple[Hook, str]] = Counter()
        self.fired: list[tuple[Fault, tuple[str, ...]]] = []
        """With the lifecycle states of what each hit."""
        self.frozen = False
        """The driver is dead: nothing that it still does is of this run."""

    def due(self, hook: Hook, call: str = "") -> Fault | None:
        """Count a call; the fault that hits it, if any."""
        if self.frozen:
            return None
        key = (hook, call)
        pending = self._pending.get(key)
        if not pending:
            return None
        nth = self._calls[key]
        self._calls[key] = nth + 1
        return pending.pop() if pending[-1].nth <= nth else None

    def later(self, fault: Fault) -> None:
        """It found nothing to hit; it is tried again at the next call."""
        self._pending[KINDS[fault.kind].hook, fault.call].append(fault)

    def hit(self, fault: Fault, states: Iterable[str]) -> None:
        self.fired.append((fault, tuple(sorted(set(states)))))

    def explains(self, where: Boundary) -> bool:
        """Whether a failure of this boundary may have ended the run because of what has happened."""
        return any(where in KINDS[fault.kind].explains for fault, _ in self.fired)
