"""Jobs on clusters that are not there: RollArt's 128 GPUs, a production job of 3,000, and a small one for first tries.

Invariant: a task is the same load in each of them, one file of `sim/workloads`; what differs is the machines, the model and
the size of a batch. Source of set-up and figures: RollArt (arXiv 2512.22560), sections on its experiments and on production.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollart.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Deadlines,
    EnvHostConfig,
    EvalConfig,
    LinkConfig,
    ModelledEngine,
    PoolConfig,
    Preference,
    RunConfig,
    Schedule,
    ServerlessRewards,
    ShapeModel,
    TableAffinity,
    TaskConfig,
    TrainerConfig,
    TrainPlan,
    VirtualWorld,
    WarmStart,
    WorkloadEnv,
)

CONTEXT = 32768
"""Tokens of the longest trajectory (RollArt: 32k)."""
INSTANCES = 4096
"""Problems of a task: more than any of these runs visits twice."""
RESPONSE = 16384
"""The most that a turn may sample: the cap of the longest workload."""
TURNS: Mapping[str, int] = {"swe_bench": 50, "webshop": 30, "frozen_lake": 100, "gem_math": 4, "gem_game": 1}
"""RollArt's five tasks and the most turns of each, which its workload's law reaches at most."""
PREFILL_HEAVY = ("swe_bench", "webshop", "frozen_lake")
"""Many turns of long observations; the other two sample long answers."""

SLOW = Deadlines(
    env_open_s=1800.0, env_step_s=1200.0, turn_s=7200.0, score_s=1200.0, trajectory_s=21600.0, batch_s=43200.0,
    weights_s=3600.0, pinned_s=3600.0, train_s=14400.0, start_s=1800.0,
)  # fmt: skip
"""Wide enough that no deadline ends what is only slow: the start of a sandbox may take 600 s three times over."""


def _tasks(*names: str) -> dict[str, TaskConfig]:
    return {
        name: TaskConfig(
            env=WorkloadEnv(kind="workload", name=name), size=INSTANCES, max_turns=TURNS[name], max_tokens=RESPONSE
        )
        for name in names
    }


def _affinity(*, prefill: str, decode: str, tasks: Mapping[str, TaskConfig]) -> TableAffinity:
    """RollArt's table: tasks whose time is prefill on compute, the others, and all that it does not know, on bandwidth."""
    of = {name: prefill if name in PREFILL_HEAVY else decode for name in tasks} | {"default": decode}
    return TableAffinity(kind="table", tasks={name: Preference(pools=(pool,)) for name, pool in of.items()})


def _job(
    name: str, tasks: Mapping[str, TaskConfig], *, model: str, schedule: Schedule, cluster: ClusterConfig, hosts: int,
    rewards: ServerlessRewards, engine: ModelledEngine, plan: TrainPlan,
) -> RunConfig:  # fmt: skip
    return RunConfig(
        name=name,
        world=VirtualWorld(kind="virtual"),
        model=ShapeModel(kind="shape", name=model, max_context=CONTEXT),
        tasks=dict(tasks),
        schedule=schedule,
        trainer=TrainerConfig(plan=plan),
        engine=engine,
        envs=EnvHostConfig(hosts=hosts, sessions_per_host=1024),
        cluster=cluster,
        affinity=_affinity(prefill="h800", decode="h20", tasks=tasks),
        rewards=rewards,
        deadlines=SLOW,
        checkpoint=CheckpointConfig(every=0),
        warm_start=WarmStart(steps=0),
        eval=EvalConfig(episodes=0),
    )


def rollart_128gpu() -> RunConfig:
    """RollArt's main experiment: Qwen3-32B learns five tasks on 96 H800 and 32 H20.

    32 H800 train, 64 H800 and 32 H20 sample with 4 tensor-parallel ranks; its other models, qwen3-8b and qwen3-14b, have 1 and
    2 (model.name, cluster.pools.h800.tp, ..). Under a colocated schedule all H800 sample and train in turn; the paper's
    baselines have 128 H800: cluster.pools.h20.device=H800. The batch of 512 is in trajectories, which the paper does not say.
    """
    pools = {
        "train": PoolConfig(device="H800", nodes=4, roles=("train",), tp=4),
        "h800": PoolConfig(device="H800", nodes=8, tp=4),
        "h20": PoolConfig(device="H20", nodes=4, tp=4),
    }
    return _job(
        "rollart_128gpu",
        _tasks(*TURNS),
        model="qwen3-32b",
        schedule=Schedule(steps=6, batch=512, group_size=8, max_staleness=2, sync_order="paper"),
        cluster=ClusterConfig(pools=pools),
        hosts=8,
        rewards=ServerlessRewards(kind="serverless"),
        engine=ModelledEngine(kind="modelled"),
        plan=TrainPlan(),
    )


def production_3000gpu() -> RunConfig:
    """A production job: a MoE of hundreds of billions of parameters on 3,072 GPUs, five sampling for one that trains.

    512 engines, batches of 8,192 trajectories of about 20 turns. The paper says the number of GPUs, the ratio, the kind of
    model, mathematics and software as tasks, and the bound 1; model, pools, precision and the number of publishers (one in
    every fourth node of the trainer) are inferred.
    """
    pools = {
        "train": PoolConfig(device="H800", nodes=64, roles=("train",)),
        "h800": PoolConfig(device="H800", nodes=128, tp=8),
        "h20": PoolConfig(device="H20", nodes=192, tp=4),
    }
    return _job(
        "production_3000gpu",
        _tasks("swe_bench", "gem_math"),
        model="qwen3-235b-a22b",
        schedule=Schedule(steps=2, batch=8192, group_size=16, max_staleness=2, sync_order="paper"),
        cluster=ClusterConfig(pools=pools, link=LinkConfig(push_gbyte_per_s=8.0)),
        hosts=64,
        rewards=ServerlessRewards(kind="serverless", max_concurrency=4096),
        engine=ModelledEngine(kind="modelled", dtype="fp8"),
        plan=TrainPlan(ep=8),
    )


def sim_small() -> RunConfig:
    """A job to try things on: Qwen3-8B and two tasks of opposite need on twelve GPUs; simulated within seconds."""
    pools = {
        "train": PoolConfig(device="H800", devices_per_node=4, roles=("train",)),
        "h800": PoolConfig(device="H800", devices_per_node=4),
        "h20": PoolConfig(device="H20", devices_per_node=4),
    }
    return _job(
        "sim_small",
        _tasks("frozen_lake", "gem_math"),
        model="qwen3-8b",
        schedule=Schedule(steps=4, batch=32, group_size=4, max_staleness=2, sync_order="paper"),
        cluster=ClusterConfig(pools=pools),
        hosts=1,
        rewards=ServerlessRewards(kind="serverless"),
        engine=ModelledEngine(kind="modelled"),
        plan=TrainPlan(),
    )
