"""A trainer's state on disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainer_samples import MODEL, random_samples, spec_with, train_step, trainer_rank

from rollart.core.errors import StoreError


def test_a_loaded_trainer_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "trainer.safetensors")
    with trainer_rank() as rank:
        for step in range(3):
            train_step(rank, random_samples(4, seed=step))
        rank.publish(7)
        rank.checkpoint(path, "save")
        after = train_step(rank, random_samples(4, seed=3))
        offer = rank.publish(8)
    with trainer_rank(spec_with(model=MODEL)) as other:
        train_step(other, random_samples(4, seed=99))
        other.checkpoint(path, "load")
        assert (other.steps, other.version) == (3, 7)
        assert train_step(other, random_samples(4, seed=3)) == after
        again = other.publish(8)
    assert offer is not None
    assert again is not None
    assert again.digest == offer.digest


def test_a_checkpoint_before_the_first_step_forgets_moments_of_later_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer.safetensors")
    with trainer_rank() as rank:
        rank.checkpoint(path, "save")
        first = train_step(rank, random_samples(4))
        rank.checkpoint(path, "load")
        assert train_step(rank, random_samples(4)) == first


def test_rolling_back_keeps_the_highest_published_version_and_drops_an_open_step(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer.safetensors")
    with trainer_rank() as rank:
        rank.publish(2)
        rank.checkpoint(path, "save")
        rank.publish(5)
        rank.begin(9, total_weight=None)
        rank.checkpoint(path, "load")
        assert rank.version == 5
        with pytest.raises(Exception, match="call begin first"):
            rank.finish()


def test_a_checkpoint_is_whole_or_absent_and_its_weights_can_be_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    with trainer_rank() as rank:
        train_step(rank, random_samples(4))
        rank.checkpoint(str(path), "save")
        rank.checkpoint(str(path), "save")
        names = set(rank.weights)
    assert [one.name for one in tmp_path.iterdir()] == ["trainer.safetensors"]
    tensors = load_file(path)
    assert {name.removeprefix("weight/") for name in tensors if name.startswith("weight/")} == names
    assert len(tensors) == 3 * len(names)


def test_torn_missing_and_foreign_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    with trainer_rank(spec_with(model=MODEL.model_copy(update={"ffn": 40}))) as other:
        other.checkpoint(str(tmp_path / "other.safetensors"), "save")
    with trainer_rank() as rank:
        rank.checkpoint(str(path), "save")
        path.write_bytes(path.read_bytes()[:-100])
        train_step(rank, random_samples(4))
        before = rank.publish(0)
        for name, why in [
            ("trainer.safetensors", "cannot read"),
            ("nothing.safetensors", "cannot read"),
            ("other.safetensors", "is of another model"),
        ]:
            with pytest.raises(StoreError, match=why):
                rank.checkpoint(str(tmp_path / name), "load")
        after = rank.publish(1)
    assert before is not None
    assert after is not None
    assert after.digest == before.digest


def test_a_checkpoint_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with trainer_rank() as rank, pytest.raises(StoreError, match="cannot write"):
        rank.checkpoint(str(tmp_path / "file" / "trainer.safetensors"), "save")


@contextmanager
def files_no_larger_than(n_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_checkpoint_that_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    with trainer_rank() as rank:
        rank.checkpoint(str(path), "save")
        whole = path.read_bytes()
        train_step(rank, random_samples(4))
        with files_no_larger_than(1000), pytest.raises(StoreError, match=r"cannot write .*trainer.safetensors: .*"):
            rank.checkpoint(str(path), "save")
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_save_left_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    beside = tmp_path / "trainer.safetensors.partial"
    beside.write_bytes(b"half")
    with trainer_rank() as rank:
        with pytest.raises(StoreError, match="cannot read"):
            rank.checkpoint(str(path), "load")
        rank.checkpoint(str(path), "save")
        rank.checkpoint(str(path), "load")
    assert list(tmp_path.iterdir()) == [path]
