"""Seconds of prompts and of decoding by kind of engine, from the cost models: a `core.profile.Profile` that costs a look-up.

Invariant: amounts are looked up on geometric grids, the same for all kinds, so that kinds are compared at the same amounts; a
step's cost is worked out once for each place of the grid. Why: a decision is made for every turn, and a cost model takes longer
than the decision may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.perf.serving import Server

GRID = 1.25
"""Ratio of neighbouring amounts: what differs by less is the same to a choice between kinds of device."""
LEAST_TOKENS = 16.0
"""Shorter prompts and contexts cost what these do."""
EXACT_LIVE = 256
"""So many live sequences, and fewer, are not rounded where they decode: what one more costs is the difference of neighbours."""
FEW_LIVE = 16.0
"""The same where a prompt is read beside them."""


@dataclass(slots=True)
class ServedProfile:
    """By kind of engine, a server of that kind."""

    servers: Mapping[str, Server]
    _steps: dict[tuple[str, float, float, float], float] = field(default_factory=dict)

    def prefill_s(self, kind: str, tokens: float, *, live: float, context: float) -> float:
        chunk = min(_near(tokens, LEAST_TOKENS), self.servers[kind].step_tokens)
        n = live if live <= FEW_LIVE else _near(live, FEW_LIVE)
        n, attended = float(round(n)), _near(context, LEAST_TOKENS)
        added = self._step_s(kind, n, attended, chunk) - (self._step_s(kind, n, attended, 0.0) if n else 0.0)
        return max(0.0, added) * tokens / chunk

    def decode_s(self, kind: str, *, live: float, context: float) -> float:
        return self._step_s(kind, _live(live), _near(context, LEAST_TOKENS), 0.0)

    def _step_s(self, kind: str, live: float, context: float, prefill: float) -> float:
        key = (kind, live, context, prefill)
        found = self._steps.get(key)
        if found is None:
            # what is read attends to what is there before it: half of the context on average
            found = self._steps[key] = self.servers[kind].whole_step_s(live, context, prefill, context / 2.0)
        return found


def _near(amount: float, least: float) -> float:
    """The next amount on the grid."""
    return least if amount <= least else least * GRID ** round(math.log(amount / least) / math.log(GRID))


def _live(live: float) -> float:
    return float(round(live)) if live <= EXACT_LIVE else float(round(_near(live, float(EXACT_LIVE))))
