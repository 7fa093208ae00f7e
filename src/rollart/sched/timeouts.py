"""Deadlines: every call gets the smaller of its own limit and what its trajectory has left.

A trajectory's whole life - set-up, turns, retries, scoring, teardown - has one deadline, so retries cannot multiply it.
"""

from __future__ import annotations

TEARDOWN_SHARE = 0.05
"""Part of a trajectory's life kept back for late answers and for closing its environment; the rest is for work."""
TEARDOWN_MAX_S = 10.0
"""No environment needs longer than this to close; longer lives need not keep more back."""


def work_deadline(started_s: float, life_s: float) -> float:
    """Absolute time by which a trajectory's work must be done, so that its teardown still fits into its life."""
    return started_s + life_s - _kept_back(life_s)


def answer_grace(life_s: float) -> float:
    """How much longer than its own deadline a call gets to answer that the deadline passed, before it counts as lost.

    Half of what is kept back: a call that nobody answers at the very end still leaves the other half for teardown.
    """
    return _kept_back(life_s) / 2


def _kept_back(life_s: float) -> float:
    return min(TEARDOWN_MAX_S, TEARDOWN_SHARE * life_s)


def call_deadline(now_s: float, limit_s: float, overall_s: float) -> float:
    """Absolute deadline of one call: its own limit, cut to the overall deadline."""
    return min(now_s + limit_s, overall_s)
