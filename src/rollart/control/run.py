"""One run, from starting its ports to its last event. Read this file first.

                    ┌────────────────────────────────────────────────────────────────┐
                    │                                                                ▼
    Mix, Cursor ─► Groups.produce ─► Rollout.attempt (one coroutine each) ─► Buffer ─► Training.run ─► Weights.publish
      which task      opens groups      env session ⇄ Fleet.turn ─► score     groups     batch, step       │ one
      which problem   while there       (routes, retries, resumes)            complete   version + 1       │ version
                      is room                  ▲                                                           ▼
                                               └────────────── engines ◄──────────── Weights.follow (one per engine)

    loop                consumes                 waits for                       unblocked by
    Groups.produce      room in the window       the staleness window            a batch published, a group dropped
    Groups._member      its attempt              its own environment, engine     their answers, or its deadlines
    Training.run        complete groups          every task's quota of a batch   Groups (Buffer.changed)
    Weights.follow      published versions       the trainer; pins               Training, Evaluator (Weights.changed)
    Evaluator.run       its own episodes         engines at its version          Weights
    _watch              what the cluster says    joins and losses                the world

Invariants: every wait is in `Waits` with a deadline; the first failure that a run cannot survive ends all loops and comes
out of `run` as RunFailed with its cause; what was started is released, however the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.config.schema import Retry, RunConfig
from rollart.control.buffer import Buffer
from rollart.control.evaluate import Evaluator, Mode, Score
from rollart.control.fleet import Fleet
from rollart.control.groups import GroupRules, Groups
from rollart.control.rewards import Rewards
from rollart.control.rollout import CallLimits, Rollout
from rollart.control.train import Training, TrainRules
from rollart.control.waits import WaitExpired, Waits
from rollart.control.weights import WeightRules, Weights
from rollart.core.errors import RunFailed, failure
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.resources import DEFAULT_DEGREES
from rollart.core.types import Failure, Role, Sampling, Version
from rollart.ports import Engine, Env, Scorer, Trainer, World
from rollart.sched.failure import Patience, Policy
from rollart.sched.mixing import Mix
from rollart.sched.staleness import Window
from rollart.sched.timeouts import answer_grace

WIND_DOWN_S = 10.0
"""How long attempts that were told to stop may take to end when all is trained; then they are cancelled. A run must be
gone soon after its last step, whatever an environment does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to; everything else is in its event log."""

    steps: int
    version: Version
    evaluations: Mapping[str, list[Score]]


@dataclass(frozen=True, slots=True)
class _Ports:
    trainer: Trainer
    env: Env
    engines: tuple[Engine, ...]
    scorer: Scorer | None


async def run(config: RunConfig, world: World) -> Result:
    """Train as `config` says in `world`.

    Raises RunFailed when the run cannot go on; the failure that ended it stands in its last line.
    """
    return await _recorded(config, world, _Wired.train)


async def evaluate(config: RunConfig, world: World, *, version: Version, mode: Mode) -> Result:
    """Score every instance of the world's tasks once under the weights that its trainer publishes as `version`.

    Raises RunFailed as `run` does.
    """
    return await _recorded(config, world, partial(_Wired.score, version=version, mode=mode))


async def _recorded(config: RunConfig, world: World, job: Callable[[_Wired], Awaitable[Result]]) -> Result:
    """Start what `job` needs, run it, release everything; the record says how it went."""
    record = Recorder(world.sinks, asyncio.get_running_loop().time)
    schedule = config.schedule
    record(
        "run_started", recipe=config.name, steps=schedule.steps, batch=schedule.batch, group_size=schedule.group_size,
        max_staleness=schedule.max_staleness, sync_order=schedule.sync_order, mix=_shares(world),
        success_at={spec.name: spec.success_at for spec in world.tasks},
    )  # fmt: skip
    for spec in world.tasks:
        if len(set(spec.train)) == 1 and not spec.held_out:
            text = f"{spec.name} has one instance only: what is learned is this one, and nothing is said of others"
            record("advisory", code="one_instance", text=text)
    leases: list[str] = []
    try:
        ports = await _start(config, world, leases)
        result = await _supervised(config, world, record, ports, job)
    except BaseException as error:  # boundary: every end is in the record, that of a bug too
        status = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        record("run_finished", status=status, why=str(error) or type(error).__name__)
        raise
    finally:
        for lease in reversed(leases):
            await world.cluster.release(lease)
    record("run_finished", status="done", why=f"{result.steps} steps are trained")
    return result


def _shares(world: World) -> dict[str, float]:
    total = sum(spec.ratio for spec in world.tasks)
    return {spec.name: spec.ratio / total for spec in world.tasks}


# --- ports ---------------------------------------------------------------------------------------------------------------


async def _start(config: RunConfig, world: World, leases: list[str]) -> _Ports:
    """Start every role at once; what cannot be had is an error before anything is sampled."""
    engines: list[Role] = ["mixed"] * config.engine.count
    roles: list[Role] = ["train", "env", *engines]
    if any(spec.scored for spec in world.tasks):
        roles.append("score")
    # not a task group: a start that fails must leave the leases of the others known, so that they are released
    started = await asyncio.gather(*(_port(config, world, role, leases) for role in roles), return_exceptions=True)
    for outcome in started:
        if isinstance(outcome, BaseException):
            raise outcome
    ports: dict[Role, list[Any]] = {role: [] for role in roles}
    for role, port in zip(roles, started, strict=True):
        ports[role].append(port)
    return _Ports(ports["train"][0], ports["env"][0], tuple(ports["mixed"]), next(iter(ports.get("score", [])), None))


async def _port(config: RunConfig, world: World, role: Role, leases: list[str]) -> object:
    deadline = asyncio.get_running_loop().time() + config.deadlines.start_s
    lease = await world.cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=deadline)
    if isinstance(lease, Failure):
        raise RunFailed(f"no device for role {role}", lease)
    leases.append(lease.id)
    try:
        async with asyncio.timeout_at(deadline):
            port: object = await world.cluster.start(lease)
    except TimeoutError:
        port = failure("cluster", "timeout", f"role {role} did not start in {config.deadlines.start_s} s")
    if isinstance(port, Failure):
        raise RunFailed(f"role {role} did not start", port)
    return port


# --- loops ---------------------------------------------------------------------------------------------------------------


async def _supervised(
    config: RunConfig, world: World, record: Recorder, ports: _Ports, job: Callable[[_Wired], Awaitable[Result]]
) -> Result:
    """Run all loops in one task group; the first that fails ends the others and its error comes out."""
    try:
        async with asyncio.TaskGroup() as group:
            wired = _Wired(config, world, record, ports, group)
            result = await job(wired)
            await wired.wind_down()
        return result
    except BaseExceptionGroup as many:
        raise _first(many) from many


def _first(many: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that the user must see: a failed run before anything that followed from it."""
    flat: list[BaseException] = []
    stack: list[BaseException] = [many]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, RunFailed)), flat[0])


