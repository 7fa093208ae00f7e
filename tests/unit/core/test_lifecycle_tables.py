"""Every transition outside its table raises, nothing leaves a terminal state, and from everywhere one is reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.core.lifecycle import ATTEMPT, GROUP, AttemptState, GroupState, Lifecycle
from rollart.core.types import Status

Table = Mapping[str, frozenset[str]]
TABLES: dict[str, Table] = {"attempt": ATTEMPT, "group": GROUP}
STATES = {"attempt": get_args(AttemptState), "group": get_args(GroupState)}
TERMINAL = {"attempt": {"done", "aborted", "failed"}, "group": {"trained", "dropped"}}

every_table = pytest.mark.parametrize("name", TABLES)


@every_table
def test_exactly_the_moves_in_the_table_are_legal(name: str) -> None:
    table = TABLES[name]
    for source in table:
        for target in [*table, "nowhere"]:
            life = Lifecycle(table, "subject-7", source)
            if target in table[source]:
                life.to(target)
                assert life.state == target
            else:
                with pytest.raises(InvariantBroken, match=f"subject-7: {source} -> {target} is not a legal transition"):
                    life.to(target)
                assert life.state == source, "a refused move changes nothing"


@every_table
def test_the_table_names_all_states_and_leads_only_to_states_that_it_names(name: str) -> None:
    table = TABLES[name]
    assert set(table) == set(STATES[name])
    assert set().union(*table.values()) <= set(table)


@every_table
def test_terminal_states_have_no_way_out_and_are_these(name: str) -> None:
    ends = {state for state in TABLES[name] if Lifecycle(TABLES[name], "s", state).terminal}
    assert ends == TERMINAL[name]
    assert all(not TABLES[name][state] for state in ends)


@every_table
def test_every_state_reaches_a_terminal_state_and_is_reached_from_the_first(name: str) -> None:
    table = TABLES[name]

    def reached(start: str) -> set[str]:
        seen, front = {start}, [start]
        while front:
            new = table[front.pop()] - seen
            seen |= new
            front += new
        return seen

    assert all(reached(state) & TERMINAL[name] for state in table)
    first = next(iter(table))
    assert reached(first) == set(table)


def test_an_attempt_ends_in_a_status_of_a_trajectory() -> None:
    assert set(get_args(Status)) == TERMINAL["attempt"]


def test_a_group_whose_training_was_lost_goes_back_to_the_buffer() -> None:
    life = Lifecycle(GROUP, "g", "open")
    for state in ("buffered", "training", "buffered", "training", "trained"):
        life.to(state)
    assert life.terminal


def test_an_unknown_first_state_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvariantBroken, match=r"unknown state 'asleep'; one of \['buffered', 'dropped'"):
        Lifecycle(GROUP, "g", "asleep")


@given(name=st.sampled_from(sorted(TABLES)), wishes=st.lists(st.integers(0, 6), max_size=30))
def test_whatever_is_tried_a_terminal_state_is_entered_at_most_once(name: str, wishes: list[int]) -> None:
    table = TABLES[name]
    states = list(table)
    life = Lifecycle(table, "s", states[0])
    entered = 0
    for wish in wishes:
        try:
            life.to(states[wish % len(states)])
        except InvariantBroken:
            continue
        entered += life.terminal
    assert entered <= 1
    assert life.terminal == (entered == 1)
