"""Runs a scenario to its end, over as many incarnations as its faults make of it, and checks every promise.

Invariants: the control code is the one that real runs use, on virtual time; a killed driver leaves the disk as it was in
that instant; the same scenario gives the same log, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollart.config.schema import RunConfig
from rollart.control import run as control
from rollart.control.instances import Cursor
from rollart.core.errors import RollartError, RunFailed, describe
from rollart.core.events import Recorder
from rollart.core.snapshot import Resumed
from rollart.core.types import Manifest, TaskSpec, Trajectory
from rollart.observe.audit import audit
from rollart.observe.audit_figures import figures
from rollart.observe.audit_record import Record
from rollart.ports import Trainer, World
from rollart.sim.disk import SimCheckpoints, SimDisk
from rollart.sim.loop import VirtualLoop
from rollart.sim.loop import run as run_virtually
from rollart.sim.torture.faults import ENDS_INCARNATION, Fault, Faults
from rollart.sim.torture.models import Models
from rollart.sim.torture.points import standing, timed_out
from rollart.sim.torture.scenario import LEAST_FAULTS, Scenario
from rollart.sim.torture.states import States
from rollart.sim.world import world

MOST_INCARNATIONS = 12
"""More than the faults of any scenario can end."""
MOST_EVENTS = 40_000
"""Ten times what a tortured run writes; a run that writes more goes round in circles."""
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    scenario: Scenario
    log: tuple[Event, ...]
    """Of all incarnations, as it was written."""
    broken: tuple[str, ...]
    fired: tuple[tuple[str, tuple[str, ...]], ...]
    """Fault kind and the lifecycle states of what it hit, in the order in which they happened."""
    stood: frozenset[tuple[str, str]]
    """(killed | cancelled | timed out, await point of control at which a task stood then)."""
    ends: tuple[str, ...]
    """How each incarnation ended."""

    @property
    def log_bytes(self) -> bytes:
        return b"".join(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in self.log)


@dataclass(slots=True, kw_only=True)
class _Run:
    """What outlives the incarnations of one scenario."""

    scenario: Scenario
    config: RunConfig
    specs: tuple[TaskSpec, ...]
    faults: Faults
    around: Callable[[World], World]
    disk: SimDisk = field(default_factory=SimDisk)
    kept: list[tuple[int, Trajectory]] = field(default_factory=list)
    """With the number of the event that ended it."""
    broken: list[str] = field(default_factory=list)
    stood: set[tuple[str, str]] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    engines: int = 0
    hosts: int = 0
    learned: list[list[str]] = field(default_factory=list)


def run(scenario: Scenario, *, around: Callable[[World], World] = lambda world: world) -> Outcome:
    """Run a scenario; whatever it does, the outcome says it. `around` may put something between control and the world."""
    whole = _Run(
        scenario=scenario, config=config_of(scenario), specs=specs_of(scenario), faults=Faults(scenario.faults),
        around=around,
    )  # fmt: skip
    resumed: Resumed | None = None
    while len(whole.ends) < MOST_INCARNATIONS:
        _Incarnation(whole, resumed).live()
        if whole.ends[-1] in ("done", "broken"):
            break
        whole.disk.cut()
        resumed = whole.disk.resumed()
        stands = 0 if resumed.snapshot is None else resumed.snapshot.seq
        whole.kept = [(seq, trajectory) for seq, trajectory in whole.kept if seq <= stands]
    if whole.ends[-1] not in ("done", "broken"):
        whole.broken.append(f"ended: not done after {len(whole.ends)} incarnations: {', '.join(whole.ends)}")
    if whole.ends[-1] != "broken":
        record = _record(whole)
        whole.broken += audit(record) + figures(record)
    return Outcome(
        scenario=scenario, log=tuple(whole.disk.log), broken=tuple(whole.broken),
        fired=tuple((fault.kind, states) for fault, states in whole.faults.fired), stood=frozenset(whole.stood),
        ends=tuple(whole.ends),
    )  # fmt: skip


def meets_the_minimum(outcome: Outcome) -> list[str]:
    """What a seed's scenario lacked of the least that one must hold; nothing when it counts."""
    steps = len([1 for event in outcome.log if event["kind"] == "step_finished"])
    trajectories = {event["traj"] for event in outcome.log if event["kind"] == "traj_started"}
    wanted = outcome.scenario.config["schedule"]
    return [
        text
        for text, lacks in (
            (f"{len(outcome.fired)} faults fired", len(outcome.fired) < LEAST_FAULTS),
            (f"{len(outcome.scenario.tasks)} tasks", len(outcome.scenario.tasks) < 2),
            (f"{steps} steps", steps < wanted["steps"]),
            (f"{len(trajectories)} trajectories", len(trajectories) < wanted["steps"] * wanted["batch"]),
        )
        if lacks
    ]


