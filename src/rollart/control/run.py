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
    Elastic.again       a lost worker's lease    another worker to start         the world
    Recovery            the last checkpoint      another trainer                 Elastic; the steps since, repeated

`wiring.py` says how the parts are put together, `checkpoint.py` what is kept of them between two steps.

Invariants: every wait is in `Waits` with a deadline; the first failure that a run cannot survive ends all loops and comes
out of `run` as RunFailed with its cause; what was started is released, however the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart.config.schema import RunConfig
from rollart.control.checkpoint import restore
from rollart.control.elastic import Elastic
from rollart.control.evaluate import Mode, Score
from rollart.control.waits import WaitExpired, Waits
from rollart.control.wiring import Ports, Wired, shares, start
from rollart.core.errors import RunFailed, TrainerLost, failure
from rollart.core.events import Recorder
from rollart.core.resources import Change, EngineInfo
from rollart.core.snapshot import Resumed, Snapshot
from rollart.core.types import Boundary, Failure, Version
from rollart.ports import Engine, World
from rollart.sched.failure import Restarts
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


async def run(config: RunConfig, world: World) -> Result:
    """Train as `config` says in `world`, from the beginning or from where `world.resumed` says.

    Raises RunFailed when the run cannot go on; the failure that ended it stands in its last line.
    """
    return await _recorded(config, world, _Run.train)


async def evaluate(config: RunConfig, world: World, *, version: Version, mode: Mode) -> Result:
    """Score every instance of the world's tasks once under the weights that its trainer publishes as `version`.

    Raises RunFailed as `run` does.
    """
    return await _recorded(config, world, partial(_Run.score, version=version, mode=mode))


async def _recorded(config: RunConfig, world: World, job: Callable[[_Run], Awaitable[Result]]) -> Result:
    """Start what `job` needs, run it, release everything; the record says how it went."""
    record = _recorder(config, world)
    limits = config.deadlines
    waits = Waits(record, grace_s=answer_grace(limits.trajectory_s))
    elastic = Elastic(
        record, waits, world.cluster, start_s=limits.start_s, restarts=Restarts(config.failure.restarts)
    )  # fmt: skip
    try:
        async with world.beside(record) if world.beside is not None else nullcontext():
            ports = await start(config, world, elastic)
            result = await _supervised(config, world, record, waits, elastic, ports, job)
    except BaseException as error:  # boundary: every end is in the record, that of a bug too
        ended = isinstance(error, asyncio.CancelledError | SystemExit | KeyboardInterrupt)
        status = "cancelled" if ended else "failed"
        why = "interrupted" if ended else str(error) or type(error).__name__
        record("run_finished", status=status, why=why)
        raise
    finally:
        await elastic.release_all()
    record("run_finished", status="done", why=f"{result.steps} steps are trained")
    return result


def _recorder(config: RunConfig, world: World) -> Recorder:
    """A record that begins, or goes on after what stands of an earlier incarnation."""
    now, resumed, schedule = asyncio.get_running_loop().time, world.resumed, config.schedule
    kept = resumed.snapshot if resumed is not None else None
    if resumed is not None and kept is not None:
        record = Recorder(world.sinks, now, seq=kept.seq, origin=now() - kept.t_s)
        record(
            "resumed", from_seq=kept.seq, lost=resumed.lost, step=kept.step, version=kept.version, steps=schedule.steps,
            max_staleness=schedule.max_staleness, sync_order=schedule.sync_order,
        )  # fmt: skip
    else:
        record = Recorder(world.sinks, now)
        if resumed is not None:
            record("resumed", from_seq=0, lost=resumed.lost)
        record(
            "run_started", recipe=config.name, steps=schedule.steps, batch=schedule.batch,
            group_size=schedule.group_size, max_staleness=schedule.max_staleness, sync_order=schedule.sync_order,
            enforce=schedule.enforce,
            mix=shares(world), success_at={spec.name: spec.success_at for spec in world.tasks},
        )  # fmt: skip
        for spec in world.tasks:
            if len(set(spec.train)) == 1 and not spec.held_out:
                text = f"{spec.name} has one instance only: what is learned is this one, and nothing is said of others"
                record("advisory", code="one_instance", text=text)
    for text in resumed.notes if resumed is not None else ():
        record("advisory", code="resumed", text=text)
    return record


# --- loops ---------------------------------------------------------------------------------------------------------------


async def _supervised(
    config: RunConfig, world: World, record: Recorder, waits: Waits, elastic: Elastic, ports: Ports,
    job: Callable[[_Run], Awaitable[Result]],
) -> Result:  # fmt: skip
    """Run all loops in one task group; the first that fails ends the others and its error comes out."""
    try:
        async with asyncio.TaskGroup() as group:
            this = _Run(config, world, record, waits, elastic, ports, group)
            result = await job(this)
            await this.wind_down()
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


