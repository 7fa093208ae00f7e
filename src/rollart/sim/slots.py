"""Which devices of a simulated cluster are taken, by whom, and on which node they stand.

Invariant: a device is in one lease at a time; what is asked beyond the pool's devices is refused with its name and numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
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
    """Free devices by pool, the lowest first, so that leases of one size never straddle nodes that they need not."""

    sizes: Mapping[str, PoolSize]
    _free: dict[str, list[int]] = field(default_factory=dict)
    _taken: dict[str, list[tuple[str, list[int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = {name: list(range(size.devices)) for name, size in self.sizes.items()}

    def take(self, lease: str, wanted: Mapping[str, int]) -> tuple[str, ...] | Failure:
        """Devices as `pool/node/place`, those of the first pool of `wanted` first."""
        for pool, n in wanted.items():
            if pool not in self.sizes:
                known = ", ".join(self.sizes) or "none"
                return failure("cluster", "no_room", f"there is no pool {pool!r}; pools: {known}", retryable=False)
            free, size = len(self._free[pool]), self.sizes[pool].devices
            if n > free:
                return failure("cluster", "no_room", f"pool {pool} has {free} of {size} devices free, {n} are needed")
        parts = [(pool, [heapq.heappop(self._free[pool]) for _ in range(n)]) for pool, n in wanted.items()]
        self._taken[lease] = parts
        return tuple(self._name(pool, index) for pool, part in parts for index in part)

    def _name(self, pool: str, index: int) -> str:
        node, place = divmod(index, self.sizes[pool].devices_per_node)
        return f"{pool}/{node}/{place}"

    def give_back(self, lease: str) -> None:
        """Idempotent."""
        for pool, part in self._taken.pop(lease, ()):
            for index in part:
                heapq.heappush(self._free[pool], index)