# --- the parts of a scenario that control takes ----------------------------------------------------------------------------


def config_of(scenario: Scenario) -> RunConfig:
    return RunConfig.model_validate(
        {
            "seed": scenario.seed,
            "tasks": {task.name: {"env": {"kind": "max_digit"}, "ratio": task.ratio} for task in scenario.tasks},
            **scenario.config,
        }
    )


def specs_of(scenario: Scenario) -> tuple[TaskSpec, ...]:
    return tuple(
        TaskSpec(
            name=task.name, ratio=task.ratio, train=range(task.instances),
            held_out=range(task.instances, task.instances + task.held_out), max_turns=task.most_turns + 1,
            max_tokens=int(scenario.rates["tokens"]), scored=task.scored,
        )
        for task in scenario.tasks
    )  # fmt: skip


def _order(spec: TaskSpec, seed: int, epoch: int) -> tuple[int, ...]:
    cursor = Cursor(spec, seed, epoch=epoch)
    return tuple(cursor.next().index for _ in spec.train)


def _record(whole: _Run) -> Record:
    specs = {spec.name: spec for spec in whole.specs}
    return Record(
        log=whole.disk.log,
        order=lambda task, epoch: _order(specs[task], whole.config.seed, epoch),
        learned=whole.learned,
        kept=[trajectory for _, trajectory in whole.kept],
        min_members=whole.config.failure.min_group_size,
    )


