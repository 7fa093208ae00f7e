"""From a configuration to a simulated run: the composition root of the virtual world.

Invariants: whatever cannot be simulated is refused before the first event and before the first file; the same configuration
gives the same log, byte for byte; a simulated run leaves the same folder as a real one, without weights and tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollart.config.faults import NO_FAULTS
from rollart.config.load import Resolved
from rollart.config.schema import RunConfig, ShapeModel, VirtualWorld
from rollart.control import run as control
from rollart.core.errors import ConfigError, DeadlockError, RunFailed, failure
from rollart.core.events import Recorder, Sink, header
from rollart.observe import measurements
from rollart.observe.log import EventWriter, read_events
from rollart.observe.metrics import MetricsWriter
from rollart.observe.outlook import Outlook, OutlookFold, outlook
from rollart.observe.run_folder import EVENTS, METRICS, checkout, held, keep_config, results
from rollart.perf.measured import Calibrated, load
from rollart.ports import World
from rollart.sim import loop, virtual
from rollart.sim.replay import build_replay, replay_config, trimmed
from rollart.sim.rewards import RewardService
from rollart.sim.tuning import tuned

NAME = "virtual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A world that can be run once, and what is to be said of it."""

    config: RunConfig
    world: Callable[[tuple[Sink, ...]], World]
    basis: tuple[str, ...]
    notes: tuple[str, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    """Pool -> cost of a second of all its devices, relative to an H20's."""
    devices: Mapping[str, int] = field(default_factory=dict)
    trains: str = ""
    """The pool that trains."""
    rewards: RewardService | None = None
    fails: bool = False
    """Something may fail by itself."""


def prepare(resolved: Resolved, calibration: Path | None = None) -> Prepared:
    """The virtual world of a configuration; a run of real parts needs the calibration of one. Raises ConfigError."""
    config = _unevaluated(resolved)
    own = config.world.calibration if isinstance(config.world, VirtualWorld) else ""
    path = calibration or (Path(own).expanduser() if own else None)
    if path is not None:
        return _measured(config, path)
    if not isinstance(config.world, VirtualWorld):
        raise ConfigError(
            f"{resolved.source} is a run on this machine (world.kind={config.world.kind}), which no table knows; give "
            "--calibration FILE as `rollart calibrate RUN` writes it, or a recipe with world.kind=virtual"
        )
    made = virtual.build(config)
    return Prepared(
        config=config, world=made.world, basis=made.basis, notes=made.notes, costs=made.costs, devices=made.devices,
        trains=next(name for name, pool in config.cluster.pools.items() if "train" in pool.roles), rewards=made.rewards,
        fails=made.faults is not None,
    )  # fmt: skip


def _unevaluated(resolved: Resolved) -> RunConfig:
    """Without the evaluation that a run has by default: drawn rewards are not worth one."""
    config = resolved.config
    asked = any(resolved.origins[f"eval.{key}"].layer != "default" for key in ("episodes", "every"))
    if asked and isinstance(config.world, VirtualWorld):
        return config
    return config.model_copy(update={"eval": config.eval.model_copy(update={"episodes": 0, "every": 0})})


def _measured(config: RunConfig, path: Path) -> Prepared:
    if isinstance(config.model, ShapeModel):
        raise ConfigError(
            f"{path} is of a run on a machine, and model.kind=shape is on none; leave the calibration out, or give a recipe "
            "that can be trained"
        )
    if config.cluster.faults != NO_FAULTS:
        raise ConfigError(
            f"cluster.faults with the calibration {path}: the laws of a machine say nothing of what fails there; leave "
            "cluster.faults out, or simulate a cluster (world.kind=virtual)"
        )
    config = trimmed(config)
    made = build_replay(config, load(path))
    return Prepared(config=config, world=made.world, basis=made.basis)


# --- running ---------------------------------------------------------------------------------------------------------


def predict(prepared: Prepared, sinks: tuple[Sink, ...] = ()) -> Outlook:
    """Run it to its end on virtual time. Raises RunFailed when it does not come to one."""
    fold = OutlookFold()
    world = prepared.world((*sinks, fold))
    try:
        loop.run(control.run(prepared.config, replace(world, beside=_told(prepared, world))))
    except DeadlockError as error:
        raise RunFailed("the simulated run stands still for ever", failure("cluster", "lost", str(error))) from error
    found = fold.result()
    assert found is not None  # a run that ends has trained `schedule.steps` batches, at least one
    return found


def _told(prepared: Prepared, world: World) -> Callable[[Recorder], AbstractAsyncContextManager[None]]:
    """Beside the run: the log says what its figures rest on, and at the end what the reward service came to."""

    @asynccontextmanager
    async def beside(record: Recorder) -> AsyncIterator[None]:
        record(
            "simulated", basis=list(prepared.basis), notes=list(prepared.notes), costs=dict(prepared.costs),
            devices=dict(prepared.devices), trains=prepared.trains, **({"fails": True} if prepared.fails else {}),
        )  # fmt: skip
        async with world.beside(record) if world.beside is not None else nullcontext():
            yield
        if prepared.rewards is not None:
            used = prepared.rewards.figures(asyncio.get_running_loop().time())
            record(
                "rewards_used", calls=used.calls, timeouts=used.timeouts, busy_s=round(used.busy_s, 6),
                queue_s=round(used.queue_s, 6), cold_s=round(used.cold_s, 6), cost=round(used.cost, 6),
            )  # fmt: skip

    return beside


def simulate(resolved: Resolved, folder: Path, calibration: Path | None = None) -> Outlook:
    """Simulate into a run's folder: configuration, log, metrics, summary, report and timeline. Raises RollartError."""
    prepared = prepare(resolved, calibration)
    with held(folder, instead=", or use name=NAME"), ExitStack() as stack:
        keep_config(folder, resolved)
        stack.enter_context(results(folder))
        metrics = MetricsWriter(folder / METRICS)
        stack.callback(metrics.close)
        head = header(run=resolved.config.name, incarnation=0, clock="virtual", world=NAME, git=checkout())
        events = EventWriter(folder / EVENTS, head)
        stack.callback(events.close)
        return predict(prepared, (events, metrics))


# --- recorded runs -----------------------------------------------------------------------------------------------------


def calibrate(run_dir: Path, out: Path) -> list[str]:
    """Write what a recorded run gives as laws; returns lines about them. Raises RollartError."""
    made = calibrated(run_dir)
    made.save(out)
    return list(build_replay(replay_config(run_dir), made).basis)


def calibrated(run_dir: Path) -> Calibrated:
    """The laws of a recorded run, for predicting other runs. Raises RollartError."""
    return tuned(replay_config(run_dir), measurements.calibrate(run_dir))


def replay(run_dir: Path, calibration: Path | None = None) -> tuple[Outlook, Outlook]:
    """A recorded run as predicted, from its own record or a calibration, and as measured. Raises RollartError."""
    _, events = read_events(run_dir / EVENTS)
    measured = outlook(events)
    if measured is None:
        raise ConfigError(f"{run_dir} has finished no step, so there is nothing to compare with; replay a run that has")
    laws = load(calibration) if calibration is not None else measurements.calibrate(run_dir)
    config = replay_config(run_dir)
    made = build_replay(config, laws, follow=True)
    return predict(Prepared(config=config, world=made.world, basis=made.basis)), measured
