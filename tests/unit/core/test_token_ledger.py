"""The ledger closes after any legal moves, and breaks as soon as one token is lost, made up or counted twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.core.ledger import Ledger
from rollart.core.types import DROP_REASONS, DropReason, EngineBook, Live, Purpose, RequestId, TrajId

ENGINES = ("engine-0", "engine-1")

moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["sample", "deliver", "buffer", "train", "drop_in_flight", "drop_buffered", "lose", "duplicate"]
        ),
        st.sampled_from(ENGINES),
        st.integers(0, 50),
        st.sampled_from(DROP_REASONS),
        st.sampled_from(get_args(Purpose)),
    ),
    max_size=60,
)


@dataclass(slots=True)
class Both:
    """Control's ledger beside engines that keep their own count."""

    ledger: Ledger = field(default_factory=Ledger)
    sampled: dict[str, dict[Purpose, int]] = field(default_factory=lambda: {engine: {} for engine in ENGINES})
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENGINES, 0))

    def step(self, move: str, engine: str, n: int, reason: DropReason, purpose: Purpose) -> None:
        ledger, own = self.ledger, self.sampled[engine]
        if move == "sample":
            own[purpose] = own.get(purpose, 0) + n
            self.live[engine] += n
        elif move in ("deliver", "lose"):
            n = min(n, self.live[engine])
            self.live[engine] -= n
            if move == "deliver":
                ledger.deliver(engine, n, purpose)
            else:
                ledger.lose(engine, n)
        elif move == "duplicate":
            own[purpose] = own.get(purpose, 0) + n
            ledger.lose(engine, n, "duplicate")
        elif move == "buffer":
            ledger.move("in_flight", "buffered", min(n, ledger.in_flight))
        elif move == "train":
            ledger.move("buffered", "trained", min(n, ledger.buffered))
        elif move == "drop_in_flight":
            ledger.drop("in_flight", reason, min(n, ledger.in_flight))
        else:
            ledger.drop("buffered", reason, min(n, ledger.buffered))

    def books(self) -> dict[str, EngineBook]:
        request = RequestId(TrajId("train/t/0/0/0"), 0, 0, 0)
        return {
            engine: EngineBook(
                sampled=dict(self.sampled[engine]), live={request: Live(n_tokens=self.live[engine], oldest_version=0)}
            )
            for engine in ENGINES
        }


def played(steps: list[tuple[str, str, int, DropReason, Purpose]]) -> Both:
    both = Both()
    for step in steps:
        both.step(*step)
    return both


def some_tokens_everywhere() -> Both:
    """Tokens in every place, so that each can lose one."""
    return played(
        [
            ("sample", "engine-0", 40, "stale", "train"),
            ("sample", "engine-1", 20, "stale", "eval"),
            ("deliver", "engine-0", 30, "stale", "train"),
            ("deliver", "engine-1", 15, "stale", "eval"),
            ("buffer", "engine-0", 20, "stale", "train"),
            ("train", "engine-0", 8, "stale", "train"),
            ("drop_buffered", "engine-0", 4, "stale", "train"),
        ]
    )


@given(moves)
def test_legal_moves_keep_both_books_equal(steps: list[tuple[str, str, int, DropReason, Purpose]]) -> None:
    both = Both()
    for step in steps:
        both.step(*step)
        sampled = both.ledger.check(both.books())
        assert sampled == {engine: sum(both.sampled[engine].values()) for engine in ENGINES}
    assert both.ledger.accounted + sum(both.live.values()) == sum(sampled.values() if steps else ())


@given(moves, st.sampled_from(ENGINES), st.sampled_from([-1, 1]), st.sampled_from(get_args(Purpose)))
def test_one_token_more_or_less_in_an_engines_book_breaks_the_check(
    steps: list[tuple[str, str, int, DropReason, Purpose]], engine: str, error: int, purpose: Purpose
) -> None:
    both = played(steps)
    both.sampled[engine][purpose] = both.sampled[engine].get(purpose, 0) + error
    with pytest.raises(InvariantBroken, match=f"{engine} sampled"):
        both.ledger.check(both.books())


