"""What one training step adds to a run's figures, and sums of such steps.

Invariant: a tally holds amounts (seconds, tokens, counts), never shares, so that tallies add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollart.observe.tally import Stat

TRAJECTORY = ("generation", "reset", "env_step", "reward", "weights", "waiting")
"""What a trajectory's time goes to: in an engine; opening and resetting its environment; the environment's replies; its
reward; standing still in an engine that changes its weights; and the rest: for an engine with room, at a barrier, closing."""
TRAINER = ("training", "weights", "waiting", "other")
"""What the trainer's time goes to: optimiser steps; publishing, and under `paper` standing by until engines serve the
version; waiting for a batch; checkpoints and whatever else stands between two steps."""
COUNTS = (
    "trajectories", "ended", "away", "trained_tokens", "sampled_tokens", "context_tokens", "prefilled_tokens",
    "rebuilt_tokens",
)  # fmt: skip

Amounts = dict[str, float]


@dataclass(slots=True)
class StepTally:
    """What one step adds; a window is the sum of its steps."""

    step_s: list[float] = field(default_factory=list)
    counts: Amounts = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    spent: Amounts = field(default_factory=lambda: dict.fromkeys(TRAJECTORY, 0.0))
    trainer: Amounts = field(default_factory=lambda: dict.fromkeys(TRAINER, 0.0))
    staleness: Stat = field(default_factory=Stat)
    failed: Amounts = field(default_factory=dict)
    turns: Amounts = field(default_factory=dict)
    """By pool, as the next three."""
    seen_s: Amounts = field(default_factory=dict)
    idle_s: Amounts = field(default_factory=dict)
    request_s: Amounts = field(default_factory=dict)

    def add(self, other: StepTally) -> None:
        self.step_s += other.step_s
        self.staleness.merge(other.staleness)
        for mine, theirs in (
            (self.counts, other.counts), (self.spent, other.spent), (self.trainer, other.trainer),
            (self.failed, other.failed), (self.turns, other.turns), (self.seen_s, other.seen_s),
            (self.idle_s, other.idle_s), (self.request_s, other.request_s),
        ):  # fmt: skip
            for name, amount in theirs.items():
                add_to(mine, name, amount)


def add_to(amounts: Amounts, name: str, amount: float = 1) -> None:
    """Add to one of them, from 0 where it is not there."""
    amounts[name] = amounts.get(name, 0) + amount
