"""What was lost in a run, and what it cost: workers, transfers and outages by kind, time without them, work done twice.

Owns the figures of faults, of the whole run: they are rare, and a window would hold too few. Invariants: tokens count as wasted
that a lost engine never delivered, and those of attempts that ended because a worker or a service was gone, each once; time
without something is counted once, however many faults took it, and ends with the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.observe.log import Event

Data = Mapping[str, Any]
GONE = ("engine lost", "env lost", "scorer lost")
"""Why attempts end that a fault ended; what passes a deadline may have another cause."""
RUN_ENDED = "the run ended"
"""What a resumed run says of the engines that it had before: no fault of theirs."""
KINDS: Mapping[str, tuple[str, str]] = {
    "engine": ("engine", "engines"), "node": ("node", "nodes"), "env_host": ("env host", "env hosts"),
    "trainer": ("trainer", "trainers"), "weights": ("transfer of weights", "transfers of weights"),
    "rewards": ("outage of rewards", "outages of rewards"),
}  # fmt: skip
"""Kind of fault -> what was lost, in words, one and several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """Of the whole run."""

    happened: Mapping[str, int]
    """Kind -> how many: engine, env_host and trainer that were lost, whatever took them; of a simulated run also node, and
    weights and rewards for transfers that failed and outages."""
    unserved: int
    """Those of the engines that were lost before they served: no turn was interrupted by it."""
    engines_down: float
    """Share of the time of all engines that have served in which one was lost and none served in its place."""
    engines_down_s: float
    """Engine-seconds."""
    hosts_down_s: float
    """Host-seconds."""
    trainer_down_s: float
    """With the steps that the next one repeated."""
    repeated_steps: int
    """That another trainer did again."""
    rewards_down_s: float
    """In which the service was away, at least once."""
    moved: int
    """Trajectories that went on on another engine; one that moves twice counts twice."""
    again: int
    """Attempts that ended because a worker or a service was gone."""
    wasted_tokens: int
    wasted: float
    """Share of the tokens that were trained or dropped."""

    @property
    def lost(self) -> str:
        """What was, in words."""
        said = {what: counted(n, *KINDS[what]) for what, n in self.happened.items()}
        if self.unserved:
            said["engine"] += f" ({self.unserved} that never served)"
        return ", ".join(said.values()) or "nothing"


