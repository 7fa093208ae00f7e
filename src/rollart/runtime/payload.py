"""What the opaque `Tokens.payload` is in this world: the token ids and, for sampled tokens, their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollart.core.types import Segment

INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPayload:
    """Arrays of one piece, all of the piece's `n_tokens` length."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    """`rollout_logprobs`: under the sampling version, after temperature, before truncation. None: not sampled."""
    log_kept_mass: NDArray[np.float32] | None = None
    """Log of the probability mass that truncation (top-p, top-k, min-p) kept; None: nothing was truncated."""


def ids_of(segment: Segment) -> NDArray[np.int32]:
    """All token ids of a segment, shape (n_tokens,); nobody writes into them, they may be a piece's own."""
    parts = [piece.payload.ids for piece in segment.pieces if isinstance(piece.payload, TokenPayload)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
