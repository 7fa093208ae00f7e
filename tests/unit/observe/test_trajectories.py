"""Rows hold enough to train again: ids, log-probabilities, mask and versions of one length each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_run import encode, pieces, synthetic

from rollart.core.errors import InvariantBroken, StoreError, failure
from rollart.core.types import Segment, Span, TaskInstance, Tokens, Trajectory
from rollart.observe.trajectories import Encoded, TrajectoryWriter, read_trajectories, rows_of

INSTANCE = TaskInstance(task="a", epoch=0, index=3, seed=17)


def sampled(text: str, *spans: tuple[int, int], kept: list[float] | None = None) -> Tokens:
    logprobs = [-0.125 * (at + 1) for at in range(len(text))]
    versions = tuple(Span(version=version, n_tokens=n) for version, n in spans)
    return Tokens(n_tokens=len(text), spans=versions, payload=(text, logprobs, kept))


def said(text: str) -> Tokens:
    return Tokens(n_tokens=len(text), payload=(text, None, None))


def plain(payload: Any) -> Encoded:
    text, logprobs, kept = payload
    return Encoded([ord(char) for char in text], logprobs, kept)


def trajectory(*segments: Segment, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": INSTANCE.traj_id(1), "attempt": 0, "group_id": INSTANCE.group_id, "instance": INSTANCE, "member": 1,
        "segments": segments, "status": "done", "finish_cause": "env_done", "reward": 1.0, "turns": 2,
        "timings": {"total": 1.5}, "metrics": {"path": 2.0},
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def test_a_row_by_hand() -> None:
    segment = Segment(pieces=(said("go:"), sampled("R\n", (4, 1), (5, 1)), said("ok"), sampled("U", (5, 1))))
    (row,) = rows_of(trajectory(segment), plain, pieces)
    assert row["traj"] == "train/a/0/3/1"
    assert row["ids"] == [ord(char) for char in "go:R\nokU"]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert row["rollout_logprobs"] == [None, None, None, -0.125, -0.25, None, None, -0.125]
    assert row["spans"] == [[4, 1], [5, 2]]
    assert row["text"] == "go:R\nokU"
    assert (row["reward"], row["status"], row["cause"], row["seed"]) == (1.0, "done", "env_done", 17)
    assert row["timings"] == {"total": 1.5}
    assert "log_kept_mass" not in row
    assert "token_chars" not in row


def test_truncated_sampling_keeps_its_mass() -> None:
    (row,) = rows_of(trajectory(Segment(pieces=(said("x"), sampled("R", (0, 1), kept=[-0.5])))), plain, pieces)
    assert row["log_kept_mass"] == [None, -0.5]


def test_tokens_of_several_characters_can_be_told_apart() -> None:
    def words(ids: Any) -> list[str]:
        return ["he", "llo", ""][: len(ids)]

    (row,) = rows_of(trajectory(Segment(pieces=(sampled("abc", (0, 3)),))), plain, words)
    assert row["text"] == "hello"
    assert row["token_chars"] == [2, 3, 0]


def test_each_segment_is_a_row_and_none_is_one_row_too() -> None:
    first, second = Segment(pieces=(sampled("a", (0, 1)),)), Segment(pieces=(sampled("b", (1, 1)),), parent=0)
    rows = list(rows_of(trajectory(first, second), plain, pieces))
    assert [(row["segment"], row["segments"], row["parent"], row["text"]) for row in rows] == [
        (0, 2, None, "a"),
        (1, 2, 0, "b"),
    ]
    broken = failure("env", "timeout", "no answer")
    gone = trajectory(status="failed", finish_cause="timeout", reward=None, failure=broken)
    (row,) = rows_of(gone, plain, pieces)
    assert (row["ids"], row["reward"], row["failure"]) == ([], None, "env/timeout")


def test_lengths_and_spans_agree_on_every_row(tmp_path: Path) -> None:
    run = synthetic()
    run.write(tmp_path)
    n = 0
    for row, made in zip(read_trajectories(tmp_path / "trajectories.jsonl"), run.trajectories, strict=True):
        n += 1
        assert len(row["ids"]) == len(row["loss_mask"]) == len(row["rollout_logprobs"]) == len(row["text"])
        assert sum(row["loss_mask"]) == sum(tokens for _, tokens in row["spans"]) == made.n_sampled
        assert [value is not None for value in row["rollout_logprobs"]] == [bool(bit) for bit in row["loss_mask"]]
        assert (row["traj"], row["attempt"], row["reward"]) == (made.id, made.attempt, made.reward)
    assert n == len(run.trajectories)


def test_a_payload_of_another_length_is_reported(tmp_path: Path) -> None:
    wrong = trajectory(Segment(pieces=(Tokens(n_tokens=3, payload=("ab", None, None)),)))
    with pytest.raises(InvariantBroken, match="3 tokens has 2 ids"):
        list(rows_of(wrong, plain, pieces))
    writer = TrajectoryWriter(tmp_path / "trajectories.jsonl", plain, pieces)
    writer(wrong)
    with pytest.raises(StoreError, match=r"trajectories\.jsonl.*2 ids"):
        writer.close()


def test_a_torn_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    writer = TrajectoryWriter(path, encode, pieces)
    for made in synthetic().trajectories[:5]:
        writer(made)
    writer.close()
    path.write_bytes(path.read_bytes()[:-4])
    assert len(list(read_trajectories(path, lambda torn: None))) == 4
