"""What goes wrong by itself in a simulated cluster, as configuration: lives of workers, transfers that fail, outages.

Nothing here can be had on real devices: `rollart train` refuses it. Invariant: the defaults are a cluster in which nothing
ever fails. How long a replacement takes is an assumption of these defaults and of no source; see `schema.py` for the whole.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.config.node import Node


class EngineFaults(Node):
    """Engines whose process dies."""

    mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time between failures of one engine, exponential; 0: none dies by itself, else at least 1."""
    start_s: float = Field(default=60.0, ge=0)
    """From a loss, however it came, until another process is up; its weights come after that, by cluster.link."""
    replaced: bool = True
    """False: nobody comes in the place of a lost engine."""


class NodeFaults(Node):
    """Nodes that are lost with all that runs on them; in the trainer's pool each takes the trainer with it."""

    mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time between failures of one node, exponential; 0: none is lost by itself, else at least 1."""
    replace_s: float = Field(default=90.0, ge=0)
    """From the loss until it is back, or another in its place; what ran on it starts after that."""
    replaced: bool = True
    """False: a lost node never comes back."""


class HostFaults(Node):
    """Environment hosts (`envs.hosts`) that die with their sessions."""

    mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time between failures of one host, exponential; 0: none dies by itself, else at least 1."""
    start_s: float = Field(default=10.0, ge=0)
    """From a loss until another host is up."""
    replaced: bool = True
    """False: nobody comes in the place of a lost host."""


class TrainerFaults(Node):
    """The trainer that dies, and comes back from its last checkpoint (`checkpoint.every`)."""

    mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time between failures of the trainer as a whole, exponential; 0: it does not die by itself, else at least 1."""
    start_s: float = Field(default=60.0, ge=0)
    """From a loss until another one is up and can load the checkpoint."""
    disk_gbyte_per_s: float = Field(default=2.0, gt=0)
    """What one of its nodes writes of a checkpoint, or reads."""


class WeightFaults(Node):
    """Transfers of weights that fail at their end, and are begun again."""

    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Of the pulls of a version by a node of engines."""


class RewardFaults(Node):
    """Outages of the reward service: calls fail at once, those under way too."""

    mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time from the end of one to the beginning of the next, exponential; 0: there are none, else at least 1."""
    outage_s: float = Field(default=60.0, gt=0)
    """How long one lasts."""


class LostEngines(Node):
    """Engines die at a given time."""

    kind: Literal["engine"]
    at_s: float = Field(gt=0)
    """Seconds after the run began, as for all of these."""
    pool: str = ""
    """Empty: any."""
    count: int = Field(default=1, ge=1)
    """Of those that live, the first that started."""


class LostNode(Node):
    """A node is lost at a given time."""

    kind: Literal["node"]
    at_s: float = Field(gt=0)
    pool: str
    number: int = Field(default=0, ge=0)
    """Of the pool's nodes, counted from 0."""


class LostHosts(Node):
    """Environment hosts die at a given time."""

    kind: Literal["env_host"]
    at_s: float = Field(gt=0)
    count: int = Field(default=1, ge=1)
    """Of those that live, the first that started."""


class LostTrainer(Node):
    """The trainer dies at a given time."""

    kind: Literal["trainer"]
    at_s: float = Field(gt=0)


class LostWeights(Node):
    """Every transfer of weights that ends within a given time fails."""

    kind: Literal["weights"]
    at_s: float = Field(gt=0)
    lasts_s: float = Field(gt=0)


class LostRewards(Node):
    """The reward service is away for a given time."""

    kind: Literal["rewards"]
    at_s: float = Field(gt=0)
    lasts_s: float = Field(gt=0)


ScriptedFault = Annotated[
    LostEngines | LostNode | LostHosts | LostTrainer | LostWeights | LostRewards, Field(discriminator="kind")
]


class FaultsConfig(Node):
    """What fails, how often, and how long it takes to be replaced. By default nothing does."""

    engine: EngineFaults = EngineFaults()
    node: NodeFaults = NodeFaults()
    env_host: HostFaults = HostFaults()
    trainer: TrainerFaults = TrainerFaults()
    weights: WeightFaults = WeightFaults()
    rewards: RewardFaults = RewardFaults()
    script: dict[str, ScriptedFault] = Field(default_factory=dict)
    """Faults at given times, by names of your own."""


NO_FAULTS = FaultsConfig()
