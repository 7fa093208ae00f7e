"""The zero-variance filter as a pure decision: what it drops, and that it never drops for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.sched.variance import Filter, equal_rewards, verdict

EQUAL, UNLIKE = (1.0, 1.0, 1.0), (1.0, 0.0, 1.0)


def a_filter(**allowed: int) -> Filter:
    return Filter(allowed=allowed, patience_s=10.0)


def test_equal_means_equal_to_rounding() -> None:
    assert equal_rewards([0.1 + 0.2, 0.3])
    assert equal_rewards([0.0, 0.0, -0.0])
    assert equal_rewards([5.0])
    assert equal_rewards([])
    assert not equal_rewards([0.3, 0.3001])
    assert not equal_rewards([1e-300, 2e-300])


def test_a_group_that_teaches_is_kept_whatever_was_dropped() -> None:
    assert verdict(UNLIKE, dropped=9, allowed=1, starved=True) == "keep"


def test_a_group_that_teaches_nothing_is_dropped_within_the_allowance_and_while_nobody_starves() -> None:
    assert verdict(EQUAL, dropped=2, allowed=3, starved=False) == "drop"
    assert verdict(EQUAL, dropped=3, allowed=3, starved=False) == "spent"
    assert verdict(EQUAL, dropped=0, allowed=3, starved=True) == "spent"


def test_each_task_has_its_own_allowance_for_each_batch() -> None:
    variance = a_filter(a=2, b=1)
    found = [variance.choose("a", EQUAL, batch=0, waited_s=0.0) for _ in range(3)]
    assert found == ["drop", "drop", "spent"]
    assert variance.choose("b", EQUAL, batch=0, waited_s=0.0) == "drop"
    assert variance.choose("a", EQUAL, batch=1, waited_s=0.0) == "drop", "a batch was released meanwhile"
    assert variance.choose("b", EQUAL, batch=1, waited_s=10.0) == "spent", "the trainer has waited for long"


def test_an_exhausted_task_is_told_of_once_until_it_teaches_again() -> None:
    variance = a_filter(a=1)
    assert variance.first_time("a")
    assert not variance.first_time("a")
    assert variance.choose("a", UNLIKE, batch=3, waited_s=0.0) == "keep"
    assert variance.first_time("a")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=80), st.integers(1, 5), st.integers(1, 5))
def test_no_task_ever_loses_more_than_its_allowance_for_a_batch(
    groups: list[tuple[str, bool]], of_a: int, of_b: int
) -> None:
    variance = a_filter(a=of_a, b=of_b)
    lost = {"a": 0, "b": 0}
    for task, equal in groups:
        found = variance.choose(task, EQUAL if equal else UNLIKE, batch=0, waited_s=0.0)
        lost[task] += found == "drop"
        assert (found == "keep") == (not equal)
    asked = {task: sum(equal for one, equal in groups if one == task) for task in "ab"}
    assert lost == {"a": min(of_a, asked["a"]), "b": min(of_b, asked["b"])}
