"""Task mixing: every task keeps its share of what is *trained*, over a window of steps, whatever fails or is slow.

One deterministic sequence of tasks (stride scheduling: the task furthest behind its share is next) gives both the quota of
each batch and the next group to open, so the two can never disagree. Invariant: after n groups of the sequence, every
task's count is within one group of its share for two tasks, and within (tasks - 1) in general.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def next_task(shares: Mapping[str, float], counts: Mapping[str, int]) -> str:
    """The task furthest behind its share when one more group is added; ties go to the first named."""
    total = sum(shares.values())
    n = sum(counts.get(task, 0) for task in shares) + 1
    return max(shares, key=lambda task: shares[task] / total * n - counts.get(task, 0))


@dataclass(slots=True)
class Mix:
    """Quotas per batch and the task of the next group. `shares` need not sum to 1."""

    shares: Mapping[str, float]
    groups_per_batch: int
    _quotas: list[dict[str, int]] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    def quota(self, batch: int) -> Mapping[str, int]:
        """Groups that each task has in the `batch`-th batch (0-based); sums to `groups_per_batch`."""
        while len(self._quotas) <= batch:
            quota = dict.fromkeys(self.shares, 0)
            for _ in range(self.groups_per_batch):
                task = next_task(self.shares, self._counts)
                self._counts[task] = self._counts.get(task, 0) + 1
                quota[task] += 1
            self._quotas.append(quota)
        return self._quotas[batch]

    def next(self, trained_or_outstanding: Mapping[str, int]) -> str:
        """The task of the next group to open, given groups per task that were trained or may still be.

        A dropped group leaves the count, so its task is next again and no task loses its share to failures.
        """
        return next_task(self.shares, trained_or_outstanding)
