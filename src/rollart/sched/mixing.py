"""Task mixing: every task keeps its share of what is *trained*, over a window of steps, whatever fails or is slow.

One deterministic sequence of tasks (stride scheduling: the task furthest behind its share is next) gives the quota of each
batch; the next group to open is always of a task that the earliest unfilled batch still lacks. Invariants: after n groups
of the sequence, every task's count is within one group of its share for two tasks, and within (tasks - 1) in general; a
window that is full holds exactly the quotas of the coming batches, whatever was dropped and opened again in between, so a
full window can never lack a task that a batch waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEPT_BATCHES = 64
"""Batches whose quotas stay at hand: more than a staleness window spans, so none is counted twice in a run."""


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
    _totals: list[dict[str, int]] = field(default_factory=list)
    """Sum of the quotas up to and with each batch."""
    _first: int = 0
    """The batch that both lists begin with: they hold the latest only, however many batches a run has."""

    def quota(self, batch: int) -> Mapping[str, int]:
        """Groups that each task has in the `batch`-th batch (0-based); sums to `groups_per_batch`."""
        if batch < self._first:  # nobody asks so far back but a reader of a whole run: counted again from the beginning
            self._quotas, self._totals, self._first = [], [], 0
        while self._first + len(self._quotas) <= batch:
            if len(self._quotas) == 2 * KEPT_BATCHES:
                del self._quotas[:KEPT_BATCHES], self._totals[:KEPT_BATCHES]
                self._first += KEPT_BATCHES
            before = self._totals[-1] if self._totals else dict.fromkeys(self.shares, 0)
            total = dict(before)
            for _ in range(self.groups_per_batch):
                total[next_task(self.shares, total)] += 1
            self._totals.append(total)
            self._quotas.append({task: total[task] - before[task] for task in self.shares})
        return self._quotas[batch - self._first]

    def next(self, trained_or_outstanding: Mapping[str, int]) -> str:
        """The task of the next group to open, given groups per task that were trained or may still be.

        A dropped group leaves the count, so the batch that it was meant for lacks its task again and gets it first. Within
        a batch tasks fill up evenly. O(batches in the window x tasks).
        """
        counts = trained_or_outstanding
        batch = sum(counts.get(task, 0) for task in self.shares) // self.groups_per_batch
        while batch > 0 and self._lacks(batch - 1, counts):
            batch -= 1
        lacking, quota = self._lacks(batch, counts), self.quota(batch)
        return max(lacking, key=lambda task: lacking[task] / quota[task])

    def _lacks(self, batch: int, counts: Mapping[str, int]) -> dict[str, int]:
        """Groups of each task that the batches up to `batch` still want."""
        self.quota(batch)
        wanted = {task: total - counts.get(task, 0) for task, total in self._totals[batch - self._first].items()}
        return {task: n for task, n in wanted.items() if n > 0}
