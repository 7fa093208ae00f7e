"""The split of a step into ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollart.learn.batching import PASS_TOKENS, split

LENGTHS = st.lists(st.integers(1, 500), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4000))
def test_every_sample_is_in_exactly_one_micro_batch_and_all_ranks_run_equally_many(
    lengths: list[int], ranks: int, budget: int
) -> None:
    parts = split(lengths, ranks=ranks, micro_batch_tokens=budget)
    assert len(parts) == ranks
    assert len({len(micro_batches) for micro_batches in parts}) == 1
    flat = [index for micro_batches in parts for rows in micro_batches for index in rows]
    assert sorted(flat) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4000))
def test_padded_tokens_stay_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    for micro_batches in split(lengths, ranks=ranks, micro_batch_tokens=budget):
        for rows in micro_batches:
            if len(rows) > 1:
                assert len(rows) * max(lengths[row] for row in rows) <= budget


def cost(cut: Iterable[Sequence[int]], lengths: list[int]) -> int:
    return sum(len(rows) * max(lengths[row] for row in rows) + PASS_TOKENS for rows in cut)


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=9), st.integers(1, 4000))
def test_no_other_cut_of_the_sorted_rows_costs_less(lengths: list[int], budget: int) -> None:
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    best = 10**9
    for n_cuts in range(len(order)):
        for places in combinations(range(1, len(order)), n_cuts):
            cut = [order[a:b] for a, b in pairwise([0, *places, len(order)])]
            if all(len(rows) == 1 or len(rows) * lengths[rows[0]] <= budget for rows in cut):
                best = min(best, cost(cut, lengths))
    assert cost(split(lengths, ranks=1, micro_batch_tokens=budget)[0], lengths) == best


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4000))
def test_ranks_get_equal_numbers_of_rows_and_tokens_up_to_one_row(lengths: list[int], ranks: int, budget: int) -> None:
    parts = split(lengths, ranks=ranks, micro_batch_tokens=budget)
    rows = [sum(map(len, micro_batches)) for micro_batches in parts]
    tokens = [sum(lengths[row] for mb in micro_batches for row in mb) for micro_batches in parts]
    assert max(rows) - min(rows) <= 1
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_rows_of_unlike_length_are_not_padded_to_each_other() -> None:
    parts = split([200] * 4 + [10] * 40, ranks=1, micro_batch_tokens=8192)
    assert parts == ((tuple(range(4)), tuple(range(4, 44))),)


def test_a_row_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    assert split([100, 5, 5], ranks=1, micro_batch_tokens=20) == (((0,), (1, 2)),)


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    parts = split([9, 9, 9], ranks=2, micro_batch_tokens=9)
    assert [len(micro_batches) for micro_batches in parts] == [2, 2]
    assert parts[0][1] == ()
    assert split([], ranks=2, micro_batch_tokens=9) == ((), ())
