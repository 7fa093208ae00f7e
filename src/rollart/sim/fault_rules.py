"""The faults of a cluster against the rest of its configuration: what cannot be, and what the figures then rest on.

Invariant: a law or a scripted fault that is accepted can hit something, leaves a run time for events of its own, and what it
hits can come back within the deadlines that control has for it, unless it is hit again meanwhile; all else is refused before
the first event, with the nearest value that can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
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
READABLE = 1e9
"""A number from here on is told by its power of ten."""
LEAST_MTBF_S = 1.0
"""Of anything: what fails more often does nothing else, and a log of it would fill the disk."""


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


def _scripted(faults: FaultsConfig, *kinds: type) -> bool:
    return any(isinstance(one, kinds) for one in faults.script.values())


def _nodes_fail(faults: FaultsConfig, pools: Collection[str]) -> bool:
    """Whether a node of these pools can be lost."""
    scripted = any(isinstance(one, LostNode) and one.pool in pools for one in faults.script.values())
    return bool(faults.node.mtbf_s) or scripted


def trainer_fails(faults: FaultsConfig, of: Exposed) -> bool:
    """Whether it can be lost, by itself or with a node."""
    return bool(faults.trainer.mtbf_s) or _scripted(faults, LostTrainer) or _nodes_fail(faults, of.home)


def _engines_fail(faults: FaultsConfig, of: Exposed) -> bool:
    """Whether one can be lost: by itself, with a node, or because its weights do not come."""
    own = bool(faults.engine.mtbf_s or faults.weights.failed_share)
    return own or _scripted(faults, LostEngines, LostWeights) or _nodes_fail(faults, of.engines)


def _hosts_fail(faults: FaultsConfig) -> bool:
    return bool(faults.env_host.mtbf_s) or _scripted(faults, LostHosts)


# --- what cannot be ------------------------------------------------------------------------------------------------------


def check_faults(config: RunConfig, of: Exposed) -> None:
    """Raises ConfigError with a line for each fault that cannot be."""
    faults = config.cluster.faults
    if faults == NO_FAULTS:
        return
    problems = [*_too_often(faults), *_needs(config, faults, of), *_too_late(config, faults, of)]
    for name, one in faults.script.items():
        problems += [f"cluster.faults.script.{name}: {text}" for text in _script_problems(one, of)]
    if problems:
        raise ConfigError("\n".join(problems))


def _too_often(faults: FaultsConfig) -> Iterable[str]:
    """Means that leave no time between two faults."""
    means = {
        "engine": faults.engine.mtbf_s, "node": faults.node.mtbf_s, "env_host": faults.env_host.mtbf_s,
        "trainer": faults.trainer.mtbf_s, "rewards": faults.rewards.mtbf_s,
    }  # fmt: skip
    for what, mtbf_s in means.items():
        if 0 < mtbf_s < LEAST_MTBF_S:
            yield (
                f"cluster.faults.{what}.mtbf_s={mtbf_s:g} is less than {LEAST_MTBF_S:g} s: nothing else would happen; use "
                f"cluster.faults.{what}.mtbf_s={LEAST_MTBF_S:g} or more, or 0 for none"
            )


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


def _starts(faults: FaultsConfig, of: Exposed) -> Iterable[tuple[str, float, float]]:
    """Of each kind of worker that can be lost and is replaced: seconds until its node is there, seconds to start."""

    def node_s(pools: Collection[str]) -> float:
        return faults.node.replace_s if faults.node.replaced and _nodes_fail(faults, pools) else 0.0

    if _engines_fail(faults, of) and faults.engine.replaced:
        yield "engine", node_s(of.engines), faults.engine.start_s
    if trainer_fails(faults, of):
        yield "trainer", node_s(of.home), faults.trainer.start_s
    if _hosts_fail(faults) and faults.env_host.replaced:
        yield "env_host", 0.0, faults.env_host.start_s


def _too_late(config: RunConfig, faults: FaultsConfig, of: Exposed) -> Iterable[str]:
    """Replacements that control gives up before they are there, or in the instant in which they are."""
    limits = config.deadlines
    for what, node_s, start_s in _starts(faults, of):
        after = " after cluster.faults.node.replace_s" if node_s else ""
        if limits.start_s <= node_s + start_s:
            yield (
                f"deadlines.start_s={limits.start_s:g} is not longer than what a lost worker takes to be replaced, "
                f"cluster.faults.{what}.start_s{after}, {node_s + start_s:g} s; use deadlines.start_s="
                f"{_more(node_s + start_s)} or more"
            )
    checkpoint_s = of.checkpoint_s(faults)
    if trainer_fails(faults, of) and limits.train_s <= checkpoint_s:
        yield (
            f"deadlines.train_s={limits.train_s:g} is not longer than loading a checkpoint of {of.checkpoint_bytes / GB:.0f} "
            f"GB at cluster.faults.trainer.disk_gbyte_per_s={faults.trainer.disk_gbyte_per_s:g}, {checkpoint_s:.4g} s; use "
            f"deadlines.train_s={_more(checkpoint_s)} or more"
        )


def _more(seconds: float) -> str:
    """A round number above."""
    return f"{int(seconds) + 1}" if seconds < READABLE else f"{1.1 * seconds:.3g}"


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
    """A line for each law that is in force, for each replacement that may be needed, and one for what is scripted."""
    faults, usual = config.cluster.faults, NO_FAULTS
    lines, nodes = list[str](), sum(of.nodes.values())
    if _engines_fail(faults, of):
        back = f"{_seconds(faults.engine.start_s, usual.engine.start_s)} and the weights by cluster.link"
        engines = sum(of.engines.values())
        lines.append(_law("engine", engines, faults.engine.mtbf_s, back if faults.engine.replaced else ""))
    if _nodes_fail(faults, of.nodes):
        back = _seconds(faults.node.replace_s, usual.node.replace_s) if faults.node.replaced else ""
        lines.append(_law("node", nodes, faults.node.mtbf_s, back))
    if _hosts_fail(faults):
        back = _seconds(faults.env_host.start_s, usual.env_host.start_s) if faults.env_host.replaced else ""
        lines.append(_law("env host", of.hosts, faults.env_host.mtbf_s, back))
    if trainer_fails(faults, of):
        back = _seconds(faults.trainer.start_s, usual.trainer.start_s)
        lines += [_law("trainer", 1, faults.trainer.mtbf_s, back), _checkpoint_line(config, of)]
    if faults.weights.failed_share:
        lines.append(f"faults of weights: {faults.weights.failed_share:.2%} of a node's pulls fail at their end")
    if faults.rewards.mtbf_s:
        lines.append(
            f"faults of rewards: the service is away for {_seconds(faults.rewards.outage_s, usual.rewards.outage_s)}, "
            f"{_span(faults.rewards.mtbf_s)} from one outage to the next on average (exponential)"
        )
    if faults.script:
        lines.append(f"scripted faults: {'; '.join(f'{name} ({_told(one)})' for name, one in faults.script.items())}")
    return lines


def _law(what: str, n: int, mtbf_s: float, back: str) -> str:
    """How often each of `n` is lost by itself, where it is, and when another is there; `back` empty: never."""
    back = f"another is there after {back}" if back else "nobody takes its place"
    if not mtbf_s:
        return f"a lost {what}: {back}"
    among = f", so one of {n} every {_span(mtbf_s / n)}" if n > 1 else ""
    whose = f"{what}s: each" if what != "trainer" else "the trainer: it"
    return f"faults of {whose} fails every {_span(mtbf_s)} on average (exponential){among}; {back}"


def _checkpoint_line(config: RunConfig, of: Exposed) -> str:
    faults, every = config.cluster.faults, config.checkpoint.every
    rate = faults.trainer.disk_gbyte_per_s
    assumed = ", assumed" if rate == NO_FAULTS.trainer.disk_gbyte_per_s else ""
    return (
        f"checkpoints: every {'step' if every == 1 else f'{every} steps'} {of.checkpoint_bytes / GB:.0f} GB, written and "
        f"loaded in {of.checkpoint_s(faults):.1f} s ({rate:g} GB/s for each of the trainer's nodes{assumed}); a lost trainer "
        "repeats the steps since"
    )


def _told(one: ScriptedFault) -> str:
    """Kind, time, and whatever else is given of it."""
    more = {name: value for name, value in one if name not in ("kind", "at_s") and value != ""}
    said = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in more.items()]
    return ", ".join([f"{one.kind} at {one.at_s:g} s", *said])


def _seconds(seconds: float, usual: float) -> str:
    """A time of which the default, `usual`, is an assumption and of no source."""
    return f"{seconds:g} s" + (" (assumed)" if seconds == usual else "")


def _span(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        days = seconds / DAY_S
        return f"{days:.1f} days" if days < READABLE else f"{days:.3g} days"
    return f"{seconds / HOUR_S:.1f} h" if seconds >= 2 * HOUR_S else f"{seconds:.0f} s"
