"""The split of a step into ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Segment, Span, Tokens
from rollart.learn.batching import PASS_TOKENS, computed_tokens, prompt_tokens, split, split_by_prompt

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


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60), st.integers(1, 3), st.integers(1, 800))
def test_rows_of_one_prompt_stay_together_on_one_rank_and_every_row_is_in_one_micro_batch(
    rows: list[tuple[int, int]], ranks: int, budget: int
) -> None:
    prompts = [(which, 5 * which + 1) for which, _ in rows]
    lengths = [prompt + own for (_, prompt), (_, own) in zip(prompts, rows, strict=True)]
    parts = split_by_prompt(lengths, prompts, ranks=ranks, micro_batch_tokens=budget)
    assert sorted(index for of_rank in parts for batch in of_rank for index in batch) == list(range(len(rows)))
    assert len({len(of_rank) for of_rank in parts}) == 1
    for batch in (batch for of_rank in parts for batch in of_rank if len(batch) > 1):
        assert computed_tokens(batch, lengths, prompts) <= budget
    for which in {which for which, _ in rows} if ranks == 1 else ():
        members = [index for index, (prompt, _) in enumerate(prompts) if prompt == which]
        if computed_tokens(members, lengths, prompts) <= budget:
            assert sum(not set(members).isdisjoint(batch) for batch in parts[0]) == 1


def test_a_prompt_that_rows_share_is_computed_once_a_pass_and_a_short_one_in_each() -> None:
    assert computed_tokens((0, 1, 2), [30, 25, 20], [("a", 10), ("a", 10), ("b", 10)]) == 30 + 15 + 20
    assert computed_tokens((0, 1), [30, 25], [("a", 7), ("a", 7)]) == 55
    assert computed_tokens((), [], []) == 1


def test_a_prompt_ends_where_the_first_trained_token_begins() -> None:
    read, sampled = Tokens(n_tokens=5), Tokens(n_tokens=3, spans=(Span(version=0, n_tokens=3),))
    pieces = (read, sampled, read, sampled)
    assert prompt_tokens(Segment(pieces=pieces)) == 5
    assert prompt_tokens(Segment(pieces=pieces, parent=0, shared_tokens=6)) == 6
    assert prompt_tokens(Segment(pieces=pieces, parent=0, shared_tokens=10)) == 13
    assert prompt_tokens(Segment(pieces=(read,))) == 5
