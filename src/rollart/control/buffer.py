"""Groups from their opening to their training: the buffer, admission's count of it, and release.

Invariant: a group is trained or dropped exactly once, and its tokens move through the ledger with it. The buffer knows
nothing of how groups are made or trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollart.control.fleet import Key
from rollart.control.rollout import Attempt
from rollart.control.signal import Signal
from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import RunFailed
from rollart.core.events import Recorder
from rollart.core.ledger import Ledger
from rollart.core.lifecycle import GROUP, Lifecycle
from rollart.core.snapshot import GroupState
from rollart.core.types import DropReason, Failure, TaskInstance, Trajectory, Version
from rollart.sched.mixing import Mix
from rollart.sched.redundancy import Unfinished, losers
from rollart.sched.staleness import Lineage, Ready, Window, hopeless, oldest_allowed, release


@dataclass(slots=True, kw_only=True)
class Group:
    """Sibling attempts at one instance."""

    instance: TaskInstance
    order: int
    """Counter of admission."""
    life: Lifecycle
    min_version: Version = 0
    """Its tokens are sampled under this version or a newer one, so that it can wait for its turn to be released."""
    done: list[Trajectory] = field(default_factory=list)
    running: dict[int, Attempt] = field(default_factory=dict)
    """Member -> its present attempt (also while it waits to be retried)."""
    given_up: int = 0
    oldest: Version | None = None
    """Of the oldest token of members that are done."""
    n_sampled: int = 0
    """Tokens of members that are done."""
    versions: list[tuple[Version, Version]] = field(default_factory=list)
    """Oldest and newest version of each member that is done and has sampled."""

    @property
    def id(self) -> str:
        return self.instance.group_id

    def add(self, trajectory: Trajectory) -> None:
        """A member is done."""
        self.done.append(trajectory)
        spans = trajectory.spans
        if spans:
            # versions never fall inside a trajectory
            self.versions.append((spans[0].version, spans[-1].version))
            self.n_sampled += sum(span.n_tokens for span in spans)
            self.oldest = _older(self.oldest, spans[0].version)

    @property
    def state(self) -> GroupState:
        """What a checkpoint keeps of it. Members that are not done are to be issued again."""
        complete = self.life.state == "buffered"
        again = {} if complete else {member: attempt.attempt + 1 for member, attempt in self.running.items()}
        return GroupState(
            instance=self.instance, order=self.order, min_version=self.min_version, done=tuple(self.done),
            attempts=again, given_up=self.given_up, complete=complete,
        )  # fmt: skip


def _older(one: Version | None, other: Version | None) -> Version | None:
    return other if one is None else one if other is None else min(one, other)


def _oldest_of(group: Group, live: Mapping[Key, Version]) -> Version | None:
    """Of all tokens that the group has now: of members that are done, of running ones delivered or still live."""
    oldest = group.oldest
    for attempt in group.running.values():
        if attempt.ended:  # failed, and waiting to be tried again: its tokens are dropped already
            continue
        oldest = _older(oldest, _older(attempt.oldest, live.get(attempt.key)))
    return oldest


@dataclass(frozen=True, slots=True)
class Batch:
    step: int
    version: Version
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.done]

    @property
    def n_sampled(self) -> int:
        return sum(group.n_sampled for group in self.groups)


class Buffer:
    """All groups that are not yet trained or dropped."""

    def __init__(
        self, record: Recorder, waits: Waits, ledger: Ledger, window: Window, *,
        stop: Callable[[Mapping[Key, Attempt], DropReason], None],
        live_versions: Callable[[], Mapping[Key, Version]],
        mix: Mix,
        batches: int,
        mix_window: int,
    ) -> None:  # fmt: skip
        self._record = record
        self._waits = waits
        self._ledger = ledger
        self._stop = stop
        self._live_versions = live_versions
        self.window = window
        self._mix = mix
        self._batches = batches
        self.groups: dict[str, Group] = {}
        self._ready: dict[str, Ready] = {}
        """Complete groups that wait for release, as release sees them."""
        self.counts: dict[str, int] = {}
        """Groups per task that were trained or still may be: what mixing looks at."""
        self.lineage = Lineage()
        self.next_release = 0
        """Batches behind the trainer's weights when it can next train something."""
        self.released = 0
        """Batches released so far."""
        self.changed = Signal()
        self.last_failure: Failure | None = None
        self._taking_since: float | None = None
        """Set while the trainer waits for a batch."""
        self.opened = 0
        """Groups opened so far."""
        self._completed = 0
        """Groups completed so far."""
        self.recent: deque[Counter[str]] = deque(maxlen=mix_window)
        """Trajectories per task of the last batches."""

    @property
    def min_version(self) -> Version:
        """Tokens sampled under an older version could not be released any more."""
        return self._oldest_at(self.next_release)

    @property
    def first_version(self) -> Version:
        """The oldest version that the next group may begin with: all groups there are released before it, oldest first.

        Engines still serve an older version for a while after room has come with a new one. What begins with that is due a
        release early, together with a whole batch that is due then by right, and one of the two is thrown away.
        """
        ahead = self.window.open + self.window.buffered
        batches = min(ahead // self.window.groups_per_batch, self.window.oldest_trained)
        return self._oldest_at(self.next_release + batches)

    def _oldest_at(self, batches: int) -> Version:
        """The oldest version that may still be trained by weights with as many batches behind them."""
        return self.lineage.first(max(0, oldest_allowed(batches, self.window.oldest_trained)))

    def oldest_unmasked(self, version: Version, mask_older_than: int) -> Version:
        """The oldest version whose tokens enter the loss at `version` (`algorithm.mask_older_than`, -1: no mask)."""
        if mask_older_than < 0:
            return 0
        return self.lineage.first(max(0, oldest_allowed(self.lineage.batches(version), mask_older_than)))

    @property
    def starved_s(self) -> float:
        """How long the trainer has waited for its batch."""
        since = self._taking_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def _age(self, version: Version | None) -> int | None:
        return None if version is None else self.lineage.batches(version)

    # --- a group's life ----------------------------------------------------------------------------------------------

    def open(self, instance: TaskInstance, *, members: int, room: int) -> Group:
        life = Lifecycle(GROUP, instance.group_id, "open")
        group = Group(instance=instance, order=self.opened, life=life, min_version=self.first_version)
        self.opened += 1
        self.groups[group.id] = group
        self.counts[instance.task] = self.counts.get(instance.task, 0) + 1
        self.window.opened()
        self._record("group_opened", group=group.id, task=instance.task, members=members, room=room)
        return group

    def restore(self, state: GroupState) -> Group:
        """A group of an earlier incarnation, as it was. Its opening is in the log already."""
        life = Lifecycle(GROUP, state.instance.group_id, "open")
        group = Group(
            instance=state.instance, order=state.order, life=life, min_version=state.min_version,
            given_up=state.given_up,
        )  # fmt: skip
        for trajectory in state.done:
            group.add(trajectory)
        self.groups[group.id] = group
        self.window.opened()
        if state.complete:
            self._buffered(group)
        return group

    def _buffered(self, group: Group) -> None:
        group.life.to("buffered")
        self._completed += 1
        if self.window.bounded:
            order, oldest = group.order, self._age(group.oldest)
        else:  # batches take whatever finished first
            order, oldest = self._completed, None
        self._ready[group.id] = Ready(group=group.id, task=group.instance.task, order=order, oldest=oldest)
        self.window.completed()

    def complete(self, group: Group) -> None:
        """`group_size` members are scored: the group may be released, and members still running have lost."""
        self._buffered(group)
        self._stop_members(group, "redundant")
        rewards = [trajectory.reward for trajectory in group.done if trajectory.reward is not None]
        self._record(
            "group_completed", group=group.id, task=group.instance.task, members=len(group.done),
            reward_mean=sum(rewards) / len(rewards), rewards=rewards, oldest_version=group.oldest,
        )  # fmt: skip
        self.changed.notify()

    def drop(self, group: Group, reason: DropReason) -> None:
        """Give a group up: running members are stopped, finished ones leave the ledger as `reason`."""
        state = group.life.state
        group.life.to("dropped")
        self._ready.pop(group.id, None)
        self._stop_members(group, reason)
        self._ledger.drop("buffered", reason, group.n_sampled)
        self.window.dropped(state)
        self.counts[group.instance.task] -= 1
        del self.groups[group.id]
        self._record("group_dropped", group=group.id, task=group.instance.task, reason=reason, tokens=group.n_sampled)
        self.changed.notify()

    def _stop_members(self, group: Group, reason: DropReason) -> None:
        if group.running:
            self._stop({attempt.key: attempt for attempt in group.running.values()}, reason)

    # --- release -------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Batches that are still to be released."""
        return self._batches - self.released

    @property
    def room(self) -> int:
        """How many groups may open now."""
        # a batch that is released and not yet published still fills the window
        in_training = -(-self.window.training // self.window.groups_per_batch)
        return self.window.room(batches_left=self.wanted + in_training)

    async def take(
        self, step: int, version: Version, *, deadline_s: float, unless: Callable[[], bool] = lambda: False,
        trouble: Callable[[], str] = lambda: "",
    ) -> Batch | None:  # fmt: skip
        """The batch of `step`, to be trained at `version`; waits until every task's quota is there.

        None: `unless` has come true meanwhile (notify `changed`). Raises RunFailed when the batch does not come by the
        absolute deadline, with what `trouble` says of why that may be.
        """
        started, quota = asyncio.get_running_loop().time(), self._mix.quota(step)
        self._taking_since = started
        while True:
            if unless():
                return None
            at = self.lineage.batches(version)
            decision = release(
                tuple(self._ready.values()), version=at, max_staleness=self.window.oldest_trained, quota=quota
            )
            for name in decision.stale:
                self.drop(self.groups[name], "stale")
            if decision.groups:
                waited_s = asyncio.get_running_loop().time() - started
                return self._release(step, version, decision.groups, quota, waited_s)
            missing = ", ".join(f"{n} of {task}" for task, n in sorted(decision.missing.items()))
            try:
                await self._waits.on(self.changed.wait(), what="groups to be trained", deadline_s=deadline_s)
            except WaitExpired as expired:
                said = f"; {found}" if (found := trouble()) else ""
                raise RunFailed(
                    f"step {step} had no batch after {asyncio.get_running_loop().time() - started:.1f} s "
                    f"(deadlines.batch_s): missing groups: {missing}; open groups: {self.window.open}; "
                    f"waiting: {dict(self._waits.now())}{said}",
                    self.last_failure,
                ) from expired

    def _release(
        self, step: int, version: Version, names: tuple[str, ...], quota: Mapping[str, int], waited_s: float
    ) -> Batch:
        batch = Batch(step, version, tuple(self.groups[name] for name in names))
        self._taking_since = None
        for group in batch.groups:
            group.life.to("training")
            del self._ready[group.id]
        self.window.released(len(batch.groups))
        at = self.lineage.batches(version)
        self.next_release = at + 1
        self.released += 1
        self.recent.append(Counter(trajectory.instance.task for trajectory in batch.trajectories))
        mixed = sum(self.recent, Counter())
        lags = [at - self.lineage.batches(oldest) for group in batch.groups for oldest, _ in group.versions]
        newest = [at - self.lineage.batches(newest) for group in batch.groups for _, newest in group.versions]
        self._record(
            "batch_released", step=step, version=version, groups=list(names), trajectories=len(batch.trajectories),
            tokens=batch.n_sampled, staleness_mean=sum(lags) / max(1, len(lags)),
            staleness_max=max(lags, default=0), newest_lag_mean=sum(newest) / max(1, len(newest)),
            waited_s=round(waited_s, 6), quota=dict(quota),
            mix={task: round(n / mixed.total(), 6) for task, n in sorted(mixed.items())},
        )  # fmt: skip
        self._prune(step)
        return batch

    def _prune(self, step: int) -> None:
        """After a release: abort what can no longer be trained, drop what redundant groups over-produced."""
        live = self._live_versions()
        for group in [g for g in self.groups.values() if g.life.state in ("open", "buffered")]:
            if hopeless(self._age(_oldest_of(group, live)), self.next_release, self.window.oldest_trained):
                self.drop(group, "stale")
        if self.window.redundant_groups:
            coming = range(step + 1, step + 1 + min(self.window.max_staleness, self.wanted))
            wanted = sum((Counter(self._mix.quota(one)) for one in coming), Counter())
            view = {
                state: [
                    Unfinished(group=g.id, task=g.instance.task, order=g.order)
                    for g in self.groups.values()
                    if g.life.state == state
                ]
                for state in ("open", "buffered")
            }
            for name in losers(view["open"], view["buffered"], wanted=wanted):
                self.drop(self.groups[name], "redundant")

    def trained(self, batch: Batch, *, masked: int = 0) -> None:
        """The version that holds this batch is published: its samples need not be kept any more. `masked`: tokens of it that a
        correction took out of the loss."""
        for group in batch.groups:
            group.life.to("trained")
            del self.groups[group.id]
        self._ledger.drop("buffered", "masked", masked)
        self._ledger.move("buffered", "trained", batch.n_sampled - masked)
        self.window.published(len(batch.groups))
        self.changed.notify()