def _named(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"


# --- one incarnation -------------------------------------------------------------------------------------------------------


class _Incarnation:
    def __init__(self, whole: _Run, resumed: Resumed | None) -> None:
        self._whole = whole
        self._resumed = resumed
        self._states = States()
        self._models = Models(
            whole.scenario, whole.faults, self._states, whole.disk, number=len(whole.ends),
            first_engine=whole.engines, first_host=whole.hosts,
        )  # fmt: skip
        self._write = whole.disk.sink()
        self._own = whole.disk.incarnation
        self._task: asyncio.Task[control.Result] | None = None
        self._stopped = ""
        self._noise: list[str] = []

    def live(self) -> None:
        """Run it to its end, whichever that is; what it leaves is in the whole."""
        whole, loop = self._whole, VirtualLoop()
        loop.set_exception_handler(lambda _, context: self._noise.append(str(context.get("message"))))
        try:
            run_virtually(self._main(), loop=loop)
        except RollartError as error:  # nobody could wake, or a task that was left behind did not end
            self._broke(f"{type(error).__name__}: {error}")
        whole.faults.frozen = False
        cluster = self._models.cluster
        whole.engines += len(cluster.engines)
        whole.hosts += len(cluster.hosts)
        for line in self._noise:
            self._broke(line)

    def _broke(self, line: str) -> None:
        self._whole.broken.append(f"loop: incarnation {len(self._whole.ends)}: {line}")
        self._whole.ends.append("broken")

    async def _main(self) -> None:
        whole, cluster = self._whole, self._models.cluster
        checkpoints = SimCheckpoints(
            whole.disk, save_s=whole.scenario.rates["save"], fault=self._models.save,
            torn=lambda: self._stop("checkpoint_torn"),
        )  # fmt: skip
        inside = world(
            whole.specs, cluster, sinks=(self._take,), checkpoints=checkpoints, resumed=self._resumed, keep=self._keep
        )
        inside = replace(inside, prepare=self._prepare, conclude=self._conclude)
        self._task = asyncio.create_task(control.run(whole.config, whole.around(inside)), name="run")
        await asyncio.wait([self._task])
        self._ended(self._task)
        left = [_named(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        sessions = sum(env.open_sessions for env in cluster.envs)
        for what, rest in (("tasks", left), ("leases", cluster.held), ("environments", [sessions] if sessions else [])):
            if rest:
                whole.broken.append(f"left: incarnation {len(whole.ends)} left {what} behind: {rest}")

    def _ended(self, task: asyncio.Task[control.Result]) -> None:
        """How the run's coroutine ended, and whether it was allowed to."""
        whole = self._whole
        if task.cancelled():
            error: BaseException | None = asyncio.CancelledError()
        else:
            error = task.exception()
        if self._stopped:
            whole.ends.append(self._stopped)
            # a run that had just failed by itself says so, also when it is stopped in that instant
            if error is not None and not isinstance(error, asyncio.CancelledError | RunFailed):
                whole.broken.append(f"cancelled: {self._stopped} came out as {type(error).__name__}: {error}")
        elif error is None:
            whole.ends.append("done")
            whole.learned = [[sample.traj for sample in part] for part in self._models.cluster.trainers[-1].batches]
        elif isinstance(error, RunFailed) and error.failure is not None:
            whole.ends.append(f"failed ({describe(error.failure)})")
            if not whole.faults.explains(error.failure.where):
                whole.broken.append(f"cause: no fault explains that the run failed: {error}")
        else:
            whole.ends.append("broken")
            whole.broken.append(f"raised: {type(error).__name__}: {error}")

    async def _prepare(self, trainer: Trainer, record: Recorder) -> None:
        """What a warm start is to control: time, and calls of a trainer that may be lost in them."""
        await asyncio.sleep(self._whole.scenario.rates["start"])
        await trainer.begin(0, total_weight=1.0)

    async def _conclude(self, last: Manifest) -> None:
        await asyncio.sleep(self._whole.scenario.rates["save"])

    # --- what the run says -------------------------------------------------------------------------------------------

    def _keep(self, trajectory: Trajectory) -> None:
        if self._whole.disk.incarnation == self._own:
            self._whole.kept.append((self._whole.disk.log[-1]["seq"], trajectory))

    def _take(self, event: Event) -> None:
        whole = self._whole
        if whole.disk.incarnation != self._own:
            return
        self._write(event)
        self._states.take(event)
        if event["kind"] == "wait_expired":
            whole.stood.update(("timed out", point) for point in timed_out())
        if len(whole.disk.log) == MOST_EVENTS:
            whole.broken.append(f"ended: {MOST_EVENTS} events and no end")
            self._stop("broken")
        for call in ("", event["kind"]):
            fault = whole.faults.due("event", call)
            if fault is not None:
                # a fault comes between two steps of the loop, never inside one of control's
                after_s = fault.seconds if fault.kind in ENDS_INCARNATION else 0.0
                asyncio.get_running_loop().call_later(after_s, self._happen, fault)

    # --- what happens to it ------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        whole = self._whole
        if whole.disk.incarnation != self._own or self._stopped or self._task is None or self._task.done():
            whole.faults.later(fault)
        elif fault.kind in ENDS_INCARNATION:
            whole.faults.hit(fault, self._models.everything())
            self._stop(fault.kind)
        elif not self._models.lose(fault):
            whole.faults.later(fault)

    def _stop(self, kind: str) -> None:
        """End the incarnation here and now. Killed: nothing of what it does from now on is ever seen."""
        whole = self._whole
        if self._stopped or self._task is None:
            return
        self._stopped = kind
        how = "cancelled" if kind == "run_cancelled" else "killed"
        whole.stood.update((how, point) for point in standing(asyncio.all_tasks()))
        if how == "killed":
            whole.disk.cut()
            whole.faults.frozen = True
        self._task.cancel()
