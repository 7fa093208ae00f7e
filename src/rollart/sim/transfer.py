"""How long new weights are on their way from a simulated trainer to what its engines serve.

Owns the three legs of RollArt's cross-cluster path (arXiv 2512.22560, M9): one push into a store beside the engines, one pull
per node of engines into its host's memory, one load into the devices at the apply. Push and pull go on beside rollout and the
next step, so only the load is exposed. Invariants: the naive way takes push + pull; what is exposed is never more than the
pull; engines of one node share one pull of a version, whoever asks first.

An engine of several tensor-parallel ranks takes longer for the same bytes, both times: the host cuts each rank's slices out of
whole buckets. With the defaults of `LinkConfig` the paper's table for 8B, 14B and 32B (1, 2 and 4 ranks) comes out within 15 %.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.config.cluster import LinkConfig
from rollart.core.types import Version

GB = 1e9
GBIT = 1e9 / 8
VERSIONS_IN_MEMORY = 2
"""Pulled versions that a node keeps in its host's memory; RollArt keeps two."""
COLLECTIVE_SHARE = 0.5
"""Of a network's rate that resharding from a trainer's layout to an engine's reaches where both are on the same devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPath:
    """Seconds of one version by leg, for an engine of `tp` tensor-parallel ranks."""

    push_s: float
    pull_s: float
    load_s: float

    @property
    def naive_s(self) -> float:
        """What nothing hides: push and pull in turn."""
        return self.push_s + self.pull_s

    @property
    def exposed_s(self) -> float:
        """What an engine stands still for."""
        return min(self.load_s, self.pull_s)


def buckets(weight_bytes: float, link: LinkConfig) -> int:
    return max(1, math.ceil(weight_bytes / (link.bucket_gbyte * GB)))


def weight_path(weight_bytes: float, link: LinkConfig, *, tp: int = 1) -> WeightPath:
    """The legs of a version of `weight_bytes` over `link`.

    A leg takes the bytes over its slowest part, and a latency per bucket. Only the push crosses the network between pools.
    """
    latency_s = buckets(weight_bytes, link) * link.latency_s
    push_rate = min(link.gbit_per_s * GBIT, link.push_gbyte_per_s * GB)
    slices_s = weight_bytes / (link.slice_gbyte_per_s * GB) if tp > 1 else 0.0
    pull_s = weight_bytes / (link.pull_gbyte_per_s * GB) + slices_s + latency_s
    load_s = weight_bytes / (link.load_gbyte_per_s * GB) + slices_s
    return WeightPath(push_s=weight_bytes / push_rate + latency_s, pull_s=pull_s, load_s=min(load_s, pull_s))


def offload_s(weight_bytes: float, devices: int, link: LinkConfig) -> float:
    """What a publish costs the trainer: each of its devices hands its share to its host; the push goes on beside it."""
    return weight_bytes / devices / (link.load_gbyte_per_s * GB)


def same_devices(weight_bytes: float, ranks: int, network_bytes_per_s: float) -> WeightPath:
    """Weights of a trainer whose devices the engine shares: no store, each rank gathers its part over the network."""
    return WeightPath(
        push_s=0.0, pull_s=0.0, load_s=weight_bytes / ranks / (COLLECTIVE_SHARE * network_bytes_per_s)
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Pull:
    ends_s: float
    nth: int
    """Of the node's pulls, counted from 0."""
    whole: bool | None = None
    """Known at its end."""


@dataclass(slots=True)
class NodePulls:
    """What one node of engines has pulled, or is pulling. `spoils`: nth pull of the node -> it fails, at its end."""

    spoils: Callable[[int], bool] = field(default=lambda nth: False)
    pulls: dict[Version, _Pull] = field(default_factory=dict)
    _begun: int = 0

    async def pull(self, version: Version, seconds: float) -> bool:
        """Have the version in the host's memory; the first to ask starts the pull, others wait for its end.

        False: it failed, for all who waited for it; who asks again starts another.
        """
        now = asyncio.get_running_loop().time()
        pull = self.pulls.get(version)
        if pull is None or pull.whole is False:
            pull = self.pulls[version] = _Pull(now + seconds, self._begun)
            self._begun += 1
            for old in sorted(self.pulls)[:-VERSIONS_IN_MEMORY]:
                del self.pulls[old]
        if pull.ends_s > now:
            await asyncio.sleep(pull.ends_s - now)
        if pull.whole is None:
            pull.whole = not self.spoils(pull.nth)
        return pull.whole

    def forget(self) -> None:
        """The host's memory is gone."""
        self.pulls.clear()
