"""The zero-variance filter: may a complete group whose rewards are all equal be trained, or is another one opened for it?

Such a group teaches nothing under a group baseline, so the batch is in effect smaller; dropping it keeps the batch whole at
the price of more rollout (DAPO, section 3.2: dynamic sampling). Invariant: for each batch a task loses at most its allowance
of groups, and none once the trainer has waited for long, so a task that is solved or out of reach never holds a run up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

ROUNDING = 1e-9
"""Rewards whose spread is below this share of their size differ by rounding only: dividing by their deviation would make
full-size advantages out of noise."""

Verdict = Literal["keep", "drop", "spent"]


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether the rewards say nothing about which attempt was better; true of fewer than two."""
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= ROUNDING * max(abs(reward) for reward in rewards)


def verdict(rewards: Sequence[float], *, dropped: int, allowed: int, starved: bool) -> Verdict:
    """What becomes of a complete group, when its task has lost `dropped` of `allowed` groups since the last release.

    `keep`: it teaches something. `drop`: another one of the task takes its place. `spent`: it teaches nothing and is kept
    all the same, because the allowance is used up or the trainer has waited for long (`starved`).
    """
    if not equal_rewards(rewards):
        return "keep"
    return "spent" if starved or dropped >= allowed else "drop"


@dataclass(slots=True, kw_only=True)
class Filter:
    """Counts per task what was dropped for the batch that is being filled."""

    allowed: Mapping[str, int]
    """Groups that each task may lose for one batch."""
    patience_s: float
    """How long the trainer may wait for a batch before everything is kept."""
    batch: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    """Tasks whose exhaustion was said, and which have taught nothing since."""

    def choose(self, task: str, rewards: Sequence[float], *, batch: int, waited_s: float) -> Verdict:
        """Decide on a complete group, and remember it. O(members).

        `batch`: batches released so far; with each one every task has its whole allowance again. `waited_s`: how long the
        trainer has waited for this batch.
        """
        if batch != self.batch:
            self.batch = batch
            self.dropped.clear()
        dropped = self.dropped.get(task, 0)
        starved = waited_s >= self.patience_s
        found = verdict(rewards, dropped=dropped, allowed=self.allowed[task], starved=starved)
        if found == "drop":
            self.dropped[task] = dropped + 1
        elif found == "keep":
            self.told.discard(task)
        return found

    def first_time(self, task: str) -> bool:
        """Whether the exhaustion of a task has not been said yet; it has then."""
        if task in self.told:
            return False
        self.told.add(task)
        return True
