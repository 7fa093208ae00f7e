"""What a run gives: step time, throughput, where time goes, use of each pool, staleness, waste. From its event log alone.

The same figures of a real run and of a simulated one, so that one can be laid beside the other. Counted from the end of the
first finished step to the end of the last: filling an empty pipeline is no part of what a schedule gives. A run of one step
has nothing else, so it is then counted whole. Invariant: a split adds up to 1, because its last part is what no event claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollart.observe.fault_tally import FaultFigures, FaultTally
from rollart.observe.log import Event, restated
from rollart.observe.members import Members
from rollart.observe.metrics import failure_type, request_of
from rollart.observe.step_tally import StepTally, add_to
from rollart.observe.tally import EngineMeter, Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds from the end of a step to the end of the next."""

    median: float
    mean: float
    p10: float
    p90: float

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median if self.median > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Engines alike in hardware and role."""

    engines: float
    """On average over the window."""
    utilisation: float
    """Share of engine time with a live turn, from its routing to its answer."""
    live: float
    """Live turns per engine, averaged over time."""
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The figures. Shares are fractions of 1; None: the log does not say."""

    steps: int
    """That are counted."""
    window_s: float
    step_s: StepTime
    trajectories: int
    trajectories_per_s: float
    trained_tokens_per_s: float
    """In the loss."""
    sampled_tokens_per_s: float
    tokens_per_s: float
    """Of trained trajectories, with what their environments wrote."""
    trajectory_s: float | None
    """Mean life of an attempt that ended done."""
    trajectory: Mapping[str, float]
    """Share of trajectories' time by `TRAJECTORY`."""
    trainer: Mapping[str, float]
    """Share of the trainer's time by `TRAINER`."""
    pools: Mapping[str, Pool]
    trains: str
    """The pool of the trainer; its utilisation is the trainer's share of training."""
    staleness_mean: float | None
    staleness_max: float | None
    staleness_bound: int | None
    bound_holds: bool
    """False where the schedule checks the bound at admission only, as AReaL does."""
    waste: Mapping[str, float]
    """Share of the tokens that were trained or dropped which were dropped, by reason."""
    failed: Mapping[str, float]
    """Failed attempts per trained trajectory, by boundary and kind."""
    fallback: float
    """Share of turns that ran in another pool than the one that affinity prefers."""
    rebuilt: float
    """Share of the computed prompt tokens that were computed before and lost to new weights or a preemption."""
    rewards: Mapping[str, float]
    """What the reward service of a simulated run came to: calls, timeouts, busy_s, queue_s, cold_s, cost."""
    costs: Mapping[str, float]
    """Of 1,000 trained trajectories, in H20 hours, by pool and for the reward service, which is known for the whole run only:
    its mean over the run stands for the window. Empty where nothing has a price."""
    basis: tuple[str, ...]
    """What the figures of a simulated run rest on; empty: they were measured."""
    notes: tuple[str, ...]
    """What to know of a simulated run before believing a figure."""
    faults: FaultFigures | None = None
    """What was lost and what it cost, in the whole run; None: nothing was, nor was it simulated that something may be."""

    @property
    def wasted(self) -> float:
        return sum(self.waste.values())

    @property
    def cost(self) -> float | None:
        """Of 1,000 trained trajectories, in H20 hours."""
        return sum(self.costs.values()) if self.costs else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the derived ones."""
        made = asdict(self)
        made["step_s"]["spread"] = self.step_s.spread
        made["wasted"], made["cost"] = self.wasted, self.cost
        made["figures"] = "simulated" if self.basis else "measured"
        return made


HOUR_S = 3600.0
TRAINER_POOL = "trainer"
"""Where no pool is named."""


class OutlookFold:
    """Feed events in order; `result` at any time. Memory is that of what is open, and a number per step."""

    def __init__(self) -> None:
        self._started: Mapping[str, Any] = {}
        self._first: StepTally | None = None
        self._whole = StepTally()
        self._now = StepTally()
        self._since_s: float | None = None
        """When the step that is counted now began."""
        self._meters: dict[str, EngineMeter] = {}
        self._pool: dict[str, str] = {}
        self._generating: dict[tuple[str, int], float] = {}
        self._members, self._versions = Members(), Versions()
        self._batches: dict[int, list[tuple[str, int]]] = {}
        self._released_s: dict[int, float] = {}
        self._books: list[Mapping[str, Any]] = []
        """The ledger after the first finished step and after the last."""
        self._book_due = False
        self._simulated: Mapping[str, Any] = {}
        self._rewards: Mapping[str, float] = {}
        self._per_s: dict[str, float] = {}
        """Cost of a second, by pool and of the reward service, whose own is an average over the whole run."""
        self._faults = FaultTally()
        self._missed: list[str] = []
        """Scripted faults that did not happen, as the log says it."""
        self._on = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}

    def __call__(self, event: Event) -> None:
        self._faults(event)
        handle = self._on.get(event["kind"])
        if handle is not None:
            handle(event, event["t"], event["data"])

    # --- the run

    def _on_run_started(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._started = data

    def _on_resumed(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._started = restated(self._started, data)
        for meter in self._meters.values():
            meter.all_lost(t)

    def _on_simulated(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._simulated = data
        self._per_s |= {pool: cost for pool, cost in data["costs"].items() if cost}

    def _on_rewards_used(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._rewards = data
        if data["cost"] and t > 0:
            self._per_s["rewards"] = data["cost"] / t

    def _on_advisory(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        if data["code"] == "fault_missed":
            self._missed.append(data["text"])

    def _on_ledger(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        if self._book_due:
            self._books[1:] = [data]
            self._book_due = False

    # --- engines

    def _on_engine_joined(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        pool = self._pool[event["engine"]] = data["pool"]
        self._meters.setdefault(pool, EngineMeter()).joined(event["engine"], t)

    def _on_engine_lost(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        if event["engine"] in self._pool:  # one that never served was never counted
            self._meter(event["engine"]).lost(event["engine"], t)

    def _on_turn_routed(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        engine = event["engine"]
        self._meter(engine).routed(engine, request_of(event), t)
        pool = self._pool[engine]
        add_to(self._now.turns, pool)
        self._now.counts["away"] += bool(data.get("fallback"))

    def _on_turn_done(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._meter(event["engine"]).done(event["engine"], request_of(event), t)
        counts = self._now.counts
        counts["prefilled_tokens"] += data["prefilled"]
        counts["rebuilt_tokens"] += data["rebuilt"]
        if event["traj"].startswith("train/"):
            counts["sampled_tokens"] += data["sampled"]
            key = event["traj"], event["attempt"]
            self._generating[key] = self._generating.get(key, 0.0) + data["seconds"]

    def _on_applied(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._now.spent["weights"] += data["exposed_s"] * data["live"]

    def _meter(self, engine: str) -> EngineMeter:
        pool = self._pool.setdefault(engine, "default")
        return self._meters.setdefault(pool, EngineMeter())

    # --- trajectories

    def _on_group_opened(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._members.opened(event["group"])
        if self._since_s is None:
            self._since_s = t
            for meter in self._meters.values():
                meter.reset(t)

    def _on_group_completed(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._members.completed(event["group"], data["members"])

    def _on_group_dropped(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._members.take(event["group"])

    def _on_failure_decided(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        if event["traj"].startswith("train/"):
            add_to(self._now.failed, failure_type(data["failure"]))

    def _on_traj_finished(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        generating_s = self._generating.pop((event["traj"], event["attempt"]), 0.0)
        if data["purpose"] != "train" or data["status"] != "done":
            return
        if data["reward"] is not None:
            self._members.finished(event)
        seconds, spent = data["seconds"], self._now.spent
        self._now.counts["ended"] += 1
        for phase, part_s in (
            ("generation", generating_s), ("reset", seconds["open"]), ("env_step", seconds["step"]),
            ("reward", seconds["score"]),
        ):  # fmt: skip
            spent[phase] += part_s
        claimed_s = generating_s + seconds["open"] + seconds["step"] + seconds["score"]
        spent["waiting"] += max(0.0, seconds["total"] - claimed_s)

    # --- training

    def _on_batch_released(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._now.trainer["waiting"] += data["waited_s"]
        self._released_s[event["step"]] = t
        batch = self._batches.setdefault(event["step"], [])
        batch += [(group, event["version"]) for group in data["groups"]]

    def _on_step_started(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        released_s = self._released_s.pop(event["step"], None)
        if released_s is not None:
            self._now.trainer["weights"] += t - released_s

    def _on_published(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        self._versions.published(event)
        self._now.trainer["weights"] += data["seconds"]

    def _on_step_finished(self, event: Event, t: float, data: Mapping[str, Any]) -> None:
        now = self._now
        now.trainer["training"] += data["seconds"]
        now.counts["trained_tokens"] += data["trained_tokens"]
        for group, version in self._batches.pop(event["step"], ()):
            for member in self._members.take(group):
                now.counts["trajectories"] += 1
                now.counts["context_tokens"] += member.context_tokens
                if member.oldest_version is not None:
                    now.staleness.add(self._versions.staleness(version, member.oldest_version))
        now.step_s.append(t - (self._since_s if self._since_s is not None else t))
        for pool, meter in self._meters.items():
            time = meter.read(t)
            now.seen_s[pool], now.idle_s[pool], now.request_s[pool] = time.seen_s, time.idle_s, time.request_s
            meter.reset(t)
        if self._first is None:
            self._first = now
        else:
            self._whole.add(now)
        self._now, self._since_s, self._book_due = StepTally(), t, True

    # --- the result

    def result(self) -> Outlook | None:
        """None before the first finished step."""
        if self._first is None:
            return None
        alone = not self._whole.step_s
        made = self._first if alone else self._whole
        window_s = sum(made.step_s)
        per_s = 1 / window_s if window_s > 0 else 0.0
        started, counts = self._started, made.counts
        trained, ended = int(counts["trajectories"]), counts["ended"]
        computed = counts["prefilled_tokens"] + counts["rebuilt_tokens"]
        life_s = sum(made.spent.values()) - made.spent["weights"]
        return Outlook(
            steps=len(made.step_s), window_s=window_s, step_s=_step_time(made.step_s), trajectories=trained,
            trajectories_per_s=trained * per_s, trained_tokens_per_s=counts["trained_tokens"] * per_s,
            sampled_tokens_per_s=counts["sampled_tokens"] * per_s, tokens_per_s=counts["context_tokens"] * per_s,
            trajectory_s=life_s / ended if ended else None, trajectory=_shares(_stopped_apart(made.spent)),
            trainer=_shares(_with_the_rest(made.trainer, window_s)),
            pools={pool: _pool(made, pool, window_s) for pool in sorted(made.seen_s)},
            trains=self._simulated.get("trains") or TRAINER_POOL, rewards=self._rewards,
            staleness_mean=made.staleness.mean, staleness_max=made.staleness.max,
            staleness_bound=started.get("max_staleness"), bound_holds=started.get("enforce") != "admission",
            waste=self._waste(alone), failed={what: n / max(1, trained) for what, n in sorted(made.failed.items())},
            fallback=counts["away"] / max(1, sum(made.turns.values())),
            rebuilt=counts["rebuilt_tokens"] / computed if computed else 0.0,
            costs={of: cost * window_s * 1000 / trained / HOUR_S for of, cost in self._per_s.items()} if trained else {},
            basis=tuple(self._simulated.get("basis", ())), notes=(*self._simulated.get("notes", ()), *self._missed),
            faults=self._faults.result(),
        )  # fmt: skip

    def _waste(self, alone: bool) -> dict[str, float]:
        """From the ledger after the first step to that after the last: what a run drops at its end is not a schedule's."""
        if not self._books:
            return {}
        last = self._books[-1]
        before: Mapping[str, Any] = {} if alone or len(self._books) < 2 else self._books[0]
        trained = last["trained"] - before.get("trained", 0)
        earlier = before.get("dropped", {})
        dropped = {reason: tokens - earlier.get(reason, 0) for reason, tokens in sorted(last["dropped"].items())}
        decided = trained + sum(dropped.values())
        return {reason: tokens / decided for reason, tokens in dropped.items() if tokens}


