"""Admission, release and early abort: each rule on its own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.sched.staleness import Ready, Window, hopeless, oldest_allowed, release, staleness

TASKS = ("a", "b", "c")
VERSION = 6

readies = st.lists(
    st.tuples(st.sampled_from(TASKS), st.one_of(st.none(), st.integers(0, VERSION))), max_size=20
).flatmap(
    lambda many: st.permutations(range(len(many))).map(
        lambda orders: [
            Ready(group=f"g{order}", task=task, order=order, oldest=oldest)
            for order, (task, oldest) in zip(orders, many, strict=True)
        ]
    )
)
quotas = st.dictionaries(st.sampled_from(TASKS), st.integers(0, 4), max_size=3).filter(lambda q: sum(q.values()) > 0)


def a_ready(group: str, *, task: str = "a", oldest: int | None = 0, order: int = 0) -> Ready:
    return Ready(group=group, task=task, order=order, oldest=oldest)


# --- staleness and early abort ---------------------------------------------------------------------------------------


@given(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 30)), st.integers(0, 5))
def test_hopeless_is_what_could_not_be_released_even_at_once(version: int, oldest: int | None, bound: int) -> None:
    at_once = release([a_ready("g", oldest=oldest)], version=version, max_staleness=bound, quota={"a": 1})
    assert (at_once.groups == ("g",)) is not hopeless(oldest, version, bound)
    assert (at_once.stale == ("g",)) is hopeless(oldest, version, bound)


@given(st.integers(0, 30), st.integers(0, 5))
def test_the_oldest_version_still_allowed_is_the_last_that_is_not_hopeless(version: int, bound: int) -> None:
    limit = oldest_allowed(version, bound)
    assert not hopeless(limit, version, bound)
    assert hopeless(limit - 1, version, bound)
    assert staleness(version, limit) == bound


def test_what_sampled_nothing_is_never_too_old() -> None:
    assert not hopeless(None, 100, 0)


# --- release ---------------------------------------------------------------------------------------------------------


@given(readies, st.integers(0, 3), quotas)
def test_release_gives_exactly_the_quota_oldest_first_and_never_beyond_the_bound(
    ready: list[Ready], bound: int, quota: dict[str, int]
) -> None:
    made = release(ready, version=VERSION, max_staleness=bound, quota=quota)
    known = {r.group: r for r in ready}

    def age(name: str) -> tuple[int, int]:
        oldest = known[name].oldest
        return (VERSION if oldest is None else oldest, known[name].order)

    assert set(made.stale) == {r.group for r in ready if r.oldest is not None and VERSION - r.oldest > bound}
    fresh = [r for r in ready if r.group not in made.stale]
    have = Counter(r.task for r in fresh)
    assert made.missing == {task: n - have[task] for task, n in quota.items() if n > have[task]}
    if made.missing:
        assert made.groups == ()
        return
    assert Counter(known[name].task for name in made.groups) == Counter(quota)
    assert list(made.groups) == sorted(made.groups, key=age)
    assert not {*made.groups} & {*made.stale}
    for left in {r.group for r in fresh} - {*made.groups}:
        same_task = [name for name in made.groups if known[name].task == known[left].task]
        assert all(age(name) < age(left) for name in same_task), "an older group was passed over"


@given(readies, st.integers(0, 3), quotas, st.randoms(use_true_random=False))
def test_release_does_not_depend_on_what_finished_first(
    ready: list[Ready], bound: int, quota: dict[str, int], order: object
) -> None:
    shuffled = list(ready)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    one = release(ready, version=VERSION, max_staleness=bound, quota=quota)
    other = release(shuffled, version=VERSION, max_staleness=bound, quota=quota)
    assert (one.groups, set(one.stale), one.missing) == (other.groups, set(other.stale), other.missing)


def test_release_waits_for_a_slow_task() -> None:
    fast = [a_ready(f"fast-{i}", task="fast", order=i) for i in range(10)]
    slow = [a_ready(f"slow-{i}", task="slow", order=10 + i) for i in range(2)]
    quota = {"fast": 2, "slow": 2}
    assert release(fast, version=0, max_staleness=1, quota=quota).missing == {"slow": 2}
    one_short = release([*fast, slow[0]], version=0, max_staleness=1, quota=quota)
    assert (one_short.groups, one_short.missing) == ((), {"slow": 1})
    enough = release([*fast, *slow], version=0, max_staleness=1, quota=quota)
    assert enough.groups == ("fast-0", "fast-1", "slow-0", "slow-1")
    assert enough.missing == {}


def test_a_stale_group_fills_no_quota() -> None:
    made = release(
        [a_ready("old", oldest=0), a_ready("new", oldest=3, order=1)], version=3, max_staleness=2, quota={"a": 2}
    )
    assert (made.groups, made.stale, made.missing) == ((), ("old",), {"a": 1})


def test_the_older_group_goes_first_though_it_was_admitted_later() -> None:
    ready = [a_ready("empty", oldest=None, order=2), a_ready("first", oldest=2), a_ready("second", oldest=1, order=1)]
    made = release(ready, version=2, max_staleness=1, quota={"a": 3})
    assert made.groups == ("second", "first", "empty"), "what sampled nothing is as new as can be"
    assert release(ready, version=2, max_staleness=1, quota={"a": 1}).groups == ("second",)


# --- admission -------------------------------------------------------------------------------------------------------


@given(
    groups_per_batch=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    redundant=st.integers(0, 3),
    moves=st.lists(st.sampled_from(["open", "open", "complete", "release", "publish", "drop_open", "drop_buffered"])),
)
def test_the_window_is_never_over_full(
    groups_per_batch: int, max_staleness: int, redundant: int, moves: list[str]
) -> None:
    window = Window(groups_per_batch=groups_per_batch, max_staleness=max_staleness, redundant_groups=redundant)
    limit = (max_staleness + 1) * groups_per_batch
    for move in moves:
        if move == "open":
            room = window.room(batches_left=1000)
            assert room == limit + redundant - window.outstanding
            for _ in range(room):
                window.opened()
        elif move == "complete" and window.open:
            window.completed()
        elif move == "release" and window.buffered >= groups_per_batch and not window.training:
            window.released(groups_per_batch)
        elif move == "publish" and window.training:
            window.published(window.training)
        elif move == "drop_open" and window.open:
            window.dropped("open")
        elif move == "drop_buffered" and window.buffered:
            window.dropped("buffered")
        assert window.outstanding == window.open + window.buffered + window.training <= limit + redundant
        assert min(window.open, window.buffered, window.training) >= 0


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.integers(0, 6))
def test_no_more_groups_are_opened_than_the_batches_left_can_use(
    groups_per_batch: int, max_staleness: int, redundant: int, batches: int
) -> None:
    window = Window(groups_per_batch=groups_per_batch, max_staleness=max_staleness, redundant_groups=redundant)
    opened = 0
    for left in range(batches, 0, -1):
        for _ in range(window.room(batches_left=left)):
            window.opened()
            window.completed()
            opened += 1
        window.released(groups_per_batch)
        window.published(groups_per_batch)
    assert opened <= batches * groups_per_batch + redundant
    assert window.outstanding <= redundant


def test_room_is_never_negative() -> None:
    window = Window(groups_per_batch=2, max_staleness=1)
    for _ in range(4):
        window.opened()
    assert window.room(batches_left=5) == 0
    assert window.room(batches_left=1) == 0


def test_groups_cannot_leave_a_state_that_holds_fewer() -> None:
    window = Window(groups_per_batch=2, max_staleness=0)
    window.opened()
    window.completed()
    with pytest.raises(InvariantBroken, match="2 groups cannot leave buffered=1"):
        window.released(2)
    with pytest.raises(InvariantBroken, match="open=0"):
        window.completed()
    with pytest.raises(InvariantBroken, match="training=0"):
        window.published(1)
    with pytest.raises(InvariantBroken, match="open=0"):
        window.dropped("open")
    assert (window.open, window.buffered, window.training) == (0, 1, 0), "a refused move changes nothing"
