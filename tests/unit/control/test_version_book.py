"""How an engine gets from what it serves to what is wanted: deltas in order, or from a snapshot."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.weights import VersionBook
from rollart.core.errors import RollartError, StoreError
from rollart.core.types import Manifest
from rollart.sim.loop import run


def a_book(*bases: int | None) -> VersionBook:
    """Versions 0, 1, ..: each a snapshot (None) or a delta on `bases[version]`."""
    book = VersionBook()

    async def offer() -> None:
        for version, base in enumerate(bases):
            await book.offer(Manifest(version=version, base=base))

    run(offer())
    return book


def chain(book: VersionBook, have: int | None, want: int) -> list[int]:
    return [manifest.version for manifest in run(book.chain(have, want))]


def test_a_snapshot_is_all_that_is_needed_from_anywhere() -> None:
    book = a_book(None, None, None)
    for have in (None, 0, 1):
        assert chain(book, have, 2) == [2]
    assert chain(book, 2, 2) == []


def test_deltas_come_oldest_first_from_what_is_held_or_from_the_nearest_snapshot_below() -> None:
    book = a_book(None, 0, 1, None, 3, 4)
    assert chain(book, None, 2) == [0, 1, 2]
    assert chain(book, 0, 2) == [1, 2]
    assert chain(book, 1, 2) == [2]
    assert chain(book, 1, 5) == [3, 4, 5], "a snapshot on the way makes older deltas needless"
    assert chain(book, 4, 5) == [5]
    assert chain(book, None, 3) == [3]


@pytest.mark.parametrize("want", [0, 9])
def test_a_version_that_is_not_kept_is_a_typed_error_with_those_that_are(want: int) -> None:
    """Nothing but typed errors may end a run: others leave its last event unwritten."""
    book = a_book(None, None, None)
    run(book.retire(1))
    with pytest.raises(StoreError, match=rf"version {want} is not in the store, which keeps \[1, 2\]") as error:
        chain(book, None, want)
    assert isinstance(error.value, RollartError)


def test_retiring_forgets_what_is_below_and_nothing_else() -> None:
    book = a_book(None, None, None, None)
    run(book.retire(2))
    assert [version for version in range(4) if _kept(book, version)] == [2, 3]
    run(book.retire(0))
    assert [version for version in range(4) if _kept(book, version)] == [2, 3]


def _kept(book: VersionBook, version: int) -> bool:
    try:
        return bool(run(book.chain(None, version)))
    except StoreError:
        return False


def test_what_a_kept_delta_is_based_on_is_kept() -> None:
    book = a_book(None, None, 1, 2, 3)
    run(book.retire(4))
    assert chain(book, None, 4) == [1, 2, 3, 4]
    with pytest.raises(StoreError):
        chain(book, None, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_every_kept_version_can_be_reached_by_an_engine_with_nothing(
    snapshots: list[bool], below: int, want: int
) -> None:
    book = a_book(*(None if snapshot or v == 0 else v - 1 for v, snapshot in enumerate(snapshots)))
    run(book.retire(below))
    if below <= want < len(snapshots):
        path = run(book.chain(None, want))
        assert path[0].base is None
        assert path[-1].version == want
        assert all(later.base == earlier.version for earlier, later in pairwise(path))
