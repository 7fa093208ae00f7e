"""Which devices of a simulated cluster are taken, by whom, and on which node they stand.

Invariants: a device is in one lease at a time; a worker that has room on one node stands on one, a larger one has whole nodes
to begin with; what is asked beyond the pool's devices is refused with its name and numbers.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.core.errors import failure
from rollart.core.types import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    devices: int
    devices_per_node: int


def node_of(device: str) -> str:
    """`pool/node` of a device as `Slots.take` names it."""
    return device.rpartition("/")[0]


@dataclass(slots=True)
class Slots:
    """Free devices by pool and node; the lowest go first."""

    sizes: Mapping[str, PoolSize]
    out: set[str] = field(default_factory=set)
    """Nodes (`pool/node`) that are away: their devices are taken where no other will do."""
    _free: dict[str, list[list[int]]] = field(default_factory=dict)
    """Pool -> the free devices of each of its nodes, in order."""
    _taken: dict[str, list[tuple[str, list[int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            starts = range(0, size.devices, size.devices_per_node)
            self._free[name] = [list(range(at, min(size.devices, at + size.devices_per_node))) for at in starts]

    def take(self, lease: str, wanted: Mapping[str, Sequence[int]]) -> tuple[str, ...] | Failure:
        """Devices as `pool/node/place`, those of the first pool of `wanted` first.

        `wanted`: pool -> how many devices each of the lease's workers there takes.
        """
        parts: list[tuple[str, list[int]]] = []
        for pool, workers in wanted.items():
            for n in workers:
                part = self._worker(pool, n) if pool in self.sizes else None
                if part is None:
                    self._put_back(parts)
                    return self._no_room(pool, workers)
                parts.append((pool, part))
        self._taken[lease] = parts
        return tuple(self._name(pool, index) for pool, part in parts for index in part)

    def _worker(self, pool: str, n: int) -> list[int] | None:
        """The devices of one worker, or none where it would have to straddle nodes."""
        nodes, per_node = self._free[pool], self.sizes[pool].devices_per_node
        if self.out:
            away = [f"{pool}/{number}" in self.out for number in range(len(nodes))]
            nodes = [node for node, out in sorted(zip(nodes, away, strict=True), key=lambda pair: pair[1])]
        if n <= per_node:
            found = next(([node] for node in nodes if len(node) >= n), None)
        else:
            whole = [node for node in nodes if len(node) == per_node]
            needed = -(-n // per_node)
            found = whole[:needed] if len(whole) >= needed else None
        if found is None:
            return None
        part: list[int] = []
        for node in found:
            few = n - len(part)
            part += node[:few]
            del node[:few]
        return part

    def _no_room(self, pool: str, workers: Sequence[int]) -> Failure:
        if pool not in self.sizes:
            known = ", ".join(self.sizes) or "none"
            return failure("cluster", "no_room", f"there is no pool {pool!r}; pools: {known}", retryable=False)
        free, size, n = sum(map(len, self._free[pool])), self.sizes[pool].devices, sum(workers)
        apart = "" if n > free else f", {max(workers)} of them on one node or on whole ones"
        return failure("cluster", "no_room", f"pool {pool} has {free} of {size} devices free, {n} are needed{apart}")

    def _name(self, pool: str, index: int) -> str:
        node, place = divmod(index, self.sizes[pool].devices_per_node)
        return f"{pool}/{node}/{place}"

    def give_back(self, lease: str) -> None:
        """Idempotent."""
        self._put_back(self._taken.pop(lease, ()))

    def _put_back(self, parts: Iterable[tuple[str, list[int]]]) -> None:
        for pool, part in parts:
            for index in part:
                bisect.insort(self._free[pool][index // self.sizes[pool].devices_per_node], index)
