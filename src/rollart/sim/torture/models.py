"""The simulated world of a scenario: its cost models, with a question to `Faults` at each call.

Invariant: every number is drawn from what it is for (trajectory, attempt, call, turn), so that a fault changes nothing but
what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollart.core.errors import failure
from rollart.core.seeds import unit
from rollart.core.types import Failure, Role, Trajectory, TrajId, TurnRequest
from rollart.sim import envs
from rollart.sim.disk import SaveFault, SimDisk
from rollart.sim.engine import Command, EngineModel, Mishap
from rollart.sim.envs import EnvModel, ScorerModel
from rollart.sim.torture.faults import Fault, Faults
from rollart.sim.torture.scenario import Scenario
from rollart.sim.torture.states import States
from rollart.sim.trainer import TrainerCall, TrainerMishap, TrainerModel
from rollart.sim.world import SimCluster, StartFault

_GENERATE: dict[str, Mishap] = {
    "answer_lost": "dead",
    "answer_late": "late",
    "answer_twice": "twice",
    "answer_deaf": "deaf",
    "answer_partial": "partial",
    "engine_slow": "slow",
}


class Models:
    """One incarnation's cluster, asking `faults` what goes wrong and telling it what was hit."""

    def __init__(
        self, scenario: Scenario, faults: Faults, states: States, disk: SimDisk, *, number: int,
        first_engine: int, first_host: int,
    ) -> None:  # fmt: skip
        self._scenario = scenario
        self._number = number
        """Of the incarnation: what was too slow once need not be so for ever."""
        self._rates = scenario.rates
        self._faults = faults
        self._states = states
        self._plans = {task.name: task for task in scenario.tasks}
        self._slow_s = 0.0
        self._scoring: dict[str, Fault | None] = {}
        rates = self._rates
        self.cluster = SimCluster(
            engine=EngineModel(
                token_s=rates["token"], prefill_token_s=rates["prefill"], prefetch_s=rates["prefetch"],
                apply_s=rates["apply"], length=self._length, fault=self._engine, flipped=self._flipped,
                slowness=self._slowness, rebuilds=scenario.rebuilds,
            ),
            env=EnvModel(latency_s=self._latency_s, fault=self._env, turns=self._turns, reward=self._reward),
            scorer=ScorerModel(latency_s=self._score_s, score=self._score, dead=self._score_dead),
            trainer=TrainerModel(
                begin_s=rates["begin"], accumulate_s=rates["accumulate"], finish_s=rates["finish"],
                publish_s=rates["publish"], save_s=rates["save"], load_s=rates["load"], fault=self._trainer,
                bytes_die=scenario.bytes_die,
            ),
            start_s=lambda role, nth: rates["start"], start_fault=self._start, disk=disk, first_engine=first_engine,
            first_host=first_host,
        )  # fmt: skip

    # --- what stands where -------------------------------------------------------------------------------------------

    @property
    def trainer_state(self) -> str:
        trainers = self.cluster.trainers
        return f"trainer {trainers[-1].phase}" if trainers and trainers[-1].lost is None else "trainer none"

    def everything(self) -> Iterator[str]:
        yield from self._states.all_attempts()
        yield from self._states.all_groups()
        yield self.trainer_state

    # --- environments ------------------------------------------------------------------------------------------------

    def _env(self, traj: TrajId, attempt: int, call: envs.Call, turn: int) -> envs.Fault | None:
        if call == "close" and self._states.attempts.get((traj, attempt)) == "generating":
            self._states.moved(traj, attempt, "scoring")
        fault = self._faults.due("env", call)
        if fault is None:
            return None
        self._faults.hit(fault, self._states.of_attempt(traj, attempt))
        match fault.kind:
            case "env_hangs":
                return "hang"
            case "env_dead":
                return "dead"
            case "env_slow":
                self._slow_s = fault.seconds
                return None
        return failure("env", "raised", f"{call} of {traj}", retryable=fault.kind != "env_refuses")

    def _latency_s(self, traj: TrajId, attempt: int, call: envs.Call, turn: int) -> float:
        slow_s, self._slow_s = self._slow_s, 0.0
        if call == "close":
            return self._rates["close"] + slow_s
        mean_s = self._rates["env"]
        return slow_s - mean_s * math.log(unit(self._scenario.seed, self._number, traj, attempt, call, turn))

    def _turns(self, traj: TrajId, attempt: int) -> int:
        plan = self._plans[traj.split("/")[1]]
        span = plan.most_turns - plan.least_turns + 1
        return plan.least_turns + int(unit(self._scenario.seed, "turns", traj, attempt) * span)

    def _reward(self, traj: TrajId, attempt: int) -> float:
        return float(unit(self._scenario.seed, "reward", traj, attempt) < 0.5)

    # --- engines -----------------------------------------------------------------------------------------------------

    def _length(self, request: TurnRequest) -> int:
        return 1 + int(unit(self._scenario.seed, "length", request.id.traj, request.id.turn) * request.max_tokens)

    def _slowness(self, engine: str) -> float:
        return self._rates["slowest_engine"] if engine.endswith(("1", "4", "7")) else 1.0

    def _engine(self, engine: str, command: Command, nth: int) -> Failure | Mishap | None:
        if command == "generate":
            return self._generate(engine)
        fault = self._faults.due("engine", command)
        if fault is None:
            return None
        self._faults.hit(fault, [*self._states.on_engines({engine}), self.trainer_state])
        if fault.kind == "apply_flipped":
            self._flip = engine
            return None
        return "dead" if fault.kind.endswith("hangs") else failure("engine", "raised", f"{command} on {engine}")

    _flip = ""

    def _flipped(self, engine: str, nth: int) -> bool:
        flipped = self._flip == engine
        self._flip = ""
        return flipped

    def _generate(self, engine: str) -> Failure | Mishap | None:
        fault = self._faults.due("engine", "generate")
        if fault is None:
            return None
        # the newest route is the one whose request asks now
        self._faults.hit(fault, self._states.newest_route())
        mishap = _GENERATE.get(fault.kind)
        return mishap if mishap is not None else failure("engine", "raised", f"generate on {engine}")

    # --- scorers -----------------------------------------------------------------------------------------------------

    def _score_s(self, trajectory: Trajectory) -> float:
        self._states.moved(trajectory.id, trajectory.attempt, "scoring")
        fault = self._faults.due("scorer", "score")
        self._scoring[trajectory.id] = fault
        if fault is not None:
            self._faults.hit(fault, self._states.of_attempt(trajectory.id, trajectory.attempt))
        return self._rates["score"] + (fault.seconds if fault is not None else 0.0)

    def _score_dead(self, trajectory: Trajectory) -> bool:
        fault = self._scoring.get(trajectory.id)
        return fault is not None and fault.kind == "scorer_dead"

    def _score(self, trajectory: Trajectory) -> float | Failure:
        fault = self._scoring.pop(trajectory.id, None)
        if fault is not None and fault.kind == "scorer_raises":
            return failure("scorer", "raised", f"HTTP 500 for {trajectory.id}")
        if fault is not None and fault.kind == "scorer_nan":
            return math.nan
        return self._reward(trajectory.id, trajectory.attempt)

    # --- the trainer, starts, checkpoints ------------------------------------------------------------------------------

    def _trainer(self, trainer: str, call: TrainerCall, nth: int) -> TrainerMishap | None:
        fault = self._faults.due("trainer", call)
        if fault is None:
            return None
        self._faults.hit(fault, [f"trainer {call}", *self._states.all_groups()])
        return "hang" if fault.kind == "trainer_hangs" else "lost"

    def _start(self, role: Role, nth: int) -> StartFault | None:
        fault = self._faults.due("start", role)
        if fault is None:
            return None
        self._faults.hit(fault, self.everything())
        if fault.kind == "start_hangs":
            return "hang"
        return failure("cluster", "start_failed", f"role {role}: no such device")

    def save(self, nth: int) -> SaveFault | None:
        fault = self._faults.due("save")
        if fault is None:
            return None
        self._faults.hit(fault, [*self._states.all_attempts(), *self._states.all_groups()])
        return "torn" if fault.kind == "checkpoint_torn" else failure("store", "full", "no space left on device")

    # --- losses ------------------------------------------------------------------------------------------------------

    def lose(self, fault: Fault) -> bool:
        """Carry out a loss. False: there is nothing to lose just now."""
        cluster = self.cluster
        if fault.kind == "trainer_lost":
            return self._lose_trainer(fault)
        if fault.kind in ("engine_lost", "engines_lost"):
            living = [index for index, engine in enumerate(cluster.engines) if engine.lost is None]
            lost = living if fault.kind == "engines_lost" else living[fault.nth % max(1, len(living)) :][:1]
            names = {cluster.engines[index].info.id for index in lost}
            if lost:
                self._faults.hit(fault, self._states.on_engines(names))
            for index in lost:
                cluster.lose_engine(index, told_after_s=fault.seconds)
            return bool(lost)
        hosts = list(cluster.envs[0].hosts) if cluster.envs else []
        gone = hosts if fault.kind == "hosts_lost" else hosts[fault.nth % max(1, len(hosts)) :][:1]
        if gone:
            self._faults.hit(fault, self._states.on_hosts(set(gone)))
        for host in gone:
            cluster.lose_host(host, told_after_s=fault.seconds)
        return bool(gone)

    def _lose_trainer(self, fault: Fault) -> bool:
        if self.trainer_state == "trainer none":
            return False
        self._faults.hit(fault, [self.trainer_state, *self._states.all_groups()])
        self.cluster.lose_trainer(told_after_s=fault.seconds)
        return True
