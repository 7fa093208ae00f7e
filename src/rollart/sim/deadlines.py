"""Deadlines that end what is only slow: the laws of the tasks beside the limits of the calls.

Invariant: a call that a deadline ends more often than once in a hundred times is named, with the limit that would let it end by
itself. Why: a run whose scores time out looks like one whose scorer fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollart.config.schema import Deadlines, RunConfig
from rollart.sim.laws import Law
from rollart.sim.loads import is_scored
from rollart.sim.workload import Draws, Workload

SELDOM = 0.01
"""Share of calls that a deadline may end without a word."""
PLACES = 400
"""Places of a law at which it is asked."""


def deadline_notes(config: RunConfig, draws: Mapping[str, Draws]) -> list[str]:
    """A line for each kind of call of a task that a deadline ends too often."""
    lines = []
    for name, own in draws.items():
        for what, key, law in _calls(own.load):
            limit_s = _limit_s(config.deadlines, key)
            late = share_above(law, limit_s)
            if late > SELDOM:
                enough_s = int(law.at(1.0 - SELDOM)) + 1
                lines.append(
                    f"tasks.{name}: {100 * late:.0f} % of its {what} take longer than deadlines.{key}={limit_s:g} and end as "
                    f"failures; use deadlines.{key}={enough_s} or more"
                )
    return lines


def _calls(load: Workload) -> Iterable[tuple[str, str, Law]]:
    yield "set-ups", "env_open_s", load.open_s
    if load.storm is not None and load.storm.chance:
        yield "set-ups in a storm", "env_open_s", load.storm.seconds
    yield "steps", "env_step_s", load.step_s
    if is_scored(load):
        yield "scores", "score_s", load.score_s


def _limit_s(limits: Deadlines, key: str) -> float:
    return {"env_open_s": limits.env_open_s, "env_step_s": limits.env_step_s, "score_s": limits.score_s}[key]


def share_above(law: Law, limit: float) -> float:
    """Of the draws of a law, how many are above a limit."""
    return sum(law.at((place + 0.5) / PLACES) > limit for place in range(PLACES)) / PLACES