@pytest.mark.parametrize("place", ["in_flight", "buffered", "trained", "eval", "dropped"])
@pytest.mark.parametrize("error", [-1, 1])
def test_one_token_lost_or_counted_twice_in_any_place_breaks_the_check(place: str, error: int) -> None:
    both = some_tokens_everywhere()
    both.ledger.check(both.books())
    if place == "dropped":
        both.ledger.dropped["stale"] += error
    else:
        setattr(both.ledger, place, getattr(both.ledger, place) + error)
    with pytest.raises(InvariantBroken, match=r"control's places hold \d+ tokens, 45 were delivered"):
        both.ledger.check(both.books())


def test_a_turn_delivered_twice_breaks_the_check() -> None:
    both = some_tokens_everywhere()
    both.ledger.deliver("engine-0", 5, "train")
    with pytest.raises(InvariantBroken, match=r"engine-0 sampled 40 tokens, control has 45 \(10 of them live\)"):
        both.ledger.check(both.books())


def test_a_turn_put_down_to_the_wrong_engine_breaks_the_check_of_both() -> None:
    both = some_tokens_everywhere()
    both.ledger.delivered["engine-0"] -= 1
    both.ledger.delivered["engine-1"] += 1
    with pytest.raises(InvariantBroken, match=r"engine-0 sampled .*; engine-1 sampled"):
        both.ledger.check(both.books())


def test_what_a_lost_engine_had_under_way_is_missed_until_it_is_counted() -> None:
    both = some_tokens_everywhere()
    books: Mapping[str, EngineBook] = {engine: replace(book, live={}) for engine, book in both.books().items()}
    with pytest.raises(InvariantBroken, match="engine-0 sampled 40 tokens, control has 30"):
        both.ledger.check(books)
    both.ledger.lose("engine-0", 10)
    both.ledger.lose("engine-1", 5)
    both.ledger.check(books)
    assert both.ledger.dropped["engine_lost"] == 15


def test_tokens_of_an_engine_that_control_does_not_know_and_the_other_way_round_break_the_check() -> None:
    both = some_tokens_everywhere()
    with pytest.raises(InvariantBroken, match="engine-9 sampled 3 tokens, control has 0"):
        both.ledger.check({**both.books(), "engine-9": EngineBook(sampled={"train": 3})})
    both.ledger.deliver("engine-9", 3, "train")
    with pytest.raises(InvariantBroken, match="engine-9 sampled 0 tokens, control has 3"):
        both.ledger.check(both.books())


@pytest.mark.parametrize("source", ["in_flight", "buffered"])
def test_no_place_gives_more_than_it_holds(source: Literal["in_flight", "buffered"]) -> None:
    both = some_tokens_everywhere()
    held = getattr(both.ledger, source)
    for tokens in (held + 1, -1):
        with pytest.raises(InvariantBroken, match=f"{tokens} tokens cannot leave '{source}', which holds {held}"):
            both.ledger.drop(source, "stale", tokens)
        with pytest.raises(InvariantBroken, match=f"{tokens} tokens cannot leave '{source}'"):
            both.ledger.move(source, "trained", tokens)
    both.ledger.check(both.books())


def test_evaluation_never_mixes_with_what_can_be_trained() -> None:
    ledger = Ledger()
    ledger.deliver("e", 7, "eval")
    assert (ledger.eval, ledger.in_flight) == (7, 0)
    with pytest.raises(InvariantBroken):
        ledger.move("in_flight", "buffered", 1)


def test_the_reasons_to_drop_are_a_closed_set() -> None:
    assert set(Ledger().dropped) == set(DROP_REASONS)
    with pytest.raises(KeyError):
        some_tokens_everywhere().ledger.drop("in_flight", "bored", 1)  # type: ignore[arg-type]
