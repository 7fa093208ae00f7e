"""Opens groups while the staleness window has room, and sees every member to its end.

Consumes: room in the window, the mix, instances. Gives: complete groups to the buffer. Invariant: each sampled token of
each attempt is handed on in the ledger exactly once when the attempt ends; a failed attempt is retried, given up, or takes
its group with it, as `sched.failure` decides, and never touches another group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rollart.control.buffer import Buffer, Group
from rollart.control.fleet import Spawn
from rollart.control.instances import Cursor
from rollart.control.rollout import Attempt, Rollout
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import InvariantBroken, RunFailed, describe
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.seeds import seed_of
from rollart.core.types import DROP_REASONS, DropReason, Sampling, Trajectory, Version
from rollart.sched import failure as failures
from rollart.sched.mixing import Mix
from rollart.sched.redundancy import group_verdict
from rollart.sched.timeouts import work_deadline
from rollart.sched.variance import Filter

OPENINGS_PER_TURN = 8
"""Groups opened before the loop's other coroutines get a turn: opening thousands at once must not hold the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    group_size: int
    redundancy: int
    min_group_size: int
    trajectory_s: float
    room_wait_s: float
    """The longest that the window may stay full: a batch, its training and its publish."""
    policy: failures.Policy
    give_up_after: int
    give_up_s: float
    seed: int


