"""A run of this machine on virtual time: the same control code, with laws measured of a real run in place of its workers.

    config, laws = replay_config(run), calibrate(run)
    replay = build_replay(config, laws)
    sim.loop.run(control.run.run(config, replay.world(sinks)))

Owns how control, engines, trainer and environment hosts share the cores (`sim.host`), and what trajectories are like: drawn
from those that were played, by address, so that a schedule changes when something happens and not what. Invariant: nothing
is measured here; what a replay rests on is `basis`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollart.config.derive import changed
from rollart.config.load import load_file
from rollart.config.schema import EngineConfig, RunConfig
from rollart.control.weights import VersionBook
from rollart.core.errors import ConfigError
from rollart.core.events import Sink
from rollart.core.resources import Change, Degrees, EngineInfo, Lease
from rollart.core.seeds import unit
from rollart.core.types import Failure, Role, TaskSpec, Trajectory, TrajId, TurnRequest
from rollart.perf.measured import WOKEN_CALLS, Calibrated, Played
from rollart.ports import Port, World
from rollart.sched.precedence import ENGINE_WEIGHT
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.envs import Call, EnvModel, ScorerModel, SimEnv, SimScorer
from rollart.sim.host import FIRST, Host, Process
from rollart.sim.laws import Law
from rollart.sim.replay_ports import HALF, HostSeat, ReplayEngine, ReplayEnv, ReplayTrainer
from rollart.sim.stepping import Stepping
from rollart.sim.threads import Threads
from rollart.sim.trainer import SimTrainer, TrainerModel
from rollart.sim.wires import SimWire, WireCosts
from rollart.sim.workload import of_this_turn

NEAR = 0.1
"""Of a run: how far from a trajectory's place in it those may be that a replay in the order of the record draws from."""
SWITCH_S = 5e-3
"""After which a thread that computes gives the interpreter to another one (`sys.getswitchinterval`)."""
LEAST_CORES = 0.25
"""However much strangers use, a run gets this."""


def replay_config(run_dir: Path) -> RunConfig:
    """The configuration of a recorded run as a replay takes it: its steps, without what goes on before, beside and after them
    (baselines, warm start, evaluation, checkpoints). Raises ConfigError for a run that cannot be replayed."""
    config = load_file(run_dir / "config.yaml").config
    return trimmed(config)


def trimmed(config: RunConfig) -> RunConfig:
    """The same run with its steps alone."""
    return changed(
        config,
        eval=changed(config.eval, every=0, episodes=0),
        checkpoint=changed(config.checkpoint, every=0),
        warm_start=changed(config.warm_start, steps=0),
    )


def build_replay(
    config: RunConfig, calibrated: Calibrated, *, latency_s: Mapping[str, Law] | None = None, follow: bool = False
) -> Replay:
    """A world that behaves as `calibrated` says, for `control.run.run(config, world)`.

    `latency_s`: task -> what a step of its environment waits, in place of what was measured. `follow`: trajectories come in
    the order of the record, as lengths change while a policy learns. Raises ConfigError before the first event where the
    laws do not fit the configuration.
    """
    if not isinstance(config.engine, EngineConfig):
        raise ConfigError(
            f"engine.kind={config.engine.kind}: measured laws are of engines of kind native; use engine.kind=native"
        )
    lacking = sorted(config.tasks.keys() - calibrated.tasks.keys())
    if lacking:
        known = ", ".join(sorted(calibrated.tasks))
        raise ConfigError(f"tasks.{lacking[0]} was not measured (measured: {known}); calibrate on a run that has it")
    unknown = sorted((latency_s or {}).keys() - config.tasks.keys())
    if unknown:
        raise ConfigError(
            f"latency of {unknown[0]!r}, which is no task of the run; use one of {', '.join(config.tasks)}"
        )
    return Replay(config=config, laws=calibrated, draws=Draws(config, calibrated, latency_s or {}, follow=follow))


