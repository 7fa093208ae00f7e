"""Which problem is next: each once an epoch, in an order that nothing but (seed, task, epoch) decides."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.instances import Cursor, Split, evaluation, splits
from rollart.core.types import TaskSpec


def a_spec(name: str = "lake", *, train: int = 10, held_out: int = 0) -> TaskSpec:
    return TaskSpec(
        name=name, ratio=1.0, train=range(1000, 1000 + train), held_out=range(5000, 5000 + held_out), max_turns=1
    )


def order(cursor: Cursor, n: int) -> list[tuple[int, int]]:
    return [(instance.epoch, instance.index) for instance in (cursor.next() for _ in range(n))]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 5))
def test_an_epoch_visits_every_instance_once_and_wraps_into_the_next(n: int, epochs: int, seed: int) -> None:
    """Field case 3: a data set shorter than the run never makes anybody wait."""
    seen = order(Cursor(a_spec(train=n), seed), n * epochs)
    for epoch in range(epochs):
        visited = seen[epoch * n : (epoch + 1) * n]
        assert sorted(visited) == [(epoch, index) for index in range(n)]


def test_epochs_come_in_different_orders() -> None:
    seen = order(Cursor(a_spec(train=20), 0), 60)
    orders = [tuple(index for _, index in seen[i : i + 20]) for i in (0, 20, 40)]
    assert len(set(orders)) == 3
    assert tuple(range(20)) not in orders


def test_the_seed_of_the_instance_is_the_one_that_the_task_names() -> None:
    cursor = Cursor(a_spec(), 0)
    for instance in (cursor.next() for _ in range(15)):
        assert instance.seed == 1000 + instance.index
        assert (instance.task, instance.purpose) == ("lake", "train")


def test_the_order_depends_on_seed_task_and_epoch_alone() -> None:
    spec = a_spec(train=50)
    first = order(Cursor(spec, 7), 100)
    beside = Cursor(spec, 7)
    other = Cursor(a_spec("other", train=50), 7)
    interleaved = []
    for _ in range(100):
        interleaved += order(beside, 1)
        other.next()
    assert interleaved == first, "not on what else is drawn"
    assert order(Cursor(a_spec(train=50, held_out=9), 7), 100) == first, "not on what is held out"
    assert order(Cursor(spec, 8), 100) != first
    assert order(Cursor(a_spec("other", train=50), 7), 100) != first


@given(st.integers(1, 12), st.integers(0, 30), st.integers(1, 30))
def test_a_cursor_goes_on_where_another_stopped(n: int, before: int, after: int) -> None:
    spec = a_spec(train=n)
    whole = order(Cursor(spec, 3), before + after)
    stopped = Cursor(spec, 3)
    order(stopped, before)
    resumed = Cursor(spec, 3, epoch=stopped.epoch, position=stopped.position)
    assert order(resumed, after) == whole[before:]


def test_no_two_groups_of_a_run_have_the_same_id() -> None:
    cursor = Cursor(a_spec(train=7), 0)
    ids = [cursor.next().group_id for _ in range(50)]
    assert len(set(ids)) == 50


# --- evaluation ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(0, 60), st.sampled_from(["train", "held_out"]), st.integers(0, 3))
def test_an_evaluation_covers_its_instances_evenly_and_names_every_episode(
    n: int, episodes: int, split: Split, ordinal: int
) -> None:
    spec = a_spec(train=n, held_out=n)
    wanted = evaluation(spec, split, ordinal=ordinal, episodes=episodes)
    assert len(wanted) == episodes
    times = Counter(instance.index for instance, _ in wanted)
    assert max(times.values(), default=0) - min((times[i] for i in range(n)), default=0) <= 1
    assert len({instance.traj_id(member) for instance, member in wanted}) == episodes
    first = 5000 if split == "held_out" else 1000
    for instance, _ in wanted:
        assert (instance.purpose, instance.epoch, instance.seed) == ("eval", ordinal, first + instance.index)


def test_an_evaluation_without_a_number_scores_every_instance_once() -> None:
    wanted = evaluation(a_spec(train=13), "train", ordinal=1, episodes=None)
    assert [(instance.index, member) for instance, member in wanted] == [(i, 0) for i in range(13)]


def test_two_evaluations_and_training_share_no_id() -> None:
    spec = a_spec(train=5, held_out=5)
    cursor = Cursor(spec, 0)
    ids = [cursor.next().traj_id(0) for _ in range(20)]
    for ordinal, split in enumerate(("train", "held_out", "train")):
        ids += [i.traj_id(member) for i, member in evaluation(spec, split, ordinal=ordinal, episodes=12)]  # type: ignore[arg-type]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("train", "held_out", "expected"),
    [(3, 2, ("train", "held_out")), (3, 0, ("train",)), (0, 2, ("held_out",)), (0, 0, ())],
)
def test_an_evaluation_looks_at_the_splits_that_have_instances(
    train: int, held_out: int, expected: tuple[str, ...]
) -> None:
    assert splits(a_spec(train=train, held_out=held_out)) == expected
