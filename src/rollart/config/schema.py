"""The configuration of a run, as types. Importable without torch, Ray or any environment package.

Invariant: a value that is accepted here can be run; cross-field rules are checked when the configuration is read, and
the message gives the value and the nearest valid ones. Variants are chosen by a `kind` field, so a key of another variant
is unknown by type. Defaults live in these classes and nowhere else. The parts are in the other files of this folder
(`problems.py`, `environments.py`, `learning.py`, `engines.py`, `workers.py`); all are to be imported from here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollart.config.cluster import (
    AffinityConfig,
    AutoAffinity,
    ClusterConfig,
    DeviceConfig,
    LinkConfig,
    NoAffinity,
    PoolConfig,
    Preference,
    TableAffinity,
    cluster_problems,
)
from rollart.config.engines import EngineConfig, VllmEngine, vllm_problems
from rollart.config.environments import (
    EnvConfig,
    FrozenLakeEnv,
    GymnasiumEnv,
    MaxDigitEnv,
    PythonEnv,
    ReasoningGymEnv,
    TextArenaEnv,
    TextWorldEnv,
)
from rollart.config.faults import (
    EngineFaults,
    FaultsConfig,
    HostFaults,
    LostEngines,
    LostHosts,
    LostNode,
    LostRewards,
    LostTrainer,
    LostWeights,
    NodeFaults,
    RewardFaults,
    TrainerFaults,
    WeightFaults,
)
from rollart.config.learning import (
    CISPO,
    GSPO,
    KL1,
    KL2,
    KL3,
    Algorithm,
    ClipCorrection,
    Decoupled,
    DrGRPO,
    GeometricReject,
    GroupBaseline,
    LeaveOneOut,
    MaskedIS,
    NoCorrection,
    NoKL,
    NoReject,
    Optimizer,
    PPOClip,
    ReinforcePP,
    SamplingConfig,
    Schedule,
    TruncatedIS,
    algorithm_problems,
)
from rollart.config.node import Node, refuse
from rollart.config.problems import (
    CharsTokenizer,
    HFTokenizer,
    PretrainedModel,
    PythonScorer,
    ScratchModel,
    TaskConfig,
    task_problems,
)
from rollart.config.virtual import (
    EnvRewards,
    LocalRewards,
    ModelledEngine,
    RewardConfig,
    ServerlessRewards,
    ShapeModel,
    TrainPlan,
    VirtualWorld,
    WorkloadEnv,
)
from rollart.config.workers import (
    BaselineConfig,
    CheckpointConfig,
    Deadlines,
    Drop,
    EnvHostConfig,
    EvalConfig,
    Fail,
    FailurePolicy,
    InlineWorld,
    LocalWorld,
    Replace,
    Retry,
    TrainerConfig,
    WarmStart,
)

__all__ = [
    "CISPO",
    "GSPO",
    "KL1",
    "KL2",
    "KL3",
    "AffinityConfig",
    "Algorithm",
    "AutoAffinity",
    "BaselineConfig",
    "CharsTokenizer",
    "CheckpointConfig",
    "ClipCorrection",
    "ClusterConfig",
    "Deadlines",
    "Decoupled",
    "DeviceConfig",
    "DrGRPO",
    "Drop",
    "EngineConfig",
    "EngineFaults",
    "EnvConfig",
    "EnvHostConfig",
    "EnvRewards",
    "EvalConfig",
    "Fail",
    "FailurePolicy",
    "FaultsConfig",
    "FrozenLakeEnv",
    "GeometricReject",
    "GroupBaseline",
    "GymnasiumEnv",
    "HFTokenizer",
    "HostFaults",
    "InlineWorld",
    "LeaveOneOut",
    "LinkConfig",
    "LocalRewards",
    "LocalWorld",
    "LostEngines",
    "LostHosts",
    "LostNode",
    "LostRewards",
    "LostTrainer",
    "LostWeights",
    "MaskedIS",
    "MaxDigitEnv",
    "ModelledEngine",
    "NoAffinity",
    "NoCorrection",
    "NoKL",
    "NoReject",
    "Node",
    "NodeFaults",
    "Optimizer",
    "PPOClip",
    "PoolConfig",
    "Preference",
    "PretrainedModel",
    "PythonEnv",
    "PythonScorer",
    "ReasoningGymEnv",
    "ReinforcePP",
    "Replace",
    "Retry",
    "RewardConfig",
    "RewardFaults",
    "RunConfig",
    "SamplingConfig",
    "Schedule",
    "ScratchModel",
    "ServerlessRewards",
    "ShapeModel",
    "TableAffinity",
    "TaskConfig",
    "TextArenaEnv",
    "TextWorldEnv",
    "TrainPlan",
    "TrainerConfig",
    "TrainerFaults",
    "TruncatedIS",
    "VirtualWorld",
    "VllmEngine",
    "WarmStart",
    "WeightFaults",
    "WorkloadEnv",
]


class RunConfig(Node):
    """One run. `rollart train RECIPE key=value` sets any field by its dotted name."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder within output_dir."""
    seed: int = Field(default=0, ge=0)
    """Every draw of the run is named and derived from this."""
    output_dir: str = "runs"
    """The folder of all runs."""
    world: Annotated[LocalWorld | InlineWorld | VirtualWorld, Field(discriminator="kind")] = LocalWorld()
    model: Annotated[ScratchModel | PretrainedModel | ShapeModel, Field(discriminator="kind")] = ScratchModel()
    tokenizer: Annotated[CharsTokenizer | HFTokenizer, Field(discriminator="kind")] = CharsTokenizer()
    tasks: dict[str, TaskConfig]
    """Name to task; all are trained together."""
    schedule: Schedule = Schedule()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    sampling: SamplingConfig = SamplingConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: Annotated[EngineConfig | VllmEngine | ModelledEngine, Field(discriminator="kind")] = EngineConfig()
    envs: EnvHostConfig = EnvHostConfig()
    cluster: ClusterConfig = ClusterConfig()
    affinity: AffinityConfig = NoAffinity()
    rewards: RewardConfig = EnvRewards()
    deadlines: Deadlines = Deadlines()
    failure: FailurePolicy = FailurePolicy()
    checkpoint: CheckpointConfig = CheckpointConfig()
    baselines: BaselineConfig = BaselineConfig()
    warm_start: WarmStart = WarmStart()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _can_learn(self) -> RunConfig:
        schedule, failure = self.schedule, self.failure
        refuse(
            None if self.tasks else "tasks is empty; name at least one task",
            *(line for name, task in self.tasks.items() for line in task_problems(name, task)),
            *algorithm_problems(self.algorithm, schedule, self.sampling),
            f"failure.min_group_size={failure.min_group_size} is above schedule.group_size={schedule.group_size}; use at "
            f"most {schedule.group_size}"
            if failure.min_group_size > max(schedule.group_size, 2)
            else None,
            f"failure.min_group_size={failure.min_group_size}: a group baseline needs 2 members or more; use 2"
            if failure.min_group_size < 2
            else None,
            f"trainer.ranks={self.trainer.ranks} with world.kind=inline: one process has one training rank; use "
            "trainer.ranks=1, or world.kind=local"
            if isinstance(self.world, InlineWorld) and self.trainer.ranks > 1
            else None,
            *cluster_problems(
                self.cluster,
                self.affinity,
                self.tasks,
                colocated=schedule.colocated,
                max_staleness=schedule.max_staleness,
                eval_every=self.eval.every,
            ),
            *vllm_problems(self.engine, self.model, self.sampling),
            *self._too_small(),
        )
        return self

    def _too_small(self) -> list[str]:
        """Pools in which what may live at once has no room, a line each."""
        schedule, envs, problems = self.schedule, self.envs, list[str]()
        model, engine = self.model, self.engine
        if (
            isinstance(model, ScratchModel)
            and isinstance(engine, EngineConfig)
            and engine.kv_tokens < model.max_positions
        ):
            problems.append(
                f"engine.kv_tokens={engine.kv_tokens} is below model.max_positions={model.max_positions}, so one "
                f"long trajectory has no room in an engine; use engine.kv_tokens={model.max_positions} or more"
            )
        attempts = schedule.groups_window * (schedule.group_size + schedule.redundancy)
        wanted, sessions = attempts + self.eval.concurrency, envs.hosts * envs.sessions_per_host
        if sessions < wanted:
            problems.append(
                f"envs.hosts={envs.hosts} x envs.sessions_per_host={envs.sessions_per_host} is {sessions} sessions, but "
                f"{wanted} may be open at once ({attempts} attempts in the window of schedule.max_staleness="
                f"{schedule.max_staleness}, and eval.concurrency={self.eval.concurrency}); use envs.sessions_per_host="
                f"{-(-wanted // envs.hosts)} or more"
            )
        return problems
