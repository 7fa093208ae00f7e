"""Admission, mixing, release and early abort together, under random finishing orders and failures.

The bound holds because release checks it; the same pipeline with admission alone breaks it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.seeds import rng
from rollart.sched.mixing import Mix
from rollart.sched.redundancy import Unfinished, losers
from rollart.sched.staleness import Ready, Window, hopeless, oldest_allowed, release, staleness

UNBOUNDED = 10**6


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """Groups as numbers of admission. One trainer; engines that may serve an older version for a while."""

    shares: dict[str, float]
    groups_per_batch: int
    max_staleness: int
    batches: int
    redundant_groups: int = 0
    release_checks: bool = True
    version: int = 0
    """Of the trainer, when it trains the next batch."""
    served: int = 0
    opened: int = 0
    released: int = 0
    in_training: list[str] = field(default_factory=list)
    open: dict[str, Ready] = field(default_factory=dict)
    buffered: dict[str, Ready] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    staleness: list[int] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """Times that each group was trained or dropped."""
    window: Window = field(init=False)
    mix: Mix = field(init=False)

    def __post_init__(self) -> None:
        self.mix = Mix(self.shares, self.groups_per_batch)
        self.window = Window(
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.max_staleness,
            redundant_groups=self.redundant_groups,
        )

    @property
    def bound(self) -> int:
        return self.max_staleness if self.release_checks else UNBOUNDED

    def admit(self) -> None:
        while self.window.room(batches_left=self.batches - self.released + bool(self.in_training)):
            task = self.mix.next(self.counts)
            self.open[f"g{self.opened}"] = Ready(group=f"g{self.opened}", task=task, order=self.opened, oldest=None)
            self.opened += 1
            self.counts[task] += 1
            self.window.opened()

    def sample(self, name: str) -> None:
        """Its first token, under what the engine serves, unless that could not be trained any more."""
        if self.open[name].oldest is None and self.served >= oldest_allowed(self.version, self.bound):
            self.open[name] = replace(self.open[name], oldest=self.served)

    def finish(self, name: str) -> None:
        self.buffered[name] = self.open.pop(name)
        self.window.completed()

    def drop(self, name: str) -> None:
        state = "open" if name in self.open else "buffered"
        group = (self.open if state == "open" else self.buffered).pop(name)
        self.window.dropped(state)
        self.counts[group.task] -= 1
        self.ended[name] += 1

    def train(self) -> None:
        if self.in_training or self.released == self.batches:
            return
        quota = self.mix.quota(self.released)
        made = release(list(self.buffered.values()), version=self.version, max_staleness=self.bound, quota=quota)
        for name in made.stale:
            self.drop(name)
        if not made.groups:
            return
        batch = [self.buffered.pop(name) for name in made.groups]
        assert Counter(group.task for group in batch) == +Counter(quota)
        self.staleness += [staleness(self.version, group.oldest) for group in batch if group.oldest is not None]
        self.trained.update(group.task for group in batch)
        self.ended.update(made.groups)
        self.in_training = list(made.groups)
        self.window.released(len(batch))
        self.released += 1
        self.prune()

    def prune(self) -> None:
        for group in [*self.open.values(), *self.buffered.values()]:
            if hopeless(group.oldest, self.version + 1, self.bound):
                self.drop(group.group)
        if not self.redundant_groups:
            return
        coming = range(self.released, self.released + min(self.max_staleness, self.batches - self.released))
        wanted = sum((Counter(self.mix.quota(one)) for one in coming), Counter[str]())
        unfinished, finished = (
            [Unfinished(group=g.group, task=g.task, order=g.order) for g in groups.values()]
            for groups in (self.open, self.buffered)
        )
        for name in losers(unfinished, finished, wanted=wanted):
            self.drop(name)

    def publish(self) -> None:
        if self.in_training:
            self.window.published(len(self.in_training))
            self.in_training = []
            self.version += 1

    def check(self) -> None:
        held = len(self.open) + len(self.buffered) + len(self.in_training)
        assert self.window.outstanding == held <= self.window.capacity + self.redundant_groups
        assert max(self.staleness, default=0) <= self.bound
        assert all(times == 1 for times in self.ended.values())

    def run(self, random: Random, *, slow: str = "", failing: float = 0.1) -> None:
        """To the last batch, in a random order of everything; `slow` is a task whose groups finish rarely."""
        for _ in range(100 * self.batches * self.groups_per_batch):
            self.admit()
            self.check()
            self.random_move(random, slow, failing)
            if self.released == self.batches and not self.in_training:
                return
        raise AssertionError(f"stuck before batch {self.released}: {self.mix.quota(self.released)}, {self.buffered}")

    def random_move(self, random: Random, slow: str, failing: float) -> None:
        move = random.random()
        if move < 0.1:
            self.train()
        elif move < 0.2:
            self.publish()
        elif move < 0.3:
            self.served = random.randint(self.served, self.version)
        elif self.open:
            group = random.choice(list(self.open.values()))
            if random.random() < failing:
                self.drop(group.group)
            elif group.oldest is None:
                self.sample(group.group)
            elif group.task != slow or random.random() < 0.1:
                self.finish(group.group)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    ratios=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    groups_per_batch=st.integers(1, 7),
    max_staleness=st.integers(0, 3),
    redundant_groups=st.integers(0, 3),
    slow_first=st.booleans(),
)
def test_nothing_is_trained_beyond_the_bound_and_every_batch_comes(
    seed: int, ratios: list[int], groups_per_batch: int, max_staleness: int, redundant_groups: int, slow_first: bool
) -> None:
    shares = {f"task-{i}": float(ratio) for i, ratio in enumerate(ratios)}
    pipeline = Pipeline(
        shares=shares, groups_per_batch=groups_per_batch, max_staleness=max_staleness, batches=6,
        redundant_groups=redundant_groups,
    )  # fmt: skip
    pipeline.run(Random(seed), slow="task-0" if slow_first else "")
    assert sum(pipeline.trained.values()) == 6 * groups_per_batch
    assert max(pipeline.staleness) <= max_staleness
    for task, share in shares.items():
        wanted = share / sum(shares.values()) * 6 * groups_per_batch
        assert abs(pipeline.trained[task] - wanted) <= max(1, len(shares) - 1) + 1e-9


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_bound_is_used_and_admission_alone_does_not_keep_it(max_staleness: int) -> None:
    """With release's check the oldest that is trained is exactly at the bound; without it, far beyond."""

    def trained(release_checks: bool) -> int:
        pipeline = Pipeline(
            shares={"a": 1.0},
            groups_per_batch=4,
            max_staleness=max_staleness,
            batches=40,
            release_checks=release_checks,
        )
        pipeline.run(rng(0, "finishing order", max_staleness), failing=0.0)
        return max(pipeline.staleness)

    assert trained(release_checks=True) == max_staleness
    assert trained(release_checks=False) > max_staleness


def test_one_slow_group_grows_old_without_limit_when_release_does_not_check() -> None:
    pipeline = Pipeline(shares={"a": 1.0}, groups_per_batch=2, max_staleness=1, batches=20, release_checks=False)
    pipeline.admit()
    pipeline.sample("g0")
    while pipeline.released < 11:
        pipeline.admit()
        for name in list(pipeline.open):
            if name != "g0":
                pipeline.sample(name)
                pipeline.finish(name)
        pipeline.train()
        pipeline.publish()
        pipeline.served = pipeline.version
    pipeline.finish("g0")
    pipeline.train()
    assert max(pipeline.staleness) == 11, "the window was never over-full, and yet"
    pipeline.check()


def test_with_bound_zero_everything_trained_was_sampled_by_the_trainers_version() -> None:
    """Field case 21: whatever the schedule of a pipeline."""
    pipeline = Pipeline(
        shares={"a": 1.0, "b": 2.0}, groups_per_batch=3, max_staleness=0, batches=20, redundant_groups=1
    )
    pipeline.run(rng(0, "synchronous"))
    assert set(pipeline.staleness) == {0}
