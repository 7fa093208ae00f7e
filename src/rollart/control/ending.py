"""How an attempt's end stands in the record: one event, computed from the trajectory alone.

Invariant: whoever ends an attempt - the attempt itself, or the run that gives it up - records the same fields.
"""

from __future__ import annotations

from rollart.core.errors import describe
from rollart.core.types import Trajectory

ENDED = "traj_finished"
"""The event that ends an attempt."""


def ending(trajectory: Trajectory) -> dict[str, object]:
    """Of the event that ends an attempt."""
    why = {} if trajectory.failure is None else {"failure": describe(trajectory.failure)}
    spans = trajectory.spans
    return dict(
        group=trajectory.group_id, task=trajectory.instance.task, purpose=trajectory.instance.purpose,
        status=trajectory.status, cause=trajectory.finish_cause, reward=trajectory.reward, turns=trajectory.turns,
        bad_actions=trajectory.bad_actions, sampled=sum(span.n_tokens for span in spans),
        context=sum(segment.n_tokens - segment.shared_tokens for segment in trajectory.segments),
        oldest_version=spans[0].version if spans else None, newest_version=spans[-1].version if spans else None,
        spans=len(spans), metrics=dict(trajectory.metrics),
        seconds={name: round(value, 6) for name, value in trajectory.timings.items()}, **why,
    )  # fmt: skip
