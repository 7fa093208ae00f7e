"""How the parts of one run are put together: the only place where they know of one another."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rollart.config.placement import Placement, colocated_pools, placements
from rollart.config.schema import Retry, RunConfig
from rollart.control.barrier import Barrier
from rollart.control.buffer import Buffer
from rollart.control.checkpoint import Checkpointing, Kept
from rollart.control.colocation import Colocation
from rollart.control.elastic import Elastic, Seat, Worker
from rollart.control.evaluate import Evaluator
from rollart.control.fleet import Fleet, Spawn
from rollart.control.groups import GroupRules, Groups
from rollart.control.preferences import affinity_of
from rollart.control.recovery import Recovery
from rollart.control.rewards import Rewards
from rollart.control.rollout import CallLimits, Rollout
from rollart.control.train import Training, TrainRules
from rollart.control.waits import Waits
from rollart.control.weights import WeightRules, Weights
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.resources import EngineInfo
from rollart.core.types import Failure, Role, Sampling, Version
from rollart.ports import Engine, Env, Scorer, World
from rollart.sched.failure import Policy
from rollart.sched.mixing import Mix
from rollart.sched.staleness import Window
from rollart.sched.variance import Filter

SERVING_ROLES: tuple[Role, ...] = ("mixed", "decode")
"""Roles whose worker is an engine; the prefill half of a split engine stands behind its decode half's port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    trainer: Seat
    env: Env
    engines: tuple[Engine, ...]
    scorer: Scorer | None


async def start(config: RunConfig, world: World, elastic: Elastic) -> Ports:
    """Start every role at once; what cannot be had is an error before anything is sampled."""
    trainer, *engines = placements(config)
    hosts = [Placement(role="env")] * config.envs.hosts
    score = [Placement(role="score")] if any(spec.scored for spec in world.tasks) else []
    places = [trainer, *hosts, *engines, *score]
    ports: dict[Role, list[Worker]] = {place.role: [] for place in places}
    for place, worker in zip(places, await elastic.start_all(places), strict=True):
        ports[place.role].append(worker)
    return Ports(
        trainer=Seat(*ports["train"][0]),
        env=ports["env"][0].port,  # one port for all hosts
        engines=tuple(worker.port for role in SERVING_ROLES for worker in ports.get(role, ())),
        scorer=ports["score"][0].port if score else None,
    )


def shares(world: World) -> dict[str, float]:
    """Task -> its share of what is trained."""
    total = sum(spec.ratio for spec in world.tasks)
    return {spec.name: spec.ratio / total for spec in world.tasks}