class Groups:
    def __init__(
        self, record: Recorder, waits: Waits, ledger: Ledger, buffer: Buffer, rollout: Rollout, mix: Mix, *,
        rules: GroupRules, sampling: Mapping[str, Sampling], spawn: Spawn,
        keep: Callable[[Trajectory], None], newest_served: Callable[[], Version],
        held_up: Callable[[], bool],
        variance: Filter | None = None,
    ) -> None:  # fmt: skip
        self._record = record
        self._waits = waits
        self._ledger = ledger
        self._buffer = buffer
        self._rollout = rollout
        self._mix = mix
        self._rules = rules
        self._sampling = sampling
        self._patience = {
            name: failures.Patience(rules.give_up_after, rules.give_up_s) for name in rollout.tasks
        }  # fmt: skip
        self._spawn = spawn
        self._keep = keep
        self._newest_served = newest_served
        self._held_up = held_up
        self._variance = variance
        """Set: groups whose rewards are equal are dropped, within its bounds."""
        self.cursors = {name: Cursor(spec, rules.seed) for name, spec in rollout.tasks.items()}

    async def produce(self) -> None:
        """Open groups until the last batch is released."""
        buffer, opened = self._buffer, 0
        while buffer.wanted:
            room = buffer.room
            # what no engine serves yet cannot be sampled under: opened now, it would only use up its members' deadlines
            if room and self._newest_served() >= buffer.first_version:
                task = self._mix.next(buffer.counts)
                if self._patience[task].outage:  # a group opened now most likely fails too: one at a time, to see
                    await asyncio.sleep(failures.OUTAGE_PAUSE_S)
                    if not (buffer.wanted and buffer.room):
                        continue
                self._open(task, buffer.room)
                opened += 1
                if opened % OPENINGS_PER_TURN == 0:
                    await asyncio.sleep(0)
                continue
            deadline = asyncio.get_running_loop().time() + self._rules.room_wait_s
            try:
                what = "an engine to apply the next version" if room else "room in the staleness window"
                await self._waits.on(buffer.changed.wait(), what=what, deadline_s=deadline)
            except WaitExpired as expired:
                if self._held_up():  # whoever holds it up has deadlines of their own
                    continue
                raise RunFailed(f"no group was trained or given up: {expired}", buffer.last_failure) from expired

    def _open(self, task: str, room: int) -> None:
        members = self._rules.group_size + self._rules.redundancy
        group = self._buffer.open(self.cursors[task].next(), members=members, room=room)
        self.issue(group, dict.fromkeys(range(members), 0))

    def issue(self, group: Group, attempts: Mapping[int, int]) -> None:
        """Let members begin, each with its attempt of that number."""
        now = asyncio.get_running_loop().time()
        for member, attempt in attempts.items():
            group.running[member] = self._attempt(group, member, attempt, now)
        for member in attempts:
            self._spawn(self._member(group, member))

    def _attempt(self, group: Group, member: int, attempt: int, started_s: float) -> Attempt:
        instance = group.instance
        base = self._sampling[instance.task]
        seed = seed_of(self._rules.seed, "sample", instance.task, instance.epoch, instance.index, member, attempt)
        return Attempt(
            instance=instance, member=member, attempt=attempt, sampling=replace(base, seed=seed),
            min_version=group.min_version,
            work_until_s=work_deadline(started_s, self._rules.trajectory_s),
            close_until_s=started_s + self._rules.trajectory_s,
        )  # fmt: skip

    async def _member(self, group: Group, member: int) -> None:
        """One member, through all its attempts, to the end."""
        started_s = asyncio.get_running_loop().time()
        attempt, tries = group.running[member].attempt, 0
        while True:
            trajectory = await self._rollout.attempt(group.running[member])
            self._keep(trajectory)
            after_s = self._ended(group, member, trajectory, tries)
            if after_s is None:
                return
            await asyncio.sleep(after_s)
            if group.life.state != "open":
                group.running.pop(member, None)
                return
            attempt += 1
            tries += not self._patience[group.instance.task].outage
            group.running[member] = self._attempt(group, member, attempt, started_s)

    def _ended(self, group: Group, member: int, trajectory: Trajectory, tries: int) -> float | None:
        """Account for an ended attempt, after `tries` that count; seconds until its retry, or None when the member is
        through."""
        tokens = trajectory.n_sampled
        is_open = group.life.state == "open"
        if trajectory.status == "done":
            self._patience[group.instance.task].done()
            attempt = group.running.pop(member)
            if not is_open:  # scored, and its environment still closing, when its group was completed or given up
                self._ledger.drop("in_flight", attempt.stop or "redundant", tokens)
                return None
            self._ledger.move("in_flight", "buffered", tokens)
            group.add(trajectory)
            self._settle(group)
            return None
        if trajectory.failure is None:
            self._ledger.drop("in_flight", _aborted_as(trajectory), tokens)
            del group.running[member]
            return None
        self._ledger.drop("in_flight", failures.drop_reason(trajectory.failure), tokens)
        if not is_open:
            del group.running[member]
            return None
        return self._failed(group, member, trajectory, tries)

    def _failed(self, group: Group, member: int, trajectory: Trajectory, tries: int) -> float | None:
        why = trajectory.failure
        assert why is not None
        self._buffer.last_failure = why
        now = asyncio.get_running_loop().time()
        patience = self._patience[group.instance.task]
        over = patience.failed(now, retryable=why.retryable)
        decision = failures.decide(
            why, attempt=tries, policy=self._rules.policy,
            left_s=group.running[member].work_until_s - now, outage=patience.outage,
        )  # fmt: skip
        self._record(
            "failure_decided", traj=trajectory.id, attempt=trajectory.attempt, task=group.instance.task,
            failure=describe(why), decision=type(decision).__name__,
        )  # fmt: skip
        if over or isinstance(decision, failures.EndRun):
            lasted = f"{patience.in_a_row} of its task in a row failed, for {now - patience.since_s:.0f} s"
            rule = lasted if over else "failure.on_failure says so"
            raise RunFailed(
                f"the run ends with {trajectory.id}, attempt {trajectory.attempt}: {rule} (failure.give_up_after="
                f"{self._rules.give_up_after}, failure.give_up_s={self._rules.give_up_s:g})",
                why,
            )
        if isinstance(decision, failures.Retry):
            return decision.after_s
        del group.running[member]
        group.given_up += 1
        if isinstance(decision, failures.ReplaceGroup):
            self._buffer.drop(group, failures.drop_reason(why))
        else:
            self._settle(group, failures.drop_reason(why))
        return None

    def _settle(self, group: Group, reason: DropReason = "env_failed") -> None:
        """Is the group complete, or past help?"""
        verdict = group_verdict(
            done=len(group.done), live=len(group.running), group_size=self._rules.group_size,
            given_up=group.given_up, min_group_size=self._rules.min_group_size,
        )  # fmt: skip
        if verdict == "complete":
            self._complete(group)
        elif verdict == "hopeless":
            self._buffer.drop(group, reason)

    def _complete(self, group: Group) -> None:
        """To the buffer, unless it teaches nothing and another one may take its place."""
        buffer, variance, task = self._buffer, self._variance, group.instance.task
        if variance is not None:
            rewards = [trajectory.reward for trajectory in group.done if trajectory.reward is not None]
            found = variance.choose(task, rewards, batch=buffer.released, waited_s=buffer.starved_s)
            if found == "drop":
                buffer.drop(group, "zero_variance")
                return
            if found == "spent" and variance.first_time(task):
                text = (
                    f"{task}: after {variance.dropped.get(task, 0)} groups with equal rewards for one batch (algorithm.refills "
                    f"allows {variance.allowed[task]}), and {buffer.starved_s:.0f} s of waiting for it, batches go on with "
                    "groups that teach nothing; the task is solved or out of reach: change its instances or its ratio, or "
                    "use algorithm.zero_variance=train"
                )
                self._record("advisory", code="zero_variance", text=text, task=task)
        buffer.complete(group)


def _aborted_as(trajectory: Trajectory) -> DropReason:
    if trajectory.finish_cause not in DROP_REASONS:
        raise InvariantBroken(f"{trajectory.id} was aborted as {trajectory.finish_cause!r}, which is no drop reason")
    return trajectory.finish_cause
