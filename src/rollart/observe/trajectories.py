"""Trajectories on disk: `trajectories.jsonl`, one row per segment, enough to train or read them again.

Invariant: `ids`, `loss_mask` and (where present) `rollout_logprobs`, `log_kept_mass` have one length; `spans` sum to the
number of ones in `loss_mask`. Payloads are opaque here: the world that made them says how to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import InvariantBroken
from rollart.core.types import Segment, Tokens, Trajectory
from rollart.observe.jsonl import LineWriter, Torn, log_torn, read_rows, to_line

LOGPROB_DECIMALS = 7
"""An absolute error of 5e-8, below what float32 resolves for any log-probability beyond -1; halves the file."""


class Encoded(NamedTuple):
    """One payload in plain numbers, all of the piece's length."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """None for tokens that were not sampled."""
    log_kept_mass: Sequence[float] | None = None
    """None where nothing was truncated."""


Encode = Callable[[object], Encoded]
Pieces = Callable[[Sequence[int]], Sequence[str]]
"""The text of each token, in order; joined they are the text of the sequence."""


class TrajectoryWriter:
    """Give it to a world as `keep`. Takes terminal trajectories without waiting; encodes and writes them in a thread.

    Raises StoreError from the next call or from `close` when a write or an encoding failed.
    """

    def __init__(self, path: Path, encode: Encode, pieces: Pieces, *, append: bool = False) -> None:
        def lines(trajectory: Trajectory) -> bytes:
            return b"".join(to_line(row) for row in rows_of(trajectory, encode, pieces))

        self._lines = LineWriter(path, lines, append=append)

    def __call__(self, trajectory: Trajectory) -> None:
        self._lines.put(trajectory)

    def close(self) -> None:
        self._lines.close()


def rows_of(trajectory: Trajectory, encode: Encode, pieces: Pieces) -> Iterator[dict[str, Any]]:
    """One row per segment; a trajectory without any has one row without tokens."""
    for index, segment in enumerate(trajectory.segments or (Segment(),)):
        tokens = _tokens(segment, encode)
        texts = pieces(tokens["ids"])
        yield {
            "traj": trajectory.id,
            "attempt": trajectory.attempt,
            "segment": index,
            "segments": len(trajectory.segments),
            "parent": segment.parent,
            "shared_tokens": segment.shared_tokens,
            "group": trajectory.group_id,
            "task": trajectory.instance.task,
            "purpose": trajectory.instance.purpose,
            "seed": trajectory.instance.seed,
            "member": trajectory.member,
            "reward": trajectory.reward,
            "status": trajectory.status,
            "cause": trajectory.finish_cause,
            "failure": trajectory.failure and f"{trajectory.failure.where}/{trajectory.failure.kind}",
            "turns": trajectory.turns,
            "bad_actions": trajectory.bad_actions,
            "metrics": dict(trajectory.metrics),
            "timings": dict(trajectory.timings),
            **tokens,
            "text": "".join(texts),
            # left out where each token is one character
            **({} if all(len(text) == 1 for text in texts) else {"token_chars": [len(text) for text in texts]}),
        }


def _tokens(segment: Segment, encode: Encode) -> dict[str, Any]:
    ids: list[int] = []
    logprobs: list[float | None] = []
    kept: list[float | None] = []
    mask: list[int] = []
    spans: list[list[int]] = []
    for piece in segment.pieces:
        encoded = _encoded(piece, encode)
        n = piece.n_tokens
        ids += encoded.ids
        mask += [int(piece.sampled)] * n
        logprobs += _rounded(encoded.logprobs, n)
        kept += _rounded(encoded.log_kept_mass, n)
        for span in piece.spans:
            if spans and spans[-1][0] == span.version:
                spans[-1][1] += span.n_tokens
            else:
                spans.append([span.version, span.n_tokens])
    row: dict[str, Any] = {"ids": ids, "rollout_logprobs": logprobs, "loss_mask": mask, "spans": spans}
    if any(value is not None for value in kept):
        row["log_kept_mass"] = kept
    return row


def _encoded(piece: Tokens, encode: Encode) -> Encoded:
    encoded = encode(piece.payload)
    for name, values in zip(Encoded._fields, encoded, strict=True):
        if values is not None and len(values) != piece.n_tokens:
            raise InvariantBroken(f"a piece of {piece.n_tokens} tokens has {len(values)} {name}")
    return encoded


def _rounded(values: Sequence[float] | None, n: int) -> list[float | None]:
    return [None] * n if values is None else [round(float(value), LOGPROB_DECIMALS) for value in values]


def read_trajectories(path: Path, on_torn: Callable[[Torn], None] = log_torn) -> Iterator[dict[str, Any]]:
    """Rows as written. A torn last line is handed to `on_torn` and left out. Raises StoreError."""
    return read_rows(path, on_torn)
