"""The faults of a cluster against the rest of its configuration: what cannot be, and what the figures then rest on.

Invariant: a law or a scripted fault that is accepted can hit something, and what it hits can come back within the deadlines
that control has for it; all else is refused before the first event, with the nearest value that can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.config import nearest
from rollart.config.faults import (
    NO_FAULTS,
    FaultsConfig,
    LostEngines,
    LostHosts,
    LostNode,
    LostRewards,
    LostTrainer,
    LostWeights,
    ScriptedFault,
)
from rollart.config.placement import layout, placements
from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError
from rollart.core.types import Role
from rollart.perf.memory import OPTIMIZER_BYTES

HOUR_S, DAY_S = 3600.0, 86400.0
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """What of a run can fail, and what its trainer writes down of itself."""

    nodes: Mapping[str, int]
    """Pool -> nodes, of pools that sample or train."""
    home: tuple[str, ...]
    """Those of them that the trainer is on."""
    engines: Mapping[str, int]
    """Pool -> engines."""
    hosts: int
    first: Mapping[Role, int]
    """Role -> workers that the run begins with."""
    scored: bool
    """Whether there is a reward service."""
    pulled: bool
    """Whether weights go over a network."""
    parameters: int

    @property
    def checkpoint_bytes(self) -> float:
        """16-bit weights, and what the optimizer keeps in full."""
        return self.parameters * (2 + OPTIMIZER_BYTES)

    def checkpoint_s(self, faults: FaultsConfig) -> float:
        """Writing or reading a checkpoint, each node of the trainer its own part."""
        nodes = sum(self.nodes[pool] for pool in self.home)
        return self.checkpoint_bytes / (nodes * faults.trainer.disk_gbyte_per_s * GB)


def exposed(config: RunConfig, *, scored: bool, pulled: bool, parameters: int) -> Exposed:
    """Of a configuration whose pools and placements are checked."""
    pools, places = layout(config), placements(config)
    return Exposed(
        nodes={name: pool.nodes for name, pool in pools.items() if set(pool.roles) != {"score"}},
        home=tuple(name for name, pool in pools.items() if "train" in pool.roles),
        engines=Counter(place.pool for place in places if place.role != "train"), hosts=config.envs.hosts,
        first=Counter([place.role for place in places] + ["env"] * config.envs.hosts), scored=scored, pulled=pulled,
        parameters=parameters,
    )  # fmt: skip


def trainer_fails(faults: FaultsConfig, of: Exposed) -> bool:
    """Whether it can be lost, by itself or with a node."""
    scripted = any(
        isinstance(one, LostTrainer) or (isinstance(one, LostNode) and one.pool in of.home)
        for one in faults.script.values()
    )
    return bool(faults.trainer.mtbf_s or faults.node.mtbf_s or scripted)


def _nodes_fail(faults: FaultsConfig) -> bool:
    return bool(faults.node.mtbf_s) or any(isinstance(one, LostNode) for one in faults.script.values())


# --- what cannot be ------------------------------------------------------------------------------------------------------


def check_faults(config: RunConfig, of: Exposed) -> None:
    """Raises ConfigError with a line for each fault that cannot be."""
    faults = config.cluster.faults
    if faults == NO_FAULTS:
        return
    problems = [*_needs(config, faults, of), *_too_late(config, faults, of)]
    for name, one in faults.script.items():
        problems += [f"cluster.faults.script.{name}: {text}" for text in _script_problems(one, of)]
    if problems:
        raise ConfigError("\n".join(problems))


def _needs(config: RunConfig, faults: FaultsConfig, of: Exposed) -> Iterable[str]:
    """Laws of what is not there."""
    if faults.rewards.mtbf_s and not of.scored:
        yield (
            f"cluster.faults.rewards.mtbf_s={faults.rewards.mtbf_s:g}: no task is scored by a service; use "
            "cluster.faults.rewards.mtbf_s=0"
        )
    if faults.weights.failed_share and not of.pulled:
        yield (
            f"cluster.faults.weights.failed_share={faults.weights.failed_share:g}: engines and trainer share their devices, no "
            "weights are pulled; use cluster.faults.weights.failed_share=0"
        )
    if not config.checkpoint.every and trainer_fails(faults, of):
        yield (
            "checkpoint.every=0 with a trainer that can be lost (cluster.faults): there would be nothing to bring another one "
            "back from; use checkpoint.every=1 or more"
        )


def _too_late(config: RunConfig, faults: FaultsConfig, of: Exposed) -> Iterable[str]:
    """Replacements that control gives up before they are there."""
    limits, nodes_fail = config.deadlines, _nodes_fail(faults)
    node_s = faults.node.replace_s if nodes_fail and faults.node.replaced else 0.0
    after = " after cluster.faults.node.replace_s" if node_s else ""
    starts = [("engine", faults.engine.start_s)]
    if trainer_fails(faults, of):
        starts.append(("trainer", faults.trainer.start_s))
    for what, start_s in starts:
        if limits.start_s < node_s + start_s:
            yield (
                f"deadlines.start_s={limits.start_s:g} is shorter than what a lost worker takes to be replaced, "
                f"cluster.faults.{what}.start_s{after}, {node_s + start_s:g} s; use deadlines.start_s="
                f"{int(node_s + start_s) + 1} or more"
            )
    if limits.start_s < faults.env_host.start_s:
        yield (
            f"deadlines.start_s={limits.start_s:g} is shorter than cluster.faults.env_host.start_s="
            f"{faults.env_host.start_s:g}; use deadlines.start_s={int(faults.env_host.start_s) + 1} or more"
        )
    checkpoint_s = of.checkpoint_s(faults)
    if trainer_fails(faults, of) and limits.train_s < checkpoint_s:
        yield (
            f"deadlines.train_s={limits.train_s:g} is shorter than loading a checkpoint of {of.checkpoint_bytes / GB:.0f} GB "
            f"at cluster.faults.trainer.disk_gbyte_per_s={faults.trainer.disk_gbyte_per_s:g}, {checkpoint_s:.0f} s; use "
            f"deadlines.train_s={int(checkpoint_s) + 1} or more"
        )


def _script_problems(one: ScriptedFault, of: Exposed) -> Iterable[str]:
    match one:
        case LostEngines() if one.pool and one.pool not in of.engines:
            yield f"pool={one.pool} has no engines{nearest.among(one.pool, of.engines)}"
        case LostEngines():
            there, where = sum(of.engines.values()), ""
            if one.pool:
                there, where = of.engines[one.pool], f" in pool {one.pool}"
            yield from _too_many(one.count, there, f"engines{where}")
        case LostHosts():
            yield from _too_many(one.count, of.hosts, "hosts (envs.hosts)")
        case LostNode() if one.pool not in of.nodes:
            yield f"pool={one.pool} has no nodes that sample or train{nearest.among(one.pool, of.nodes)}"
        case LostNode() if one.number >= of.nodes[one.pool]:
            most = of.nodes[one.pool] - 1
            yield f"number={one.number}: nodes of pool {one.pool} are counted from 0 to {most}; use number={most}"
        case LostRewards() if not of.scored:
            yield "kind=rewards: no task is scored by a service; leave it out"
        case LostWeights() if not of.pulled:
            yield "kind=weights: engines and trainer share their devices, no weights are pulled; leave it out"
        case _:
            return


def _too_many(count: int, there: int, what: str) -> Iterable[str]:
    if count > there:
        yield f"count={count}: there are {there} {what}; use count={there} or fewer"


# --- what the figures rest on --------------------------------------------------------------------------------------------


def fault_lines(config: RunConfig, of: Exposed) -> list[str]:
    """A line for each law that is in force, and one for what is scripted."""
    faults, lines = config.cluster.faults, list[str]()
    seconds = f"{faults.engine.start_s:g} s and the weights by cluster.link" if faults.engine.replaced else ""
    engines, nodes = sum(of.engines.values()), sum(of.nodes.values())
    lines += _law("engine", engines, faults.engine.mtbf_s, seconds)
    back = f"{faults.node.replace_s:g} s" if faults.node.replaced else ""
    lines += _law("node", nodes, faults.node.mtbf_s, back)
    seconds = f"{faults.env_host.start_s:g} s" if faults.env_host.replaced else ""
    lines += _law("env host", of.hosts, faults.env_host.mtbf_s, seconds)
    if trainer_fails(faults, of):
        lines += _law("trainer", 1, faults.trainer.mtbf_s, f"{faults.trainer.start_s:g} s")
        lines.append(
            f"checkpoints: every {config.checkpoint.every} steps {of.checkpoint_bytes / GB:.0f} GB, written and loaded in "
            f"{of.checkpoint_s(faults):.1f} s ({faults.trainer.disk_gbyte_per_s:g} GB/s for each of the trainer's nodes); a "
            "lost trainer repeats the steps since"
        )
    if faults.weights.failed_share:
        lines.append(f"faults of weights: {faults.weights.failed_share:.2%} of a node's pulls fail at their end")
    if faults.rewards.mtbf_s:
        lines.append(
            f"faults of rewards: the service is away for {faults.rewards.outage_s:g} s, {_span(faults.rewards.mtbf_s)} from "
            "one outage to the next on average (exponential)"
        )
    if faults.script:
        said = "; ".join(f"{name} ({one.kind} at {one.at_s:g} s)" for name, one in faults.script.items())
        lines.append(f"scripted faults: {said}")
    return lines


def _law(what: str, n: int, mtbf_s: float, replaced: str) -> list[str]:
    if not mtbf_s:
        return []
    among = f", so one of {n} every {_span(mtbf_s / n)}" if n > 1 else ""
    back = f"another is there after {replaced}" if replaced else "nobody takes its place"
    whose = f"{what}s: each" if what != "trainer" else "the trainer: it"
    return [f"faults of {whose} fails every {_span(mtbf_s)} on average (exponential){among}; {back}"]


def _span(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:.1f} days"
    return f"{seconds / HOUR_S:.1f} h" if seconds >= 2 * HOUR_S else f"{seconds:.0f} s"
