"""One attempt at one task instance, from opening its environment to its terminal state.

Invariant: `Rollout.attempt` never raises (shutdown apart) and ends in exactly one of done, aborted, failed; every sampled
token of the attempt is in the trajectory that it returns, whatever the end. A failed or slow environment concerns no other
trajectory: nothing here is shared but the ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rollart.control.barrier import Barrier
from rollart.control.ending import ENDED, ending
from rollart.control.fleet import Fleet, Key
from rollart.control.rewards import Rewards, finite
from rollart.control.signal import Signal
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import failure
from rollart.core.events import Recorder
from rollart.core.lifecycle import ATTEMPT, Lifecycle
from rollart.core.types import (
    DropReason,
    Failure,
    Observation,
    RequestId,
    Sampling,
    Segment,
    Status,
    TaskInstance,
    TaskSpec,
    Tokens,
    Trajectory,
    TurnRequest,
    Version,
)
from rollart.ports import Env, Session
from rollart.sched.timeouts import TEARDOWN_MAX_S, call_deadline

T = TypeVar("T")

POLICY = "policy"
"""Model id of the model being trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The longest that one call may take, in seconds."""

    env_open_s: float
    env_step_s: float
    turn_s: float


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The handle of an attempt: what it is, and whether it shall stop."""

    instance: TaskInstance
    member: int
    attempt: int
    work_until_s: float
    """Absolute; set-up, turns and scoring end by then."""
    close_until_s: float
    """Absolute; teardown ends by then."""
    sampling: Sampling
    min_version: Version = 0
    """What is still to be sampled, is sampled under this version or a newer one; rises with what was delivered."""
    pin: Version | None = None
    stop: DropReason | None = None
    ended: bool = False
    oldest: Version | None = None
    """Oldest version among the tokens delivered so far."""
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.instance.traj_id(self.member), self.attempt)

    def delivered(self, pieces: tuple[Tokens, ...]) -> None:
        """Versions never fall inside a trajectory, also when it moves to an engine that is behind."""
        if self.oldest is None:
            self.oldest = pieces[0].spans[0].version
        self.min_version = max(self.min_version, pieces[-1].spans[-1].version)


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended."""

    status: Status
    cause: str
    failure: Failure | None = None


class Rollout:
    """The ports and limits that all attempts share."""

    def __init__(
        self, record: Recorder, waits: Waits, fleet: Fleet, env: Env, rewards: Rewards, *,
        limits: CallLimits, tasks: Mapping[str, TaskSpec], barrier: Barrier | None = None,
    ) -> None:  # fmt: skip
        self.record = record
        self.waits = waits
        self.fleet = fleet
        self.env = env
        self.rewards = rewards
        self.limits = limits
        self.tasks = tasks
        self.barrier = barrier or Barrier(waits, turns=False, scores=False)
        self._live: dict[Key, _Running] = {}
        self._ended = Signal()

    async def attempt(self, who: Attempt) -> Trajectory:
        """Run one attempt to its terminal state."""
        running = self._live[who.key] = _Running(self, who)
        if who.instance.purpose == "train":
            self.barrier.join(who.key)
        try:
            return await running.to_its_end()
        finally:
            self.barrier.leave(who.key)
            del self._live[who.key]
            self._ended.notify()

    def unfinished(self) -> list[Mapping[str, object]]:
        """Of each attempt that lives: the fields of the event that ends it if this incarnation of the run ends now."""
        return [running.cut("rolled_back") for running in self._live.values() if not running.over]

    def give_up(self, reason: DropReason) -> int:
        """End attempts that do not come to an end by themselves; their tasks are then to be cancelled. Returns the tokens
        of the trained ones."""
        tokens = 0
        for running in self._live.values():
            if not running.over:
                fields = running.cut(running.who.stop or reason)
                self.record(ENDED, **fields)
                running.over = True
                tokens += running.n_sampled if running.who.instance.purpose == "train" else 0
        return tokens

    async def quiet(self) -> None:
        """Wait until no attempt lives."""
        while self._live:
            await self._ended.wait()

    def stop(self, attempts: Mapping[Key, Attempt], reason: DropReason) -> None:
        """Ask attempts to end as aborted: a generation within an engine step, a call to an environment when it returns."""
        keys = [key for key, attempt in attempts.items() if attempt.stop is None and not attempt.ended]
        for key in keys:
            attempts[key].stop = reason
            self.record("abort_requested", traj=key[0], attempt=key[1], reason=reason)
            self.barrier.leave(key)
        self.fleet.abort(keys)


@dataclass(slots=True)
class _Running:
    """One attempt while it lives."""

    shared: Rollout
    who: Attempt
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    context_tokens: int = 0
    """Of the last segment."""
    rewards: list[float] = field(default_factory=list)
    evidence: list[object] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("open", "generate", "step", "score"), 0.0))
    turns: int = 0
    bad_actions: int = 0
    over: bool = False
    """Its terminal state is recorded."""

    async def to_its_end(self) -> Trajectory:
        shared, who = self.shared, self.who
        started = asyncio.get_running_loop().time()
        life = Lifecycle(ATTEMPT, f"{who.key[0]}#{who.attempt}", "opening")
        self._record("traj_started", group=who.instance.group_id, task=who.instance.task, purpose=who.instance.purpose)
        session: Session | None = None
        try:
            opened = await self._open() if who.stop is None else None
            session = None if isinstance(opened, Failure) else opened
            if who.stop is not None:
                end = _End("aborted", who.stop)
            elif isinstance(opened, Failure):
                end = _End("failed", opened.kind, opened)
            else:
                assert session is not None
                end = await self._play(session, life)
            if end.status == "done":
                life.to("scoring")
                await shared.barrier.ends(who.key, who.work_until_s - shared.rewards.limit_s)
            shared.barrier.leave(who.key)
            trajectory = await self._judge(end)
        finally:
            if session is not None:
                await self._close(session)
            shared.fleet.forget(who.key)
            who.ended = True
        life.to(trajectory.status)
        self.timings["total"] = asyncio.get_running_loop().time() - started
        self._record(ENDED, **ending(trajectory))
        self.over = True
        return trajectory

    def cut(self, reason: DropReason) -> Mapping[str, object]:
        """How it ends if nobody goes on with it: with what it has delivered so far."""
        trajectory = self._trajectory(_End("aborted", reason), self._delivered)
        return {"traj": self.who.key[0], "attempt": self.who.attempt, **ending(trajectory)}

    @property
    def _delivered(self) -> tuple[Segment, ...]:
        return (*self.segments[:-1], self.segments[-1].extended(*self.shared.fleet.parts(self.who.key)))

    @property
    def n_sampled(self) -> int:
        return sum(segment.n_sampled for segment in self._delivered)

    # --- the environment's side ----------------------------------------------------------------------------------

    async def _open(self) -> Session | Failure:
        env, who = self.shared.env, self.who
        deadline = self._deadline(self.shared.limits.env_open_s)
        opening = env.open(who.instance, traj=who.key[0], attempt=who.attempt, deadline_s=deadline)
        session = await self._bounded(opening, "environments to open", deadline, "open")
        if not isinstance(session, Failure):
            self._record("env_opened", host=session.host, seconds=round(self.timings["open"], 6))
        return session

    async def _play(self, session: Session, life: Lifecycle) -> _End:
        """Reset, then turn by turn until somebody ends it."""
        limits = self.shared.limits
        deadline = self._deadline(limits.env_open_s)
        observation = await self._bounded(session.reset(deadline_s=deadline), "environments to reset", deadline, "open")
        while not isinstance(observation, Failure):
            self._observe(observation)
            end = self._over(observation)
            if end is not None:
                return end
            life.to("generating")
            action = await self._generate()
            if isinstance(action, _End):
                return action
            life.to("stepping")
            observation = await self._step(session, action)
        return _End("failed", observation.kind, observation)

    async def _step(self, session: Session, action: tuple[Tokens, ...]) -> Observation | Failure:
        """The environment's answer to an action; with the barrier, when all have acted and all have answered."""
        shared, who = self.shared, self.who
        late = await shared.barrier.actions(who.key, who.work_until_s)
        if late is not None:
            return late
        if who.stop is not None:
            return Observation(tokens=Tokens(n_tokens=0))  # nobody looks at it: the attempt ends as aborted
        before, deadline = self.timings["step"], self._deadline(shared.limits.env_step_s)
        observation = await self._bounded(
            session.step(action, deadline_s=deadline), "environments to step", deadline, "step"
        )
        if isinstance(observation, Failure):
            return observation
        seconds = round(self.timings["step"] - before, 6)
        self._record("env_stepped", turn=self.turns - 1, seconds=seconds, bad_action=observation.bad_action)
        return await shared.barrier.observations(who.key, who.work_until_s) or observation

    def _observe(self, observation: Observation) -> None:
        if observation.new_segment is not None:
            self.segments.append(observation.new_segment)
            self.context_tokens = observation.new_segment.n_tokens
        elif observation.tokens.n_tokens:
            self.segments[-1] = self.segments[-1].extended(observation.tokens)
            self.context_tokens += observation.tokens.n_tokens
        if observation.reward is not None:
            self.rewards.append(observation.reward)
        if observation.evidence is not None:
            self.evidence.append(observation.evidence)
        self.metrics.update(observation.metrics)
        self.bad_actions += observation.bad_action

    def _over(self, observation: Observation) -> _End | None:
        spec = self.shared.tasks[self.who.instance.task]
        if self.who.stop is not None:
            return _End("aborted", self.who.stop)
        if observation.terminated:
            return _End("done", "env_done")
        if observation.truncated:
            return _End("done", "truncated")
        if self.turns >= spec.max_turns:
            return _End("done", "max_turns")
        if self.context_tokens >= spec.max_context:
            return _End("done", "length")
        return None

    async def _close(self, session: Session) -> None:
        """Teardown within the attempt's life; a host that does not answer has its session reaped with it."""
        task = asyncio.current_task()
        # at shutdown the whole run waits for this, so it gets no longer than a teardown needs
        limit_s = TEARDOWN_MAX_S if task is not None and task.cancelling() else self.shared.limits.env_step_s
        deadline = call_deadline(asyncio.get_running_loop().time(), limit_s, self.who.close_until_s)
        try:
            await self.shared.waits.on(session.close(), what="environments to close", deadline_s=deadline)
        except WaitExpired:
            return

    # --- the engine's side ---------------------------------------------------------------------------------------

    async def _generate(self) -> tuple[Tokens, ...] | _End:
        """One turn: the pieces that were sampled, or why the attempt ends here."""
        shared, who, segment = self.shared, self.who, self.segments[-1]
        spec = shared.tasks[who.instance.task]
        started = asyncio.get_running_loop().time()
        turn = await shared.fleet.turn(
            TurnRequest(
                id=RequestId(who.key[0], who.attempt, self.turns, 0),
                model=POLICY,
                purpose=who.instance.purpose,
                domain=who.instance.task,
                context=segment,
                max_tokens=min(spec.max_tokens, spec.max_context - self.context_tokens),
                sampling=who.sampling,
                min_version=who.min_version,
                pin=who.pin,
                deadline_s=self._deadline(shared.limits.turn_s),
            )
        )
        self.timings["generate"] += asyncio.get_running_loop().time() - started
        self.turns += 1
        if turn.pieces:
            self.segments[-1] = segment.extended(*turn.pieces)
            self.context_tokens += turn.n_tokens
            who.delivered(turn.pieces)
        if who.stop is not None:
            return _End("aborted", who.stop)
        if turn.failure is not None:
            return _End("failed", turn.failure.kind, turn.failure)
        if turn.finish == "aborted" or not turn.pieces:
            return _End("failed", "refused", failure("engine", "refused", f"turn ended as {turn.finish} without cause"))
        return turn.pieces

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _judge(self, end: _End) -> Trajectory:
        """The trajectory with its reward. What cannot be scored has failed: it is never scored 0."""
        who, spec = self.who, self.shared.tasks[self.who.instance.task]
        trajectory = self._trajectory(end, tuple(self.segments))
        if end.status != "done":
            return trajectory
        if who.stop is not None:  # while it waited for the others
            return replace(trajectory, status="aborted", finish_cause=who.stop)
        started = asyncio.get_running_loop().time()
        if spec.scored:
            reward = await self.shared.rewards.score(trajectory, work_until_s=who.work_until_s)
        elif self.rewards:
            reward = finite(sum(self.rewards))
        else:
            reward = failure("scorer", "not_finite", "the environment gave no reward and the task names no scorer")
        self.timings["score"] = asyncio.get_running_loop().time() - started
        if isinstance(reward, Failure):
            return replace(trajectory, status="failed", finish_cause=reward.kind, failure=reward)
        self._record("scored", seconds=round(self.timings["score"], 6), reward=reward)
        if who.stop is not None:
            return replace(trajectory, status="aborted", finish_cause=who.stop)
        return replace(trajectory, reward=reward)

    def _trajectory(self, end: _End, segments: tuple[Segment, ...]) -> Trajectory:
        who = self.who
        traj, attempt = who.key
        return Trajectory(
            id=traj, attempt=attempt, group_id=who.instance.group_id, instance=who.instance, member=who.member,
            segments=segments, status=end.status, finish_cause=end.cause, failure=end.failure,
            turns=self.turns, bad_actions=self.bad_actions, evidence=tuple(self.evidence), metrics=self.metrics,
            timings=self.timings,
        )  # fmt: skip

    # --- shared by all calls -----------------------------------------------------------------------------------------

    def _deadline(self, limit_s: float) -> float:
        return call_deadline(asyncio.get_running_loop().time(), limit_s, self.who.work_until_s)

    async def _bounded(self, call: Awaitable[T | Failure], what: str, deadline_s: float, timing: str) -> T | Failure:
        """Await a call to an environment host; a host that answers nothing at all has lost the session."""
        started = asyncio.get_running_loop().time()
        try:
            return await self.shared.waits.on(call, what=what, deadline_s=deadline_s + self.shared.waits.grace_s)
        except WaitExpired as expired:
            return failure("env", "lost", f"the host does not answer: {expired}")
        finally:
            self.timings[timing] += asyncio.get_running_loop().time() - started

    def _record(self, kind: str, **fields: object) -> None:
        self.shared.record(kind, traj=self.who.key[0], attempt=self.who.attempt, **fields)
