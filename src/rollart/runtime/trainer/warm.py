"""Warm start: supervised steps on transcripts, so that reinforcement learning starts from the format of the tasks.

Owns nothing that lasts: its optimiser is thrown away, and neither steps nor versions are counted. All ranks draw the same
batches from the seed, each trains its share of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import TrainerError
from rollart.core.seeds import rng
from rollart.learn.batching import split
from rollart.runtime.trainer import ranks
from rollart.runtime.trainer.rank import TrainerRank
from rollart.runtime.trainer.rows import Row, pad

TEMPERATURE = 1.0
"""Transcripts are fitted as they are, whatever the temperature of later sampling."""
GRAD_CLIP = 1.0
REPORTED_STEPS = 10
"""The reported loss is the mean over this many last steps."""


class Transcript(NamedTuple):
    """What an episode looks like."""

    ids: NDArray[np.integer]
    """(n_tokens,)"""
    sampled: NDArray[np.bool_]
    """(n_tokens,) true for the tokens that the policy would have written."""


def warm_start(
    trainer: TrainerRank, transcripts: Sequence[Transcript], *, steps: int, batch: int, lr: float, seed: int
) -> dict[str, float]:
    """`steps` AdamW steps on the mean log-loss of the sampled tokens of `batch` transcripts each.

    Returns `loss` (nats per token, last steps), `tokens` (trained), `steps` and `seconds`. A collective.
    Raises TrainerError when the transcripts hold nothing to train.
    """
    began_s = time.perf_counter()
    rows = [_row(transcript) for transcript in transcripts]
    rows = [row for row in rows if len(row.targets)]
    if steps and not rows:
        raise TrainerError(f"none of the {len(transcripts)} warm-start transcripts holds a token to train")
    optimizer = trainer.new_optimizer(lr)
    losses: list[float] = []
    tokens = 0
    for step in range(steps):
        drawn = rng(seed, "warm_start", step).choices(range(len(rows)), k=batch)
        of_step = sum(len(rows[index].targets) for index in drawn)
        losses.append(_step(trainer, [rows[index] for index in drawn], of_step))
        optimizer.step()
        optimizer.zero_grad()
        tokens += of_step
    last = losses[-REPORTED_STEPS:]
    return {
        "loss": sum(last) / len(last) if last else float("nan"),
        "tokens": float(tokens),
        "steps": float(steps),
        "seconds": time.perf_counter() - began_s,
    }


def _step(trainer: TrainerRank, rows: Sequence[Row], tokens: int) -> float:
    """Gradients of one batch; the mean loss over all ranks."""
    settings = trainer.spec.trainer
    parts = split([len(row.ids) for row in rows], ranks=settings.ranks, micro_batch_tokens=settings.micro_batch_tokens)
    summed = 0.0
    for micro_batch in parts[trainer.rank]:
        padded = pad([rows[index] for index in micro_batch])
        loss = -trainer.forward(padded, with_entropy=False, temperature=TEMPERATURE)[0].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        summed += float(loss.detach())
    trainer.clip_gradients(settings.ranks / tokens, GRAD_CLIP)
    return ranks.total(summed) / tokens


def _row(transcript: Transcript) -> Row:
    """The first token is never trained: nothing stands before it."""
    ids = np.asarray(transcript.ids, np.int64)
    places = np.flatnonzero(transcript.sampled[1:]) + 1
    return Row(
        ids=ids[: places[-1]] if len(places) else ids[:0],
        positions=places - 1,
        targets=ids[places],
        behaviour=np.full(len(places), np.nan, np.float32),
    )
