"""How often a batch leaves for a process, and answers leave from it: what goes together costs one message.

Pure numbers, which the real line and the simulated one both go by. A message costs 0.2 to 0.35 ms of CPU over both processes
(a Ray call: 1.8 to 3 ms), most of it for waking the one that sleeps. Invariant: nothing waits after a quiet moment, and no
answer waits for longer than `LEAST_ANSWER_PAUSE_S` or a share of what answers take on average. Why a share: quick turns must
not be kept waiting, and slow ones can leave in company.
"""

from __future__ import annotations

PAUSE_S = 0.002
"""Least time between two batches to one process: what a wave of answers sets off goes together."""
LEAST_ANSWER_PAUSE_S, MOST_ANSWER_PAUSE_S = 0.002, 0.02
"""Bounds of the time between two answers; beyond the upper one there is little left to save."""
ANSWER_SHARE = 0.25
"""Of what an answer takes on average to come up: waiting for others to go with it makes a turn longer by an eighth."""
NEWEST_SHARE = 0.05
"""Weight of the newest answer in the mean time that one takes: it follows the last twenty or so."""


def answer_pause_s(mean_s: float) -> float:
    """Least time between two answers of a process that takes `mean_s` from an item to its answer."""
    return min(MOST_ANSWER_PAUSE_S, max(LEAST_ANSWER_PAUSE_S, ANSWER_SHARE * mean_s))


def newer_mean_s(mean_s: float, seconds: float) -> float:
    """The mean after one more answer, which took `seconds`."""
    return mean_s + NEWEST_SHARE * (seconds - mean_s)
