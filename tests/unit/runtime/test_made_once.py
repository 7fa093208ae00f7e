"""What is made once is whole or absent, whoever makes it and whatever happens to it on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.core.errors import StoreError
from rollart.runtime.made_once import LIST, cache_root, is_unchanged, is_whole, made_once


def writes(text: str, calls: list[str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        calls.append(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text(text)
        (folder / "b").write_text("b")

    return make


def test_a_folder_is_made_once_and_found_again(tmp_path: Path) -> None:
    calls: list[str] = []
    first = made_once("kind/one", writes("x", calls), tmp_path)
    again = made_once("kind/one", writes("y", calls), tmp_path)
    assert first == again == tmp_path / "kind" / "one"
    assert calls == ["x"]
    assert (first / "sub" / "a").read_text() == "x"
    assert [path.name for path in first.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("damage", ["cut", "missing", "no list", "torn list"])
def test_what_was_damaged_is_made_anew(tmp_path: Path, damage: str) -> None:
    calls: list[str] = []
    folder = made_once("one", writes("whole", calls), tmp_path)
    match damage:
        case "cut":
            (folder / "sub" / "a").write_text("who")
        case "missing":
            (folder / "b").unlink()
        case "no list":
            (folder / LIST).unlink()
        case _:
            (folder / LIST).write_text('{"b": [1')
    assert not is_whole(folder)
    assert made_once("one", writes("again", calls), tmp_path) == folder
    assert calls == ["whole", "again"]
    assert is_unchanged(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_flipped_byte_is_seen_by_who_reads_all(tmp_path: Path) -> None:
    folder = made_once("one", writes("whole", []), tmp_path)
    assert is_unchanged(folder)
    (folder / "sub" / "a").write_text("whale")
    assert is_whole(folder)
    assert not is_unchanged(folder)


def test_a_making_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        made_once("one", fails, tmp_path)
    with pytest.raises(StoreError, match="nothing was made"):
        made_once("one", lambda folder: None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_several_that_make_the_same_one_wins_and_all_have_it(tmp_path: Path) -> None:
    """All are inside `make` at the same time, each with a text of its own."""
    together = threading.Barrier(4)
    read: list[str] = []

    def one(text: str) -> None:
        def make(folder: Path) -> None:
            together.wait(10)
            (folder / "a").write_text(text)

        read.append((made_once("one", make, tmp_path) / "a").read_text())

    threads = [threading.Thread(target=one, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 4
    assert len(set(read)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="XDG_CACHE_HOME"):
        made_once("file/one", writes("x", []), tmp_path)


def test_where_every_byte_counts_a_changed_one_is_made_anew(tmp_path: Path) -> None:
    calls: list[str] = []
    folder = made_once("one", writes("whole", calls), tmp_path, every_byte=True)
    (folder / "sub" / "a").write_text("whale")
    assert made_once("one", writes("again", calls), tmp_path) == folder
    assert calls == ["whole"], "by size it is whole"
    made_once("one", writes("again", calls), tmp_path, every_byte=True)
    made_once("one", writes("never", calls), tmp_path, every_byte=True)
    assert calls == ["whole", "again"]
    assert is_unchanged(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("turn", range(10))
def test_several_that_find_the_same_damaged_folder_all_have_a_whole_one(tmp_path: Path, turn: int) -> None:
    folder = made_once("one", writes("whole", []), tmp_path)
    (folder / "b").unlink()
    together = threading.Barrier(6)
    found: list[bool] = []

    def one(text: str) -> None:
        def make(beside: Path) -> None:
            (beside / "a").write_text(text)
            together.wait(10)

        found.append(made_once("one", make, tmp_path) == folder)

    threads = [threading.Thread(target=one, args=(str(index),)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6, "none of them failed"
    assert is_unchanged(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with pytest.raises(StoreError, match=r"home directory\.\); set XDG_CACHE_HOME to a folder"):
        cache_root({}, homeless)
    assert cache_root({"XDG_CACHE_HOME": "/x"}, homeless) == Path("/x/rollart")