class _Run:
    """The story of one run, told with its wired parts."""

    def __init__(
        self, config: RunConfig, world: World, record: Recorder, waits: Waits, elastic: Elastic, ports: Ports,
        group: asyncio.TaskGroup,
    ) -> None:  # fmt: skip
        self.config, self.world, self.record, self.waits, self.elastic = config, world, record, waits, elastic
        self.ports = ports
        self._group = group
        self._attempts: set[asyncio.Task[None]] = set()
        self._daemons: set[asyncio.Task[None]] = set()
        self._winding_down = False
        self.evaluations: dict[str, list[Score]] = {}
        self._evaluating: asyncio.Task[bool] | None = None
        self.parts = Wired(
            config, world, record, waits, elastic, ports, spawn=group.create_task, spawn_attempt=self._spawn_attempt,
            after_step=self._after, engine_lost=self._engine_lost,
        )  # fmt: skip

    async def train(self) -> Result:
        """Warm start and first weights, or those of a checkpoint; evaluation; training; evaluation."""
        self._daemon(self._watch(), "watch")
        resumed, parts, steps = self.world.resumed, self.parts, self.config.schedule.steps
        if resumed is None or resumed.snapshot is None:
            first_step, version = 0, await parts.recovery.from_nothing(self._begin)
        else:
            first_step, version = resumed.snapshot.step, await self._go_on(resumed, resumed.snapshot)
        episodes, greedy = self.config.eval.episodes, self.config.eval.greedy
        if first_step == 0:
            version = await self._evaluate("before", version, ("sampled",), episodes)
        producing = self._group.create_task(parts.groups.produce(), name="groups")
        version = await parts.training.run(first_step=first_step, version=version)
        await producing
        if self._evaluating is not None:
            _, version = await parts.recovery.beside(version, self._evaluating)
        self._drop_the_rest()
        version = await parts.recovery.served(version)
        version = await self._evaluate("after", version, ("sampled", "greedy") if greedy else ("sampled",), episodes)
        version = await parts.recovery.through(version, self._conclude)
        return Result(steps=steps, version=version, evaluations=self.evaluations)

    async def score(self, *, version: Version, mode: Mode) -> Result:
        """One evaluation of given weights, and nothing else."""
        self._daemon(self._watch(), "watch")
        self._serve()
        version = await self._offered(version)
        version = await self._evaluate("asked", version, (mode,), None, again=self._offered)
        return Result(steps=0, version=version, evaluations=self.evaluations)

    async def _offered(self, version: Version) -> Version:
        """The asked weights, served everywhere, and under which number."""

        async def offer() -> Version:
            number = await self.parts.recovery.first(version)
            await self.parts.weights.sync()
            return number

        return await self.parts.recovery.from_nothing(offer)

    # --- the beginning -----------------------------------------------------------------------------------------------

    async def _begin(self) -> Version:
        """A run of its own: warm start, version 0, the first checkpoint. Raises TrainerLost, and can be done again."""
        parts, config = self.parts, self.config
        if self.world.prepare is not None:
            preparing = self.world.prepare(parts.seat.port, self.record)
            await self._once(preparing, "trainer", "baselines and warm start", config.deadlines.prepare_s, "prepare_s")
        unused = 0 if self.world.resumed is None else self.world.resumed.highest_version + 1
        version = await parts.recovery.first(unused)
        self._serve()
        await parts.weights.sync()
        return await parts.checkpointing.save(0, version) if parts.checkpointing.due(0) else version

    async def _go_on(self, resumed: Resumed, state: Snapshot) -> Version:
        """The state of a checkpoint, its weights under a new number, and the members that lived then begun again."""
        parts = self.parts
        again = restore(parts.kept, state)
        parts.recovery.kept(resumed.trainer, state.step)
        number = max(resumed.highest_version, state.version) + 1
        await parts.recovery.from_nothing(partial(self._take_up, resumed.trainer, state.version, number))
        self._serve()
        number = await parts.recovery.served(number)
        for name, attempts in again.items():
            parts.groups.issue(parts.buffer.groups[name], attempts)
        if state.step:
            self._evaluate_if_due(state.step, number)
        return number

    async def _take_up(self, path: str, version: Version, number: Version) -> None:
        await self.parts.recovery.load(path)
        await self.parts.recovery.offer(version, number)

    def _serve(self) -> None:
        """Let engines follow what is published; those that follow already go on."""
        for engine in self.ports.engines:
            if engine.info.id not in self.parts.fleet.engines and engine.info.id not in self.parts.fleet.gone:
                self._follow(engine)

    def _follow(self, engine: Engine) -> None:
        self.parts.fleet.add(engine)
        self._daemon(self.parts.weights.follow(engine), f"weights of {engine.info.id}")

    # --- between steps -----------------------------------------------------------------------------------------------

    async def _after(self, step: int, version: Version) -> Version:
        """After step `step`: a checkpoint and an evaluation, where they are due."""
        parts, done = self.parts, step + 1
        if parts.checkpointing.due(done):
            version = await parts.recovery.through(version, partial(parts.checkpointing.save, done))
        self._evaluate_if_due(done, version)
        return version

    def _evaluate_if_due(self, done: int, version: Version) -> None:
        """An evaluation beside training, unless the last one still runs or the final one follows."""
        every, episodes = self.config.eval.every, self.config.eval.episodes
        if every == 0 or not episodes or done % every or done == self.config.schedule.steps:
            return
        if self._evaluating is not None and not self._evaluating.done():
            text = f"no evaluation after step {done - 1}: the last one still runs"
            self.record("advisory", code="evaluation_slow", text=text)
            return
        self._evaluating = self._group.create_task(
            self._scored(f"step-{done}", version, ("sampled",), episodes), name=f"evaluation after step {done - 1}"
        )

    async def _evaluate(
        self, name: str, version: Version, modes: tuple[Mode, ...], episodes: int | None, *,
        again: Callable[[Version], Awaitable[Version]] | None = None,
    ) -> Version:  # fmt: skip
        """An evaluation that the run waits for; returns the number that the weights have then. Where they had to be
        published again for want of an engine that served them, what remained incomplete is evaluated again as well."""
        complete = episodes == 0
        while not complete:
            asked, work = version, self._scored(name, version, modes, episodes)
            complete, version = await self.parts.recovery.beside(version, work, again=again)
            complete = complete or version == asked
        return version

    async def _scored(self, name: str, version: Version, modes: tuple[Mode, ...], episodes: int | None) -> bool:
        """Whether every episode could be scored."""
        scores = await self.parts.evaluator.run(name, version, episodes=episodes, modes=modes)
        self.evaluations[name] = scores
        return all(score.complete for score in scores)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _drop_the_rest(self) -> None:
        """Redundant groups that the last batch did not need."""
        for group in list(self.parts.buffer.groups.values()):
            self.parts.buffer.drop(group, "redundant")

    async def _conclude(self, version: Version) -> Version:
        """Keep the model. Raises TrainerLost when its bytes went with the trainer."""
        if self.world.conclude is not None:
            last = (await self.world.store.chain(None, version))[-1]
            limit_s = self.config.deadlines.weights_s
            await self._once(self.world.conclude(last), "store", "the model to be kept", limit_s, "weights_s")
        return version

    async def _once(self, work: Awaitable[None], where: Boundary, what: str, limit_s: float, setting: str) -> None:
        """Work that the run cannot do without, and that nobody else can do when it is late."""
        try:
            await self.waits.on(work, what=what, deadline_s=self._by(limit_s))
        except WaitExpired as expired:
            why = failure(where, "timeout", f"{expired}; raise deadlines.{setting} if it only needs more time")
            raise RunFailed(f"{what}: no end", why) from expired

    def _by(self, limit_s: float) -> float:
        return asyncio.get_running_loop().time() + limit_s

    # --- what happens unasked ----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """What the world says unasked."""
        async for change in self.world.cluster.changes():
            why = change.failure or failure("cluster", "lost", f"{change.subject} is gone")
            match change.kind, change.role:
                case "joined", "env":
                    self.record("host_joined", host=change.subject)
                case "lost", "env" if self.elastic.losing(change.lease):
                    self.record("host_lost", host=change.subject, failure=why.detail)
                    self._daemon(self._another_host(change, why), f"a host in place of {change.subject}")
                case "lost", "train":
                    if change.lease in ("", self.parts.seat.lease):
                        self.parts.recovery.lost(TrainerLost(why.detail))
                case "lost", role if role != "env":
                    self.parts.fleet.lost(change.subject, why)

    async def _another_host(self, change: Change, why: Failure) -> None:
        await self.elastic.again("env", change.lease, why)

    def _engine_lost(self, info: EngineInfo, why: Failure) -> None:
        if not self._winding_down:
            self._daemon(self._another_engine(info, why), f"an engine in place of {info.id}")

    async def _another_engine(self, info: EngineInfo, why: Failure) -> None:
        worker = await self.elastic.again(info.role, info.lease, why)
        if worker is not None:
            await self.parts.colocation.admit(worker.port)
            self._follow(worker.port)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _spawn_attempt(self, member: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(member)
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)

    def _daemon(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(loop, name=name)
        self._daemons.add(task)
        task.add_done_callback(self._daemons.discard)

    async def wind_down(self) -> None:
        """Let attempts that were told to stop come to their end, then end what does not end by itself."""
        self._winding_down = True
        try:
            await self.waits.on(
                self.parts.rollout.quiet(), what="attempts to end", deadline_s=self._by(WIND_DOWN_S)
            )  # fmt: skip
        except WaitExpired as expired:
            self.record("advisory", code="attempts_left", text=str(expired))
            self.parts.ledger.drop("in_flight", "redundant", self.parts.rollout.give_up("redundant"))
        self._give_up_engines()
        self.parts.training.close_books()
        for task in (*self._attempts, *self._daemons):
            task.cancel()

    def _give_up_engines(self) -> None:
        """Those that sample on although they were told to stop: what they have is nobody's any more."""
        why = failure("engine", "timeout", "it did not stop sampling when the run ended")
        for engine, book in self.parts.fleet.books().items():
            if any(live.n_tokens for live in book.live.values()):
                self.parts.fleet.lost(engine, why)
