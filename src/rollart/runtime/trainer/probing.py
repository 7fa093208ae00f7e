"""The trainer's scores of the fixed prompts by which an engine without comparable tensors is checked (`runtime.probe`)."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.runtime.probe import prompts
from rollart.runtime.trainer.rank import TrainerRank
from rollart.runtime.trainer.rows import Row, pad


def trainer_scores(trainer: TrainerRank) -> tuple[float, ...]:
    """Log-probabilities at temperature 1 of all prompts' tokens but the first ones, in order. A collective of all ranks."""
    asked = prompts(trainer.policy.hf.config.vocab_size)
    with torch.no_grad():
        found, _ = trainer.forward(pad([_row(ids) for ids in asked]), with_entropy=False, temperature=1.0)
        scores = cast("list[float]", found.tolist())
    trainer.reshard()
    return tuple(scores)


def _row(ids: NDArray[np.int64]) -> Row:
    n = len(ids) - 1
    return Row(ids=ids[:-1], positions=np.arange(n), targets=ids[1:], behaviour=np.zeros(n, np.float32))
