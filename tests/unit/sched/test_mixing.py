"""Every task keeps its share of what is trained, over any window of steps, whatever is dropped."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sched.mixing import KEPT_BATCHES, Mix, next_task

ROUNDING = 1e-9

shares_of = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5).map(
    lambda ratios: {f"task-{i}": ratio for i, ratio in enumerate(ratios)}
)


@given(shares_of, st.integers(1, 12))
def test_the_share_holds_over_any_window_of_steps(shares: dict[str, float], groups_per_batch: int) -> None:
    mix = Mix(shares, groups_per_batch)
    quotas = [mix.quota(batch) for batch in range(16)]
    assert all(sum(quota.values()) == groups_per_batch and min(quota.values()) >= 0 for quota in quotas)
    within = max(1, len(shares) - 1)
    for task, share in shares.items():
        trained = [0, *accumulate(quota[task] for quota in quotas)]
        for start, end in combinations(range(len(trained)), 2):
            wanted = share / sum(shares.values()) * (end - start) * groups_per_batch
            assert abs(trained[end] - trained[start] - wanted) <= within + ROUNDING


@given(shares_of, st.integers(1, 12))
def test_without_drops_the_groups_opened_are_the_quotas(shares: dict[str, float], groups_per_batch: int) -> None:
    mix, counts = Mix(shares, groups_per_batch), Counter[str]()
    for batch in range(8):
        opened = Counter[str]()
        for _ in range(groups_per_batch):
            opened[mix.next(counts + opened)] += 1
        assert opened == +Counter(mix.quota(batch))
        counts += opened


@given(shares_of, st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6))
def test_a_full_window_holds_the_quotas_of_the_coming_batches_whatever_was_dropped(
    shares: dict[str, float], groups_per_batch: int, batches_open: int, seed: int
) -> None:
    """Else a batch would wait for a task for which no group may open."""
    mix, random = Mix(shares, groups_per_batch), Random(seed)
    trained, outstanding = Counter[str](), Counter[str]()
    for batch in range(8):
        for _ in range(random.randrange(4)):
            while outstanding.total() < batches_open * groups_per_batch:
                outstanding[mix.next(trained + outstanding)] += 1
            for task in random.sample(sorted(outstanding.elements()), random.randint(0, outstanding.total())):
                outstanding[task] -= 1
        while outstanding.total() < batches_open * groups_per_batch:
            outstanding[mix.next(trained + outstanding)] += 1
        coming = sum((Counter(mix.quota(batch + i)) for i in range(batches_open)), Counter[str]())
        assert +outstanding == +coming
        trained.update(mix.quota(batch))
        outstanding.subtract(mix.quota(batch))


def test_a_dropped_group_of_a_rare_task_is_made_up_for_before_the_window_is_full_again() -> None:
    """Two common tasks are further behind their share than the rare one just then; its batch waits for it all the same."""
    mix = Mix({"rare": 0.1, "b": 0.45, "c": 0.45}, 6)
    assert mix.quota(0) == {"rare": 1, "b": 3, "c": 2}
    assert mix.next({"rare": 0, "b": 3, "c": 2}) == "rare"


def test_quotas_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    shares = {"a": 3.0, "b": 2.0, "c": 0.5}
    forward, backward = Mix(shares, 5), Mix(shares, 5)
    assert [forward.quota(i) for i in range(20)] == [backward.quota(i) for i in reversed(range(20))][::-1]


def test_shares_are_ratios() -> None:
    one, other = Mix({"a": 0.25, "b": 0.75}, 4), Mix({"a": 2.0, "b": 6.0}, 4)
    assert [one.quota(i) for i in range(10)] == [other.quota(i) for i in range(10)]
    assert one.quota(0) == {"a": 1, "b": 3}


def test_a_task_too_rare_for_every_batch_comes_in_its_turn() -> None:
    mix = Mix({"often": 9.0, "rare": 1.0}, 2)
    quotas = [mix.quota(i)["rare"] for i in range(20)]
    assert sum(quotas) == 4
    assert max(quotas) == 1


@pytest.mark.parametrize(
    ("counts", "expected"), [({}, "a"), ({"a": 1}, "b"), ({"a": 1, "b": 1}, "a"), ({"a": 5, "b": 0}, "b")]
)
def test_the_task_furthest_behind_is_next_and_ties_go_to_the_first_named(counts: dict[str, int], expected: str) -> None:
    assert next_task({"a": 1.0, "b": 1.0}, counts) == expected


def test_behind_is_meant_with_the_next_group_counted_in() -> None:
    assert next_task({"a": 3.0, "b": 1.0}, {"a": 1}) == "a", "of two groups, 1.5 are a's and 0.5 are b's: a tie"
    assert next_task({"a": 3.0, "b": 1.0}, {"a": 2}) == "b"


def test_within_a_batch_tasks_fill_up_evenly() -> None:
    mix, counts = Mix({"a": 2.0, "b": 1.0}, 6), Counter[str]()
    opened = []
    for _ in range(6):
        opened.append(mix.next(counts))
        counts[opened[-1]] += 1
    assert opened == ["a", "b", "a", "a", "b", "a"]


def test_groups_of_tasks_that_are_not_in_the_mix_do_not_count() -> None:
    mix = Mix({"a": 1.0, "b": 1.0}, 2)
    assert mix.next({"gone": 7, "a": 1}) == "b"


def test_a_long_run_keeps_the_latest_quotas_only_and_an_old_one_is_the_same_when_it_is_asked_for_again() -> None:
    mix = Mix({"a": 1.0, "b": 2.5, "c": 0.7}, 5)
    first = [dict(mix.quota(batch)) for batch in range(1000)]
    assert len(mix._quotas) == len(mix._totals) <= 2 * KEPT_BATCHES
    assert [dict(mix.quota(batch)) for batch in (3, 999, 500, 501)] == [first[n] for n in (3, 999, 500, 501)]
    assert sum(quota["b"] for quota in first) == pytest.approx(5000 * 2.5 / 4.2, abs=2)
