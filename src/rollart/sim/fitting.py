"""Simulated engines on the devices of their leases: whole ones, and those whose prefill and decode halves are apart.

Owns what an engine of a lease is made of. Invariants: engines on one node share what they pull of a version; the two halves of
a split engine stand behind one port and take devices of both pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.config.cluster import LinkConfig
from rollart.config.placement import Half
from rollart.config.virtual import ModelledEngine
from rollart.core.errors import failure
from rollart.core.resources import Degrees, EngineInfo, Lease
from rollart.core.types import Failure, Role, TurnRequest, Version
from rollart.perf.rooflines import WEIGHT_BYTES
from rollart.sim.batching import Batching
from rollart.sim.engine import EngineModel
from rollart.sim.hardware import EngineHardware
from rollart.sim.pace import Pace
from rollart.sim.prefixes import Prefixes
from rollart.sim.slots import PoolSize, node_of
from rollart.sim.split import KvMove, split_pace
from rollart.sim.transfer import GBIT, NodePulls, WeightPath
from rollart.sim.workload import Draws
from rollart.sim.world import Fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The workers of one split engine."""

    prefill: Half
    decode: Half


@dataclass(slots=True, kw_only=True)
class Fitting:
    """Engines by pool; `halves` where a pool's engines are split."""

    engine: ModelledEngine
    link: LinkConfig
    sizes: Mapping[str, PoolSize]
    engines: Mapping[str, EngineHardware]
    paths: Mapping[str, WeightPath]
    draws: Mapping[str, Draws]
    halves: Halves | None = None
    nodes: dict[str, NodePulls] = field(default_factory=dict)
    """`pool/node` -> what it has pulled."""
    spoils: Callable[[str, int], bool] | None = None
    """(node, nth of its pulls) -> this one fails; None: none does."""

    def takes(self, role: Role, pool: str, degrees: Degrees) -> Mapping[str, Sequence[int]]:
        """How many devices of which pools each part of a worker takes.

        The trainer's are its own: a pool that trains and one for rewards have no other role, but for engines in turn with it.
        """
        if role in ("train", "env", "score"):
            return {}
        if role == "decode" and self.halves is not None:
            workers = {half.pool: half.workers for half in (self.halves.prefill, self.halves.decode)}
            return {name: (self.engines[name].ranks,) * n for name, n in workers.items()}
        return {pool: (self.engines[pool].ranks if pool in self.engines else degrees.tp * degrees.pp,)}

    def fit(self, lease: Lease) -> Fitted:
        """The engine of a lease."""
        hardware, own = self.engines[lease.pool], self.engine
        split = self.halves if lease.role == "decode" else None
        path = self.paths[lease.pool]
        node = node_of(lease.devices[0])
        pulls = self.nodes.setdefault(node, self._pulls(node, path))

        async def pull(version: Version) -> Failure | None:
            whole = await pulls.pull(version, path.pull_s)
            return None if whole else failure("store", "torn", f"the pull of version {version} by node {node} failed")

        def pace(info: EngineInfo, prefixes: Prefixes) -> Pace:
            if split is not None:
                return self._split(split, prefixes)
            return Batching(hardware.cost, hardware.rules, evict=prefixes.evict, idle=lambda: prefixes.idle_tokens)

        model = EngineModel(
            pushed=path.push_s > 0, pull=pull, apply_s=path.load_s, length=self._length, shares=own.prefix_cache,
            caches=own.prefix_cache, sleep_s=own.sleep_s, wake_s=own.wake_s, pace=pace,
        )  # fmt: skip
        return Fitted(model=model, kv_tokens=hardware.kv_tokens * (split.decode.workers if split is not None else 1))

    def _pulls(self, node: str, path: WeightPath) -> NodePulls:
        """What is not pulled over a network does not fail on it."""
        spoils = self.spoils
        if spoils is None or not path.pull_s:
            return NodePulls()
        return NodePulls(lambda nth: spoils(node, nth))

    def forget(self, node: str) -> None:
        """The node is lost, with what it has pulled."""
        if node in self.nodes:
            self.nodes[node].forget()

    def _split(self, halves: Halves, prefixes: Prefixes) -> Pace:
        read, decode = self.engines[halves.prefill.pool], self.engines[halves.decode.pool]
        return split_pace(
            read_cost=read.cost, read_rules=read.rules, readers=halves.prefill.workers, decode_cost=decode.cost,
            decode_rules=decode.rules, decoders=halves.decode.workers, move=self._move(read), prefixes=prefixes,
        )  # fmt: skip

    def _move(self, read: EngineHardware) -> KvMove:
        """Keys and values cross the network between pools; a worker has its ranks' share of its node's link."""
        cost = read.cost.server.cost
        share = min(1.0, read.ranks / self.sizes[read.pool].devices_per_node)
        return KvMove(
            bytes_per_token=cost.shape.kv_bytes_per_token(WEIGHT_BYTES[cost.kv_dtype]),
            bytes_per_s=share * self.link.gbit_per_s * GBIT, latency_s=self.link.latency_s, layers=cost.shape.layers,
        )  # fmt: skip

    def _length(self, request: TurnRequest) -> int:
        return self.draws[request.domain].sampled_tokens(request)