def counted(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


class _Down:
    """Seats without anyone: from a loss to whoever comes next."""

    def __init__(self) -> None:
        self._there: set[str] = set()
        self._away = 0
        self._since_s = 0.0
        self.lost = 0
        self.unserved = 0
        """Those of them that had not joined."""
        self.down_s = 0.0
        self.up_s = 0.0

    def _advance(self, t: float) -> None:
        passed_s, self._since_s = t - self._since_s, t
        self.down_s += passed_s * self._away
        self.up_s += passed_s * len(self._there)

    def joined(self, name: str, t: float) -> None:
        self._advance(t)
        self._there.add(name)
        self._away = max(0, self._away - 1)

    def left(self, name: str, t: float) -> None:
        """One that never served leaves no seat empty that was not empty before."""
        self._advance(t)
        self.lost += 1
        if name in self._there:
            self._there.discard(name)
            self._away += 1
        else:
            self.unserved += 1

    def read(self, t: float) -> None:
        self._advance(t)

    def none_is_left(self, t: float) -> None:
        """The run goes on with others, and nobody misses those that it had."""
        self._advance(t)
        self._there.clear()
        self._away = 0


class _TrainerDown:
    """The trainer's seat: from a fault to the weights that the next one publishes, or for as long as recovery says."""

    def __init__(self) -> None:
        self._failed_s: float | None = None
        """When it did, as long as nobody has noticed."""
        self._since_s: float | None = None
        """Set: it is away."""
        self._last_s = 0.0
        """Of the loss that ended last."""
        self._before_s = 0.0
        """Of those before it."""

    def failed(self, t: float) -> None:
        self._failed_s = t

    def lost(self, t: float) -> None:
        """Somebody has noticed. Others that are lost on the way to its replacement lengthen the same loss."""
        if self._since_s is None:
            self._before_s, self._last_s = self._before_s + self._last_s, 0.0
            self._since_s = t if self._failed_s is None else self._failed_s
        self._failed_s = None

    def back(self, t: float) -> None:
        """Another publishes weights, or the run goes on with others."""
        if self._since_s is not None:
            self._last_s, self._since_s = t - self._since_s, None

    def restarted(self, seconds: float) -> None:
        """It was brought back from a checkpoint, which took so long; its weights were published in this instant."""
        self._last_s, self._since_s = seconds, None

    def down_s(self, t: float) -> float:
        return self._before_s + self._last_s + (0.0 if self._since_s is None else t - self._since_s)


class _Outages:
    """Spans that begin one after the other and may overlap: how long at least one of them lasted."""

    def __init__(self) -> None:
        self._since_s = self._until_s = 0.0
        """Of those that overlap and began last."""
        self._before_s = 0.0

    def begins(self, t: float, lasts_s: float) -> None:
        if t > self._until_s:
            self._before_s += self._until_s - self._since_s
            self._since_s = t
        self._until_s = max(self._until_s, t + lasts_s)

    def down_s(self, t: float) -> float:
        return self._before_s + min(t, self._until_s) - self._since_s


class FaultTally:
    """Feed events in order. Memory is that of live attempts and of engines that are gone."""

    def __init__(self) -> None:
        self._engines, self._hosts = _Down(), _Down()
        self._trainer, self._outages = _TrainerDown(), _Outages()
        self._gone: set[str] = set()
        self._home: dict[tuple[str, int], str] = {}
        self._counts: Counter[str] = Counter()
        self._happened: Counter[str] = Counter()
        self._ledger: Data = {}
        self._asked = False
        """Faults were simulated, whether or not one happened."""
        self._t = 0.0
        self._on: Mapping[str, Callable[[Event, float, Data], None]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def __call__(self, event: Event) -> None:
        handle = self._on.get(event["kind"])
        if handle is not None:
            self._t = event["t"]
            handle(event, event["t"], event["data"])

    def _on_simulated(self, event: Event, t: float, data: Data) -> None:
        self._asked = data.get("fails", False)

    def _on_resumed(self, event: Event, t: float, data: Data) -> None:
        self._engines.none_is_left(t)
        self._hosts.none_is_left(t)
        self._trainer.back(t)
        self._home.clear()

    def _on_engine_joined(self, event: Event, t: float, data: Data) -> None:
        self._engines.joined(event["engine"], t)

    def _on_engine_lost(self, event: Event, t: float, data: Data) -> None:
        if data["failure"] == RUN_ENDED:
            return
        self._engines.left(event["engine"], t)
        self._gone.add(event["engine"])
        self._counts["tokens"] += data["lost_tokens"]

    def _on_host_joined(self, event: Event, t: float, data: Data) -> None:
        self._hosts.joined(event["host"], t)

    def _on_host_lost(self, event: Event, t: float, data: Data) -> None:
        self._hosts.left(event["host"], t)

    def _on_trainer_lost(self, event: Event, t: float, data: Data) -> None:
        self._happened["trainer"] += 1
        self._trainer.lost(t)

    def _on_published(self, event: Event, t: float, data: Data) -> None:
        self._trainer.back(t)

    def _on_trainer_restarted(self, event: Event, t: float, data: Data) -> None:
        self._trainer.restarted(data["seconds"])
        self._counts["steps"] += data["steps"]

    def _on_fault(self, event: Event, t: float, data: Data) -> None:
        if data["what"] in ("node", "weights", "rewards"):
            self._happened[data["what"]] += 1
        if data["what"] == "rewards":
            self._outages.begins(t, data["lasts_s"])
        if data["what"] == "trainer" or any(name.startswith("trainer") for name in data.get("workers", ())):
            self._trainer.failed(t)

    def _on_turn_routed(self, event: Event, t: float, data: Data) -> None:
        key, engine = (event["traj"], event["attempt"]), event["engine"]
        if self._gone and self._home.get(key, engine) in self._gone:
            self._counts["moved"] += 1
        self._home[key] = engine

    def _on_traj_finished(self, event: Event, t: float, data: Data) -> None:
        self._home.pop((event["traj"], event["attempt"]), None)
        if data.get("failure", "").startswith(GONE):
            self._counts["again"] += 1
            self._counts["tokens"] += data["sampled"]

    def _on_ledger(self, event: Event, t: float, data: Data) -> None:
        self._ledger = data

    def _on_run_finished(self, event: Event, t: float, data: Data) -> None:
        """Takes note of the time."""

    def result(self) -> FaultFigures | None:
        """None: nothing was lost, nor was it simulated that something may be."""
        for down in (self._engines, self._hosts):
            down.read(self._t)
        happened = {"engine": self._engines.lost, "env_host": self._hosts.lost, **self._happened}
        happened = {what: n for what, n in sorted(happened.items()) if n}
        if not happened and not self._asked:
            return None
        decided = self._ledger.get("trained", 0) + sum(self._ledger.get("dropped", {}).values())
        served_s = self._engines.up_s + self._engines.down_s
        return FaultFigures(
            happened=happened, unserved=self._engines.unserved,
            engines_down=self._engines.down_s / served_s if served_s else 0.0,
            engines_down_s=self._engines.down_s, hosts_down_s=self._hosts.down_s,
            trainer_down_s=self._trainer.down_s(self._t),
            repeated_steps=self._counts["steps"], rewards_down_s=self._outages.down_s(self._t), moved=self._counts["moved"],
            again=self._counts["again"], wasted_tokens=self._counts["tokens"],
            wasted=self._counts["tokens"] / decided if decided else 0.0,
        )  # fmt: skip