def _step_time(seconds: list[float]) -> StepTime:
    ordered = sorted(seconds)
    return StepTime(
        median=quantile(ordered, 0.5), mean=sum(ordered) / len(ordered), p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
    )  # fmt: skip


def quantile(ordered: list[float], share: float) -> float:
    """Of ascending numbers, at least one; linear between neighbours."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _stopped_apart(spent: Mapping[str, float]) -> dict[str, float]:
    """Turns under way when an engine changed its weights stood still inside what counts as generation."""
    stopped_s = min(spent["weights"], spent["generation"])
    return {**spent, "weights": stopped_s, "generation": spent["generation"] - stopped_s}


def _with_the_rest(trainer: Mapping[str, float], window_s: float) -> dict[str, float]:
    return {**trainer, "other": max(0.0, window_s - sum(trainer.values()))}


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: seconds / total if total > 0 else 0.0 for name, seconds in parts.items()}


def _pool(made: StepTally, pool: str, window_s: float) -> Pool:
    seen_s = made.seen_s[pool]
    busy = (1 - made.idle_s[pool] / seen_s, made.request_s[pool] / seen_s) if seen_s > 0 else (0.0, 0.0)
    return Pool(
        engines=seen_s / window_s if window_s > 0 else 0.0, utilisation=busy[0], live=busy[1],
        turns=int(made.turns.get(pool, 0)),
    )  # fmt: skip


def outlook(events: Iterable[Event]) -> Outlook | None:
    """The figures of a run from its surviving events, None when no step was finished."""
    fold = OutlookFold()
    for event in events:
        fold(event)
    return fold.result()
