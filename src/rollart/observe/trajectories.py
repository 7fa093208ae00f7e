"""Trajectories on disk: `trajectories.jsonl`, one row per segment, enough to train or read them again.

Invariants: `ids`, `loss_mask` and (where present) `rollout_logprobs`, `log_kept_mass` have one length; `spans` sum to the
number of ones in `loss_mask`. A row stands as long as the event that ended its trajectory does: each has that event's `seq`,
and a mark `{"resumed": true, "from_seq": n}` takes back every row above it whose `seq` is beyond n. Payloads are opaque
here: the world that made them says how to read them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollart.core.errors import InvariantBroken
from rollart.core.types import Segment, Tokens, Trajectory
from rollart.observe.jsonl import LineWriter, Torn, log_torn, parse, raw_lines, to_line
from rollart.observe.log import Event

RESUMED = b'{"resumed"'
"""How a mark begins."""

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
    """Give it to a world as `keep`, and its `note` as a sink. Takes terminal trajectories without waiting; encodes and
    writes them in a thread.

    Raises StoreError from the next call or from `close` when a write or an encoding failed.
    """

    def __init__(self, path: Path, encode: Encode, pieces: Pieces, *, append: bool = False) -> None:
        def lines(item: tuple[Trajectory, int] | Mapping[str, Any]) -> bytes:
            if isinstance(item, Mapping):
                return to_line(item)
            return b"".join(to_line(row) for row in rows_of(item[0], encode, pieces, item[1]))

        self._lines = LineWriter(path, lines, append=append)
        self._ended: dict[str, tuple[int, int]] = {}
        """Trajectory -> the attempt that ended last and the event that said so."""
        self._seq = 0

    @property
    def cut(self) -> Torn | None:
        """The torn last line that was cut off when the file was opened."""
        return self._lines.cut

    def note(self, event: Event) -> None:
        """Take every event of the run, in order: from it comes each row's `seq`."""
        self._seq, kind = event["seq"], event["kind"]
        if kind == "traj_finished":
            self._ended[event["traj"]] = event["attempt"], self._seq
        elif kind == "resumed":
            self._ended.clear()
            self._lines.put({"resumed": True, "from_seq": event["data"]["from_seq"]})

    def __call__(self, trajectory: Trajectory) -> None:
        attempt, seq = self._ended.pop(trajectory.id, (trajectory.attempt, self._seq))
        self._lines.put((trajectory, seq if attempt == trajectory.attempt else self._seq))

    def flush(self) -> None:
        """Return when all that was handed over is on disk. Blocks: for a thread. Raises StoreError."""
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


def rows_of(trajectory: Trajectory, encode: Encode, pieces: Pieces, seq: int = 0) -> Iterator[dict[str, Any]]:
    """One row per segment; a trajectory without any has one row without tokens. `seq`: of the event that ended it."""
    for index, segment in enumerate(trajectory.segments or (Segment(),)):
        tokens = _tokens(segment, encode)
        texts = pieces(tokens["ids"])
        yield {
            "traj": trajectory.id,
            "attempt": trajectory.attempt,
            "seq": seq,
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
    mask[: segment.shared_tokens] = [0] * min(segment.shared_tokens, len(mask))
    for span in segment.spans:
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


class Standing:
    """Which rows of a file were not taken back: one look at its marks."""

    __slots__ = ("_from_seqs", "_offsets")

    def __init__(self, path: Path) -> None:
        """Raises StoreError when the file cannot be read."""
        marks = [
            (offset, int(parse(path, offset, line)["from_seq"]))
            for offset, line in raw_lines(path, lambda torn: None)
            if line.startswith(RESUMED)
        ]
        self._offsets = [offset for offset, _ in marks]
        self._from_seqs: list[int] = []
        for _, from_seq in reversed(marks):
            self._from_seqs.insert(0, min([from_seq, *self._from_seqs[:1]]))

    def has(self, offset: int, row: Mapping[str, Any]) -> bool:
        """Whether the row at this byte stands."""
        after = bisect.bisect_right(self._offsets, offset)
        return after == len(self._offsets) or int(row.get("seq", 0)) <= self._from_seqs[after]


def read_trajectories(path: Path, on_torn: Callable[[Torn], None] = log_torn) -> Iterator[dict[str, Any]]:
    """The rows that stand, in order: what a resume took back is left out.

    A torn last line is handed to `on_torn` and left out. Raises StoreError.
    """
    standing = Standing(path)
    for offset, line in raw_lines(path, on_torn):
        if not line.startswith(RESUMED):
            row = parse(path, offset, line)
            if standing.has(offset, row):
                yield row
