"""What may enter the engine, and in which order.

Owns the requests that wait. Invariant: a request is admitted only under a version that it allows: not older than `min_version`,
and exactly `pin` where that is set. One that needs a newer version is held aside and blocks nobody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import failure
from rollart.core.types import Failure, TurnRequest, Version
from rollart.runtime.engine.slots import MAX_STOP_IDS, Row

MIN_TEMPERATURE = 1e-3
"""Below, scaled logits leave the range of float32; 0 is greedy and takes no division."""
MAX_TOP_K = 2**31 - 1


class WaitingRoom:
    """Requests that are not live: ready ones by priority and arrival, and those held for a newer version."""

    def __init__(self) -> None:
        self._ready: dict[int, Row] = {}
        self._order: list[tuple[int, int]] = []
        self._held: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._held)

    def __iter__(self) -> Iterator[Row]:
        yield from self._ready.values()
        yield from self._held.values()

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    def put(self, row: Row, version: Version) -> Failure | None:
        """Let a row wait while `version` is served; the failure says why it cannot."""
        request = row.request
        if request.pin is not None and request.pin < version:
            return failure(
                "engine", "refused", f"pinned to version {request.pin}, but version {version} is served already"
            )
        if max(request.min_version, request.pin or 0) > version:
            self._held[row.arrival] = row
        else:
            self._ready[row.arrival] = row
            heapq.heappush(self._order, (-request.priority, row.arrival))
        return None

    def first(self) -> Row | None:
        """The next row to admit: highest priority, then longest here."""
        while self._order:
            row = self._ready.get(self._order[0][1])
            if row is not None:
                return row
            heapq.heappop(self._order)
        return None

    def discard(self, row: Row) -> None:
        """The row waits no more. The heap's entry is dropped when it comes up, so this costs O(1)."""
        self._ready.pop(row.arrival, None)
        self._held.pop(row.arrival, None)

    def sort_again(self, version: Version) -> list[tuple[Row, Failure]]:
        """After `version` was applied: held rows that it frees become ready; what it makes impossible is returned."""
        rows = list(self)
        self._ready, self._order, self._held = {}, [], {}
        sorted_in = [(row, self.put(row, version)) for row in rows]
        return [(row, refused) for row, refused in sorted_in if refused is not None]


def refusal(request: TurnRequest, ids: NDArray[np.int32], *, vocab: int, row_tokens: int) -> Failure | None:
    """Why this engine can never serve the request, or None. `row_tokens` is the longest sequence it can hold."""
    context, sampling, total = request.context.n_tokens, request.sampling, len(ids) + request.max_tokens
    if context != len(ids):
        why = f"context has {context} tokens but {len(ids)} ids"
    elif not len(ids) or request.max_tokens < 1:
        why = f"{len(ids)} tokens of context and max_tokens={request.max_tokens}: each must be 1 or more"
    elif total > row_tokens:
        why = (
            f"context {context} + max_tokens {request.max_tokens} = {total} tokens, but a sequence may have {row_tokens} here "
            "(the least of the engine's room, engine.max_model_len and the model's positions)"
        )
    elif ids.view(np.uint32).max() >= vocab:  # negative ids are the largest ones
        why = f"token ids from {ids.min()} to {ids.max()}, the vocabulary has 0 to {vocab - 1}"
    elif sampling.temperature != 0.0 and not MIN_TEMPERATURE <= sampling.temperature < inf:
        why = f"temperature={sampling.temperature} is neither 0 (greedy) nor at least {MIN_TEMPERATURE}"
    elif not (0.0 < sampling.top_p <= 1.0 and 0 <= sampling.top_k <= MAX_TOP_K):
        why = f"top_p={sampling.top_p} is not in (0, 1] or top_k={sampling.top_k} is not in 0..{MAX_TOP_K}"
    elif not 0.0 <= sampling.min_p <= 1.0:
        why = f"min_p={sampling.min_p} is not in 0..1"
    elif len(sampling.stop_ids) > MAX_STOP_IDS or not all(0 <= stop < vocab for stop in sampling.stop_ids):
        why = f"stop_ids={sampling.stop_ids}: at most {MAX_STOP_IDS} ids, each in the vocabulary of {vocab}, can be watched for"
    else:
        return None
    return failure("engine", "refused", why, retryable=False)