class _Wired:
    """All components of one run, wired: the only place where they know of one another."""

    def __init__(
        self, config: RunConfig, world: World, record: Recorder, ports: _Ports, group: asyncio.TaskGroup
    ) -> None:
        schedule, limits = config.schedule, config.deadlines
        tasks = {spec.name: spec for spec in world.tasks}
        sampling = {spec.name: _sampling(config, spec.stop_ids) for spec in world.tasks}
        self.config, self.world, self.record, self.ports, self._group = config, world, record, ports, group
        self._attempts: set[asyncio.Task[None]] = set()
        self.waits = waits = Waits(record, grace_s=answer_grace(limits.trajectory_s))
        self.ledger = ledger = Ledger()
        self.fleet = fleet = Fleet(record, waits, ledger, seed=config.seed, spawn=group.create_task)
        self.mix = Mix(_shares(world), schedule.groups_per_batch)
        self.rollout = Rollout(
            record, waits, fleet, ports.env, Rewards(waits, ports.scorer, limit_s=limits.score_s), tasks=tasks,
            limits=CallLimits(env_open_s=limits.env_open_s, env_step_s=limits.env_step_s, turn_s=limits.turn_s),
        )  # fmt: skip
        window = Window(
            groups_per_batch=schedule.groups_per_batch,
            max_staleness=schedule.max_staleness,
            redundant_groups=schedule.redundant_groups,
        )
        self.buffer = Buffer(
            record,
            waits,
            ledger,
            window,
            stop=self.rollout.stop,
            live_versions=fleet.live_versions,
            mix=self.mix,
            batches=schedule.steps,
            mix_window=schedule.mix_window,
        )
        fleet.changed.forward_to(self.buffer.changed)  # a version that is served may let a group open
        self.groups = Groups(
            record, waits, ledger, self.buffer, self.rollout, self.mix, rules=_group_rules(config), sampling=sampling,
            patience=Patience(config.failure.give_up_after), spawn=self._spawn_attempt, keep=world.keep,
            newest_served=lambda: fleet.router.newest,
        )  # fmt: skip
        self.weights = Weights(
            record, waits, fleet, ports.trainer, world.store,
            WeightRules(order=schedule.sync_order, weights_s=limits.weights_s, pinned_s=limits.pinned_s),
        )  # fmt: skip
        self.evaluator = Evaluator(
            record, self.rollout, self.weights, sampling=sampling, seed=config.seed, trajectory_s=limits.trajectory_s,
            concurrency=config.eval.concurrency, keep=world.keep,
        )  # fmt: skip
        self.training = Training(
            record, waits, ledger, self.buffer, fleet, self.weights, ports.trainer, after_step=self._after,
            rules=TrainRules(
                steps=schedule.steps, steps_per_batch=schedule.steps_per_batch, paper=schedule.sync_order == "paper",
                algorithm=config.algorithm, batch_s=limits.batch_s, train_s=limits.train_s, seed=config.seed,
            ),
        )  # fmt: skip
        self.evaluations: dict[str, list[Score]] = {}
        self._evaluating: asyncio.Task[None] | None = None
        self._daemons: list[asyncio.Task[None]] = []

    async def train(self) -> Result:
        """Warm start, first weights, evaluation, training, evaluation."""
        self._daemon(self._watch(), "watch")
        if self.world.prepare is not None:
            preparing = self.world.prepare(self.ports.trainer, self.record)
            await self.waits.on(
                preparing, what="baselines and warm start", deadline_s=self._by(self.config.deadlines.prepare_s)
            )
        await self._serve(0)
        await self._evaluate("before", 0, ("sampled",))
        producing = self._group.create_task(self.groups.produce(), name="groups")
        version = await self.training.run(first_step=0, version=0)
        await producing
        if self._evaluating is not None:
            await self._evaluating
        self._drop_the_rest()
        await self.weights.sync()
        await self._evaluate("after", version, ("sampled", "greedy") if self.config.eval.greedy else ("sampled",))
        if self.world.conclude is not None:
            last = (await self.world.store.chain(None, version))[-1]
            limit_s = self.config.deadlines.weights_s
            await self.waits.on(self.world.conclude(last), what="the model to be kept", deadline_s=self._by(limit_s))
        return Result(steps=self.config.schedule.steps, version=version, evaluations=self.evaluations)

    async def score(self, *, version: Version, mode: Mode) -> Result:
        """One evaluation of given weights, and nothing else."""
        self._daemon(self._watch(), "watch")
        await self._serve(version)
        scores = await self.evaluator.run("asked", version, episodes=None, modes=(mode,))
        return Result(steps=0, version=version, evaluations={"asked": scores})

    def _by(self, limit_s: float) -> float:
        return asyncio.get_running_loop().time() + limit_s

    async def _serve(self, version: Version) -> None:
        """Bring the trainer's present weights to all engines, as `version`."""
        for engine in self.ports.engines:
            self.fleet.add(engine)
            self._daemon(self.weights.follow(engine), f"weights of {engine.info.id}")
        await self.weights.publish(-1, version)
        await self.weights.sync()

    async def _after(self, step: int, version: Version) -> None:
        """Between steps: an evaluation beside training, unless the last one still runs or the final one follows."""
        every = self.config.eval.every
        last = step + 1 == self.config.schedule.steps
        if every == 0 or (step + 1) % every or last:
            return
        if self._evaluating is not None and not self._evaluating.done():
            self.record(
                "advisory", code="evaluation_slow", text=f"no evaluation after step {step}: the last one still runs"
            )
            return
        self._evaluating = self._group.create_task(
            self._evaluate(f"step-{step + 1}", version, ("sampled",)), name=f"evaluation after step {step}"
        )

    async def _evaluate(self, name: str, version: Version, modes: tuple[Mode, ...]) -> None:
        if self.config.eval.episodes:
            self.evaluations[name] = await self.evaluator.run(
                name, version, episodes=self.config.eval.episodes, modes=modes
            )

    def _drop_the_rest(self) -> None:
        """Redundant groups that the last batch did not need."""
        for group in list(self.buffer.groups.values()):
            self.buffer.drop(group, "redundant")

    async def _watch(self) -> None:
        """What the world says unasked."""
        async for change in self.world.cluster.changes():
            if change.kind != "lost":
                continue
            why = change.failure or failure("cluster", "lost", f"{change.subject} is gone")
            if change.role == "env":
                self.record("host_lost", host=change.subject, failure=why.detail)
                if not change.facts.get("left"):
                    raise RunFailed(f"no environment host is left: {change.subject} was the last", why)
            elif change.role == "train":
                raise RunFailed(f"trainer {change.subject} is lost", why)
            else:
                self.fleet.lost(change.subject, why)

    def _spawn_attempt(self, member: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(member)
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)

    def _daemon(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        self._daemons.append(self._group.create_task(loop, name=name))

    async def wind_down(self) -> None:
        """Let attempts that were told to stop come to their end, then end what does not end by itself."""
        deadline = asyncio.get_running_loop().time() + WIND_DOWN_S
        try:
            await self.waits.on(self.rollout.quiet(), what="attempts to end", deadline_s=deadline)
        except WaitExpired as expired:
            self.record("advisory", code="attempts_left", text=str(expired))
        self.training.close_books()
        for task in (*self._attempts, *self._daemons):
            task.cancel()


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
        seed=config.seed,
    )  # fmt: skip
