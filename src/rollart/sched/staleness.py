"""Bounded staleness: may a group start (admission), may it be trained (release), can it still be (early abort).

Staleness of a trajectory = trainer's version when it is trained - version of its oldest trained token; a group has its
oldest member's. Invariant: what `release` returns is within the bound, whatever finished first. Admission alone does not
give that when batches take whatever finished first; release alone wastes what was admitted too early.
Versions here are counted in batches: where numbers were skipped, `Lineage` translates.
Source: RollArt section on bounded staleness (M8); design section 4.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.core.errors import InvariantBroken
from rollart.core.types import Version

NO_BOUND = 1 << 40
"""A staleness that no run reaches."""


@dataclass(slots=True, kw_only=True)
class Window:
    """Admission: groups open + buffered + in training stay within (max_staleness + 1) batches, redundant groups beside.

    Counted in groups, each for `group_size` trajectories; extra members and replacements of a member count nothing more.
    """

    groups_per_batch: int
    max_staleness: int
    redundant_groups: int = 0
    bounded: bool = True
    """False: the bound is checked here only, as AReaL does; what was admitted is trained however old it has become."""
    open: int = 0
    buffered: int = 0
    training: int = 0

    @property
    def outstanding(self) -> int:
        return self.open + self.buffered + self.training

    @property
    def oldest_trained(self) -> int:
        """Staleness beyond which nothing is trained."""
        return self.max_staleness if self.bounded else NO_BOUND

    @property
    def capacity(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_batch

    def room(self, *, batches_left: int) -> int:
        """How many groups may open now. Never more than the batches still wanted can use. O(1)."""
        wanted = min(self.capacity, batches_left * self.groups_per_batch)
        return max(0, wanted + self.redundant_groups - self.outstanding)

    def opened(self) -> None:
        self.open += 1

    def completed(self) -> None:
        self._take("open")
        self.buffered += 1

    def released(self, groups: int) -> None:
        self._take("buffered", groups)
        self.training += groups

    def published(self, groups: int) -> None:
        self._take("training", groups)

    def dropped(self, state: str) -> None:
        """A group left from `open` or `buffered` untrained."""
        self._take(state)

    def _take(self, state: str, groups: int = 1) -> None:
        left = getattr(self, state) - groups
        if left < 0:
            raise InvariantBroken(f"staleness window: {groups} groups cannot leave {state}={getattr(self, state)}")
        setattr(self, state, left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """How many batches are behind each version. Numbers are never reused, so weights that are published again after a
    rollback or a restart get a new one, and numbers in between are skipped: staleness counts batches, not numbers.
    """

    jumps: tuple[tuple[Version, Version], ...] = ()
    """(version, number under which the same weights were published again), both rising."""

    def batches(self, version: Version) -> int:
        """Batches that the weights of `version` were trained on."""
        return version - sum(again - version_of for version_of, again in self.jumps if again <= version)

    def first(self, batches: int) -> Version:
        """The lowest version that was trained on as many batches or more."""
        version = batches
        for version_of, again in self.jumps:
            if version > version_of:
                version += again - version_of
        return version

    def again(self, version: Version, number: Version) -> Lineage:
        """The same weights as `version` are published again as `number`."""
        return Lineage(jumps=(*self.jumps, (version, number)))


def staleness(trained_at: Version, oldest: Version) -> int:
    """Versions between the trainer when it trains a trajectory and the trajectory's oldest trained token."""
    return trained_at - oldest


def oldest_allowed(next_release: Version, max_staleness: int) -> Version:
    """The oldest version under which a token may still be sampled to be trained at the next release."""
    return next_release - max_staleness


def hopeless(oldest: Version | None, next_release: Version, max_staleness: int) -> bool:
    """Early abort: not even an immediate finish could be released. None: nothing sampled yet, so nothing is old."""
    return oldest is not None and staleness(next_release, oldest) > max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A complete group that waits for release."""

    group: str
    task: str
    order: int
    """Counter of admission; older groups have lower ones."""
    oldest: Version | None
    """None: its trajectories hold no sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    groups: tuple[str, ...] = ()
    """The batch, oldest first; empty: not yet."""
    stale: tuple[str, ...] = ()
    """Groups past the bound: they can never be trained."""
    missing: Mapping[str, int]
    """Groups that each task still owes this batch."""


def release(ready: Sequence[Ready], *, version: Version, max_staleness: int, quota: Mapping[str, int]) -> Release:
    """Choose the batch to be trained at `version`: oldest first, within the bound, exactly the quota of every task.

    A slow task holds the batch back until its quota is there; what finished early waits. O(n log n) in ready groups.
    """
    stale = tuple(r.group for r in ready if hopeless(r.oldest, version, max_staleness))
    fresh = sorted(
        (r for r in ready if not hopeless(r.oldest, version, max_staleness)),
        key=lambda r: (version if r.oldest is None else r.oldest, r.order),
    )
    left = dict(quota)
    chosen: list[str] = []
    for candidate in fresh:
        if left.get(candidate.task, 0) > 0:
            left[candidate.task] -= 1
            chosen.append(candidate.group)
    missing = {task: n for task, n in left.items() if n > 0}
    return Release(groups=() if missing else tuple(chosen), stale=stale, missing=missing)