class Wired:
    """All components of one run."""

    def __init__(
        self, config: RunConfig, world: World, record: Recorder, waits: Waits, elastic: Elastic, ports: Ports, *,
        spawn: Spawn, spawn_attempt: Spawn, after_step: Callable[[int, Version], Awaitable[Version]],
        engine_lost: Callable[[EngineInfo, Failure], None],
    ) -> None:  # fmt: skip
        schedule, limits = config.schedule, config.deadlines
        sampling = {spec.name: _sampling(config, spec.stop_ids) for spec in world.tasks}
        self.seat = ports.trainer
        keeps = world.checkpoints is not None and config.checkpoint.every > 0
        self.ledger = ledger = Ledger()
        self.fleet = fleet = Fleet(
            record, waits, ledger, seed=config.seed, spawn=spawn, on_lost=engine_lost, affinity=affinity_of(config)
        )
        mix = Mix(shares(world), schedule.groups_per_batch)
        self.rollout = Rollout(
            record, waits, fleet, ports.env, Rewards(waits, ports.scorer, limit_s=limits.score_s),
            tasks={spec.name: spec for spec in world.tasks},
            barrier=Barrier(waits, turns=schedule.barrier == "turn", scores=schedule.score == "batch"),
            limits=CallLimits(env_open_s=limits.env_open_s, env_step_s=limits.env_step_s, turn_s=limits.turn_s),
        )  # fmt: skip
        self.buffer = Buffer(
            record, waits, ledger, _window(config), stop=self.rollout.stop, live_versions=fleet.live_versions, mix=mix,
            batches=schedule.steps, mix_window=schedule.mix_window,
        )  # fmt: skip
        fleet.changed.forward_to(self.buffer.changed)  # a version that is served may let a group open
        self.groups = Groups(
            record, waits, ledger, self.buffer, self.rollout, mix, rules=_group_rules(config), sampling=sampling,
            spawn=spawn_attempt, keep=world.keep, newest_served=lambda: fleet.router.newest,
            held_up=lambda: self.recovery.under_way, variance=_variance(config, shares(world)),
        )  # fmt: skip
        self.weights = Weights(
            record, waits, fleet, self.seat, world.store,
            WeightRules(order=schedule.sync_order, weights_s=limits.weights_s, pinned_s=limits.pinned_s),
            on_missing=lambda why: self.recovery.doubt(why),
        )  # fmt: skip
        self.evaluator = Evaluator(
            record, self.rollout, self.weights, sampling=sampling, seed=config.seed, trajectory_s=limits.trajectory_s,
            concurrency=config.eval.concurrency, keep=world.keep,
        )  # fmt: skip
        self.colocation = Colocation(
            record, waits, fleet, pools=colocated_pools(config), limit_s=limits.start_s
        )  # fmt: skip
        self.recovery = Recovery(
            record, waits, elastic, self.seat, self.weights, self.buffer, self.colocation, train_s=limits.train_s,
            optimise=lambda batch: self.training.optimise(batch), enabled=keeps,
        )  # fmt: skip
        self.training = Training(
            record, waits, ledger, self.buffer, fleet, self.weights, self.recovery, self.colocation, after_step=after_step,
            rules=TrainRules(
                steps=schedule.steps, steps_per_batch=schedule.steps_per_batch, paper=schedule.sync_order == "paper",
                algorithm=config.algorithm, batch_s=limits.batch_s, train_s=limits.train_s, seed=config.seed,
            ),
        )  # fmt: skip
        self.kept = Kept(
            record=record, ledger=ledger, fleet=fleet, rollout=self.rollout, buffer=self.buffer, groups=self.groups,
            evaluator=self.evaluator,
        )  # fmt: skip
        self.checkpointing = Checkpointing(
            self.kept, self.recovery, world.checkpoints, every=config.checkpoint.every, last=schedule.steps
        )


def _window(config: RunConfig) -> Window:
    schedule = config.schedule
    return Window(
        groups_per_batch=schedule.groups_per_batch, max_staleness=schedule.max_staleness,
        redundant_groups=schedule.redundant_groups,
        bounded=schedule.enforce == "admission_and_release",
    )  # fmt: skip


def _variance(config: RunConfig, shares: Mapping[str, float]) -> Filter | None:
    if config.algorithm.zero_variance == "train":
        return None
    groups = {task: math.ceil(share * config.schedule.groups_per_batch) for task, share in shares.items()}
    allowed = {task: config.algorithm.refills * n for task, n in groups.items()}
    return Filter(allowed=allowed, patience_s=config.deadlines.batch_s / 2)


def _sampling(config: RunConfig, stop_ids: tuple[int, ...]) -> Sampling:
    own = config.sampling
    return Sampling(
        temperature=own.temperature, top_p=own.top_p, top_k=own.top_k, min_p=own.min_p, stop_ids=stop_ids
    )  # fmt: skip


def _group_rules(config: RunConfig) -> GroupRules:
    rule, limits = config.failure.on_failure, config.deadlines
    if isinstance(rule, Retry):
        policy = Policy(
            max_retries=rule.max_retries, backoff_s=rule.backoff_s, backoff_factor=rule.backoff_factor,
            backoff_max_s=rule.backoff_max_s, then=rule.then,
        )  # fmt: skip
    else:
        policy = Policy(max_retries=0, backoff_s=0.0, backoff_factor=1.0, backoff_max_s=0.0, then=rule.kind)
    return GroupRules(
        group_size=config.schedule.group_size, redundancy=config.schedule.redundancy,
        min_group_size=config.failure.min_group_size, trajectory_s=limits.trajectory_s,
        room_wait_s=limits.batch_s + limits.train_s + limits.weights_s + limits.pinned_s, policy=policy,
        give_up_after=config.failure.give_up_after, give_up_s=config.failure.give_up_s, seed=config.seed,
    )  # fmt: skip
