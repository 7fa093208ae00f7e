"""When a group is complete, and which groups lose when more were opened than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sched.redundancy import Unfinished, Verdict, group_verdict, losers

SIZE, LEAST = 4, 2


@pytest.mark.parametrize(
    ("done", "live", "given_up", "verdict"),
    [
        # all members there, nothing failed
        (0, 4, 0, "wait"),
        (3, 1, 0, "wait"),
        (4, 0, 0, "complete"),
        # spare members: the first that suffice close the group
        (3, 2, 0, "wait"),
        (4, 1, 0, "complete"),
        (5, 0, 0, "complete"),
        (4, 3, 2, "complete"),
        # members given up, a spare takes the place
        (2, 2, 1, "wait"),
        (3, 1, 1, "wait"),
        # no spare is left: wait for those that live, go on with fewer, down to the least
        (1, 2, 1, "wait"),
        (2, 1, 1, "wait"),
        (3, 0, 1, "complete"),
        (2, 0, 2, "complete"),
        (1, 1, 2, "wait"),
        (0, 2, 2, "wait"),
        # not even the least can be reached
        (1, 0, 3, "hopeless"),
        (0, 1, 3, "hopeless"),
        (0, 0, 4, "hopeless"),
    ],
)
def test_the_verdict_on_a_group(done: int, live: int, given_up: int, verdict: Verdict) -> None:
    assert group_verdict(done=done, live=live, group_size=SIZE, given_up=given_up, min_group_size=LEAST) == verdict


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 3), st.data())
def test_a_group_waits_only_for_somebody_and_ends_one_way(
    size: int, least: int, spare: int, data: st.DataObject
) -> None:
    """Members end one by one in any order: the verdict stays `wait` until it is final, and it becomes final."""
    least = min(least, size)
    done, live, given_up = 0, size + spare, 0
    while True:
        verdict = group_verdict(done=done, live=live, group_size=size, given_up=given_up, min_group_size=least)
        if verdict != "wait":
            break
        assert live > 0, "nobody is left to wait for"
        live -= 1
        if data.draw(st.booleans()):
            done += 1
        else:
            given_up += 1
    if verdict == "complete":
        assert least <= done <= size
        assert done == size or live == 0
    else:
        assert done + live < least


def test_groups_without_a_least_are_all_or_nothing() -> None:
    verdicts = {
        done: group_verdict(done=done, live=0, group_size=4, given_up=4 - done, min_group_size=4) for done in range(5)
    }
    assert verdicts == {0: "hopeless", 1: "hopeless", 2: "hopeless", 3: "hopeless", 4: "complete"}


def groups(*orders: int) -> list[Unfinished]:
    return [Unfinished(group=f"g{order}", task="t", order=order) for order in orders]


def test_unfinished_groups_lose_first_the_longest_running_of_them_then_the_newest_finished() -> None:
    unfinished, finished = groups(5, 2, 8), groups(1, 7, 3)
    assert losers(unfinished, finished, wanted={"t": 6}) == ()
    assert losers(unfinished, finished, wanted={"t": 4}) == ("g2", "g5")
    assert losers(unfinished, finished, wanted={"t": 1}) == ("g2", "g5", "g8", "g7", "g3")
    assert losers(unfinished, finished, wanted={}) == ("g2", "g5", "g8", "g7", "g3", "g1")
    assert losers([], [], wanted={"t": 1}) == ()


def test_a_slow_task_never_loses_a_group_to_what_a_fast_one_over_produced() -> None:
    slow = [Unfinished(group=f"s{n}", task="slow", order=n) for n in range(3)]
    fast = [Unfinished(group=f"f{n}", task="fast", order=10 + n) for n in range(4)]
    assert losers(slow, fast, wanted={"slow": 3, "fast": 2}) == ("f3", "f2")
    assert losers(slow + fast, [], wanted={"slow": 3, "fast": 2}) == ("f0", "f1")
