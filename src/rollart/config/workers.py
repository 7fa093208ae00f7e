"""What does the work, and for how long it may, as configuration: trainer, env hosts, deadlines, failures,
evaluation, the world. See `schema.py` for the whole.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.config.node import Node
from rollart.config.virtual import TrainPlan


class TrainerConfig(Node):
    """The processes that train."""

    ranks: int = Field(default=1, ge=1)
    """Processes that share the parameters and the samples (FSDP2)."""
    threads: int = Field(default=1, ge=1)
    """torch threads per rank."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Padded tokens of one forward pass; changes memory and speed, never the gradient."""
    bucket_bytes: int = Field(default=16 << 20, ge=1)
    """Weights are published in pieces of this size; any size gives the same weights."""
    plan: TrainPlan = TrainPlan()
    log_entropy: bool = True
    """Report the policy's entropy; costs no peak memory."""
    native: Literal["auto", "off", "required"] = "auto"
    """Whether layers are computed by the functions that the C compiler of the machine makes, between their matrix products
    (fp32 on a CPU): where there is one, never, or always, so that a trainer without it does not start."""


class EnvHostConfig(Node):
    """The processes that run environments and scorers."""

    hosts: int = Field(default=1, ge=1)
    sessions_per_host: int = Field(default=1024, ge=1)
    """Environments open at once in one host."""
    score_concurrency: int = Field(default=32, ge=1)
    """Scorer calls at once."""


class Deadlines(Node):
    """Seconds. Every wait has one."""

    env_open_s: float = Field(default=30.0, gt=0)
    """Opening an environment, its first observation included."""
    env_step_s: float = Field(default=30.0, gt=0)
    """One call of an environment."""
    turn_s: float = Field(default=120.0, gt=0)
    """One generation, re-sends included."""
    score_s: float = Field(default=30.0, gt=0)
    """One call of a scorer."""
    trajectory_s: float = Field(default=300.0, gt=0)
    """The whole life of an attempt: set-up, turns, scoring and teardown."""
    batch_s: float = Field(default=600.0, gt=0)
    """The watchdog: longest wait of the trainer for a batch."""
    weights_s: float = Field(default=120.0, gt=0)
    """One publish, prefetch or apply."""
    pinned_s: float = Field(default=120.0, gt=0)
    """How long live pinned requests (evaluation) may delay an apply."""
    train_s: float = Field(default=600.0, gt=0)
    """One call of the trainer."""
    prepare_s: float = Field(default=900.0, gt=0)
    """Baselines and warm start together."""
    start_s: float = Field(default=180.0, gt=0)
    """Starting one worker."""


class Retry(Node):
    """The same instance and member again, after a back-off; then `then`."""

    kind: Literal["retry"] = "retry"
    max_retries: int = Field(default=3, ge=0)
    backoff_s: float = Field(default=0.1, ge=0)
    """Wait before the first retry."""
    backoff_factor: float = Field(default=2.0, ge=1)
    """Each wait is this many times the one before."""
    backoff_max_s: float = Field(default=60.0, ge=0)
    then: Literal["replace", "drop", "fail"] = "drop"
    """What happens when the retries are used up."""


class Replace(Node):
    """Give the group up; another instance of the same task takes its place."""

    kind: Literal["replace"]


class Drop(Node):
    """The group goes on without this member, down to min_group_size; below that it is replaced."""

    kind: Literal["drop"]


class Fail(Node):
    """The run ends with this failure."""

    kind: Literal["fail"]


class FailurePolicy(Node):
    """What follows when an attempt fails for a reason that is not the policy's."""

    on_failure: Annotated[Retry | Replace | Drop | Fail, Field(discriminator="kind")] = Retry()
    min_group_size: int = Field(default=2, ge=1)
    """Members that a group needs to be trained."""
    give_up_after: int = Field(default=64, ge=1)
    """Failures of one task in a row, with no trajectory of it done between them, after which the run may end."""
    give_up_s: float = Field(default=120.0, ge=0)
    """For how long they must have gone on before it does: an outage that is shorter costs time, not the run."""
    restarts: int = Field(default=8, ge=0)
    """Restarts in place of one lost worker, with no step trained between them, before it is given up; the run ends when
    that was the last of its role."""


class BaselineConfig(Node):
    """What no learning reaches, measured before training: random actions, the best constant answer."""

    episodes: int = Field(default=256, ge=1)
    """Random episodes per task that are scored. Constant answers are tried on all instances, up to a fixed number."""


class WarmStart(Node):
    """Supervised steps on transcripts of random moves: the format, never the answer."""

    steps: int = Field(default=100, ge=0)
    episodes: int = Field(default=512, ge=1)
    """Random episodes per task."""
    batch: int = Field(default=64, ge=1)
    """Transcripts per step."""
    lr: float = Field(default=3e-3, gt=0)


class EvalConfig(Node):
    """Success of a pinned version, apart from training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations while training; 0: only before and after."""
    episodes: int = Field(default=256, ge=0)
    """Per task and evaluation; 0: no evaluation."""
    concurrency: int = Field(default=128, ge=1)
    """Episodes at once."""
    greedy: bool = True
    """Score the final weights greedily as well."""


class CheckpointConfig(Node):
    """What is kept of a run while it goes on, so that it can be resumed and a lost trainer restarted."""

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: none, and a lost trainer ends the run. Batches since the last one stay in memory."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints that stay; a newer one takes the place of the oldest."""


class LocalWorld(Node):
    """A Ray cluster on this machine, started and stopped by the run."""

    kind: Literal["local"] = "local"
    object_store_mb: int = Field(default=512, ge=80)
    """Ray's shared memory for weights on their way."""


class InlineWorld(Node):
    """Everything in this process, without Ray: nothing overlaps, every part can be stepped through in a debugger."""

    kind: Literal["inline"]
