"""The account of a run's problems, on logs that are written by hand; each doctored one must be found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollart.control.instances import Cursor
from rollart.core.types import TaskSpec
from rollart.runtime.consumed import Account, account, differences, faults, prompts

SEED = 3
SPECS = (
    TaskSpec(name="a", ratio=1, train=range(100, 108), held_out=()),
    TaskSpec(name="b", ratio=1, train=range(200, 203), held_out=()),
)
Log = list[dict[str, Any]]


def order(task: int, n: int) -> list[str]:
    """The first `n` groups of a task's cursor."""
    cursor = Cursor(SPECS[task], SEED)
    return [cursor.next().group_id for _ in range(n)]


A, B = order(0, 10), order(1, 5)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    ids: dict[str, Any] = {name: fields.pop(name) for name in ("group", "step") if name in fields}
    return {"kind": kind, **ids, "data": fields}


def step(number: int, groups: Sequence[str]) -> Log:
    """A batch from its opening to its training."""
    return [
        *(event("group_opened", group=group) for group in groups),
        *(event("group_completed", group=group) for group in groups),
        event("batch_released", step=number, groups=list(groups)),
        event("step_finished", step=number),
    ]


def whole() -> Log:
    """Three steps of a and b; one group of a is dropped, and it is done."""
    return [
        *step(0, [A[0], B[0]]),
        event("group_opened", group=A[1]),
        event("group_dropped", group=A[1], reason="env_failed"),
        *step(1, [A[2], B[1]]),
        *step(2, [A[3], B[2]]),
        event("run_finished", status="done"),
    ]


def found(log: Log) -> list[str]:
    return faults(account(log), SPECS, SEED)


def test_a_whole_run_has_no_faults_and_an_account_of_all_its_groups() -> None:
    log = account(whole())
    assert faults(log, SPECS, SEED) == []
    assert log.steps == (0, 1, 2)
    assert log.done
    assert log.trained == dict.fromkeys([A[0], B[0], A[2], B[1], A[3], B[2]], 1)
    assert log.dropped == {A[1]: ("env_failed",)}
    assert log.buffered == log.in_flight == frozenset()


def test_a_run_that_was_cut_may_have_groups_in_every_place() -> None:
    log: Log = [
        *step(0, [A[0]]),
        *step(1, [A[1]])[:-1],
        event("group_opened", group=A[2]),
        event("group_completed", group=A[2]),
        event("group_opened", group=A[3]),
    ]
    assert found(log) == []
    cut: Account = account(log)
    assert cut.buffered == {A[2]}
    assert cut.in_flight == {A[1], A[3]}


def test_a_wrap_into_the_next_epoch_is_the_cursors_order() -> None:
    assert found([event for number, group in enumerate(B) for event in step(number, [group])]) == []


@pytest.mark.parametrize(
    ("doctored", "told"),
    [
        ([*step(0, [A[0]]), event("group_opened", group=A[0])], "issued more than once"),
        ([*step(0, [A[0]]), event("batch_released", step=1, groups=[A[0]])], "trained more than once"),
        ([*step(0, [A[0]]), event("group_dropped", group=A[0], reason="stale")], "trained, and dropped as well"),
        (
            [event("group_opened", group=A[0]), *2 * [event("group_dropped", group=A[0], reason="stale")]],
            "dropped more",
        ),
        ([event("group_opened", group=A[0]), event("group_dropped", group=A[0], reason="")], "without a reason"),
        (step(0, [A[0]])[1:], "never issued"),
        ([event("group_opened", group=A[0]), *step(0, [A[0]])[2:]], "never completed"),
        (
            [*step(0, [A[0]]), *step(0, [A[1]])],
            "more than one batch",
        ),
        (
            [*step(0, [A[0]]), event("group_opened", group=A[1]), event("run_finished", status="done")],
            "neither trained",
        ),
        (step(0, [A[1]]), "its cursor gives"),
        ([*step(0, [A[0]]), *step(1, [A[2]])], "number 2"),
        (step(0, ["train/c/0/0"]), "no such task"),
    ],
)
def test_a_doctored_log_is_found_out(doctored: Log, told: str) -> None:
    assert any(told in line for line in found(doctored)), found(doctored)


@pytest.mark.parametrize("index", range(len(whole())))
def test_no_event_of_a_group_can_be_taken_out_unseen(index: int) -> None:
    log = whole()
    taken = log.pop(index)
    if taken["kind"] == "run_finished":
        assert found(log) == []
    elif taken["kind"] == "step_finished":  # its groups count as being trained, and the run as not having all its steps
        assert account(log).steps != (0, 1, 2)
    else:
        assert found(log) != [], taken


def test_what_was_consumed_is_compared_as_problems_not_as_places() -> None:
    one = prompts(account(whole()), SPECS)
    assert sum(one.values()) == 6
    later = [event for number, group in enumerate(reversed([A[0], B[0], A[2], B[1], A[3], B[2]]))
             for event in step(number, [group])]  # fmt: skip
    assert differences(one, prompts(account(later), SPECS)) == []


def test_a_problem_too_few_or_too_often_is_named_on_its_side() -> None:
    one = prompts(account(whole()), SPECS)
    other: Counter[tuple[str, int]] = Counter(one)
    gone = next(iter(other))
    del other[gone]
    assert differences(one, other) == [f"1 consumed by the first run only: {gone[0]} seed {gone[1]} (x1)"]
    other[gone] = 2
    assert differences(one, other) == [f"1 consumed by the second only: {gone[0]} seed {gone[1]} (x1)"]


def test_a_second_epoch_counts_the_same_problem_twice() -> None:
    log: Sequence[Mapping[str, Any]] = [event for number, group in enumerate(B) for event in step(number, [group])]
    assert sorted(prompts(account(log), SPECS).values()) == [1, 2, 2]