class Draws:
    """What trajectories do: each is one that was played, drawn by its address."""

    def __init__(
        self, config: RunConfig, calibrated: Calibrated, latency_s: Mapping[str, Law], *, follow: bool
    ) -> None:
        self._seed = config.seed
        self._tasks = calibrated.tasks
        self._latency_s = latency_s
        self._follow = follow
        total = config.schedule.steps * config.schedule.batch
        shares = {name: task.ratio for name, task in config.tasks.items()}
        self._expected = {name: max(1.0, total * share / sum(shares.values())) for name, share in shares.items()}
        self._begun: Counter[str] = Counter()
        self._played: dict[tuple[TrajId, int], Played] = {}

    def played(self, traj: TrajId, attempt: int) -> Played:
        found = self._played.get((traj, attempt))
        if found is None:
            found = self._played[traj, attempt] = self._draw(traj, attempt)
        return found

    def _draw(self, traj: TrajId, attempt: int) -> Played:
        task = task_of(traj)
        ones = self._tasks[task].played
        place = unit(self._seed, "played", traj, attempt)
        if self._follow:
            at = min(1.0, self._begun[task] / self._expected[task])
            self._begun[task] += 1
            place = min(max(at + NEAR * (place - 0.5), 0.0), 1.0)
        return ones[min(len(ones) - 1, int(place * len(ones)))]

    def forget(self, traj: TrajId, attempt: int) -> None:
        self._played.pop((traj, attempt), None)

    # --- as models ---------------------------------------------------------------------------------------------------

    def env(self) -> EnvModel:
        return EnvModel(
            latency_s=self._latency, turns=lambda traj, attempt: len(self.played(traj, attempt).sampled),
            reward=lambda traj, attempt: self.played(traj, attempt).reward, tokens=self._observed,
        )  # fmt: skip

    def length(self, request: TurnRequest) -> int:
        sampled = self.played(request.id.traj, request.id.attempt).sampled
        whole = sampled[min(request.id.turn, len(sampled) - 1)]
        return max(1, whole - of_this_turn(request))

    def last(self, traj: TrajId, attempt: int) -> int:
        """Tokens of the observation after the last turn."""
        return self.played(traj, attempt).observed[-1]

    def _observed(self, traj: TrajId, attempt: int, turn: int) -> int:
        played = self.played(traj, attempt)
        return played.prompt if turn == 0 else played.observed[min(turn, len(played.observed)) - 1]

    def _latency(self, traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        if call != "step":
            return 0.0
        task = task_of(traj)
        place = unit(self._seed, "latency", traj, attempt, turn)
        law = self._latency_s.get(task)
        if law is not None:
            return law.at(place)
        quantiles = self._tasks[task].step_latency_s
        return quantiles[int(place * len(quantiles))] if quantiles else 0.0


def task_of(traj: TrajId) -> str:
    return traj.split("/")[1]


@dataclass(kw_only=True)
class Replay:
    """A world of one machine; each `world` is a machine of its own that has done nothing yet."""

    config: RunConfig
    laws: Calibrated
    draws: Draws

    @property
    def basis(self) -> tuple[str, ...]:
        """What the figures rest on, a line each."""
        laws, origin = self.laws, self.laws.origin
        return (
            f"calibration: {origin.kind} of run {origin.run} ({origin.steps} steps, {origin.git}), engine {origin.engine}, "
            + ", ".join(f"{name} {number}" for name, number in origin.versions.items()),
            f"machine: {origin.cores} cores ({origin.cpu}), shared by all processes; strangers took {origin.others:.2f} cores"
            + (f"; at {laws.together:.3g} of their speed while all are busy" if laws.together != 1.0 else ""),
            f"engine step: {1e3 * laws.engine.step_s:.3g} ms + {1e6 * laws.engine.row_s:.3g} us a row + "
            f"{1e6 * laws.engine.token_s:.3g} us a token; {laws.engine.fit.error:.1%} median error over "
            f"{laws.engine.fit.windows} windows",
            f"training step: {1e3 * laws.trainer.step_s:.3g} ms + {1e3 * laws.trainer.pass_s:.3g} ms a pass + "
            f"{1e6 * laws.trainer.token_s:.3g} us a token; {laws.trainer.fit.error:.1%} over "
            f"{laws.trainer.fit.windows} steps",
            f"environments: {1e6 * laws.host.call_s:.3g} us a call, and {WOKEN_CALLS:g} more such where it has waited; "
            f"{laws.host.fit.error:.1%} over {laws.host.fit.windows} windows",
            "trajectories: "
            + ", ".join(f"{name} from {len(task.played)} that were played" for name, task in laws.tasks.items()),
        )  # fmt: skip

    def world(
        self, sinks: tuple[Sink, ...] = (), *, keep: Callable[[Trajectory], None] = lambda trajectory: None
    ) -> World:
        """A world for one run."""

        def kept(trajectory: Trajectory) -> None:
            self.draws.forget(trajectory.id, trajectory.attempt)
            keep(trajectory)

        return World(
            name="virtual", cluster=ReplayCluster(self.config, self.laws, self.draws), store=VersionBook(),
            tasks=tuple(_specs(self.config)), sinks=sinks, keep=kept,
        )  # fmt: skip


def _specs(config: RunConfig) -> list[TaskSpec]:
    """Tasks as control knows them; which instances are held back does not matter to time."""
    specs = []
    for name, task in config.tasks.items():
        held = round(task.size * task.held_out)
        specs.append(
            TaskSpec(
                name=name, ratio=task.ratio, train=range(task.size - held), held_out=range(task.size - held, task.size),
                success_at=task.success_at, max_turns=task.max_turns, max_tokens=task.max_tokens, max_context=1 << 30,
                scored=task.scorer is not None,
            )
        )  # fmt: skip
    return specs


@dataclass(kw_only=True, slots=True)
class _Machine:
    """The processes of one run and the cores that they share."""

    host: Host
    control: Process
    workers: list[Process] = field(default_factory=list)

    def worker(self, name: str, *, weight: float = 1.0) -> Process:
        self.workers.append(Process(self.host, name, weight=weight))
        return self.workers[-1]


class ReplayCluster:
    """Implements `ports.Cluster`: leases without end on one machine."""

    def __init__(self, config: RunConfig, laws: Calibrated, draws: Draws) -> None:
        self._config, self._laws, self._draws = config, laws, draws
        cores = max(LEAST_CORES, laws.origin.cores - laws.origin.others - laws.ray - laws.control.idle)
        host = Host(cores, together=laws.together)
        self.machine = _Machine(host=host, control=Process(host, "control", weight=FIRST))
        self.engines: list[ReplayEngine] = []
        self.paces: dict[str, Stepping] = {}
        self._env = ReplayEnv(SimEnv(draws.env(), hosts=0), draws.last)
        self._leases = 0
        self._changes: asyncio.Queue[Change] = asyncio.Queue()

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        self._leases += 1
        return Lease(id=f"{role}-{self._leases}", role=role, pool=pool, devices=("local",), degrees=degrees)

    async def release(self, lease: str) -> None:
        """Nothing runs on."""

    async def start(self, lease: Lease) -> Port | Failure:
        if lease.role == "train":
            return self._trainer()
        if lease.role == "env":
            return self._host(lease)
        return SimScorer(ScorerModel()) if lease.role == "score" else self._engine(lease)

    def counts(self) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[float, ...]]]:
        """Traffic by role and work by engine, as the cluster of this machine counts them."""
        engines = [one.wire.traffic for one in self.engines]
        hosts = [seat.wire.traffic for seat in self._env.seats.values()]
        traffic = {
            role: (sum(sent for sent, _ in pairs), sum(answers for _, answers in pairs))
            for role, pairs in (("engine", engines), ("env", hosts))
        }
        work: dict[str, tuple[float, ...]] = {
            name: (p.steps, p.rows, p.read, p.attended, p.cpu_s) for name, p in self.paces.items()
        }
        return traffic, work

    def _trainer(self) -> ReplayTrainer:
        ranks = [self.machine.worker(f"trainer-{rank}") for rank in range(self._config.trainer.ranks)]
        micro_tokens = self._config.trainer.micro_batch_tokens
        return ReplayTrainer(SimTrainer(TrainerModel()), ranks, self.machine.control, self._laws, micro_tokens)

    def _host(self, lease: Lease) -> ReplayEnv:
        name = f"host-{len(self._env.seats)}"
        law, control = self._laws.host, self._laws.control
        process = self.machine.worker(name)
        self._env.seats[name] = HostSeat(
            process, self._wire(process, law.batch_s, law.answer_s, 0.0, within_s=SWITCH_S),
            Threads(self._config.envs.sessions_per_host), law.call_s, law.woken_s,
            turn_s=HALF * control.turn_s, open_s=HALF * control.trajectory_s,
        )  # fmt: skip
        self._env.inner.add(name)
        self._changes.put_nowait(Change(kind="joined", subject=name, role="env", lease=lease.id))
        return self._env

    def _engine(self, lease: Lease) -> ReplayEngine:
        own, law = self._config.engine, self._laws.engine
        assert isinstance(own, EngineConfig)  # `build_replay` has refused any other
        name = f"engine-{len(self.engines)}"
        process = self.machine.worker(name, weight=ENGINE_WEIGHT)
        pace = self.paces[name] = Stepping(process, law, own.max_live, own.prefill_tokens)
        model = EngineModel(
            length=self._draws.length, shares=own.share_prefixes,
            pace=lambda info, prefixes: pace,
        )  # fmt: skip
        info = EngineInfo(
            id=name, lease=lease.id, pool=lease.pool, role=lease.role, kv_tokens=own.kv_tokens, fingerprint="bitwise",
            version=-1,
        )  # fmt: skip
        wire = self._wire(process, law.batch_s, law.answer_s, law.turn_s)
        self.engines.append(ReplayEngine(SimEngine(info, model), process, wire, self._laws))
        return self.engines[-1]

    def _wire(
        self, process: Process, batch_s: float, answer_s: float, item_s: float, *, within_s: float = math.inf
    ) -> SimWire:
        control = self._laws.control
        costs = WireCosts(
            send_s=control.batch_s, take_s=control.answer_s, batch_s=batch_s, answer_s=answer_s, item_s=item_s,
            way_s=self._laws.wire_s, within_s=within_s,
        )  # fmt: skip
        return SimWire(self.machine.control, process, costs)

    async def changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self._changes.get()
