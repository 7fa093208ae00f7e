"""What is made once is whole or absent, whoever makes it and whatever happens to it on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.core.errors import StoreError
from rollart.runtime.made_once import LIST, is_unchanged, is_whole, made_once


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
