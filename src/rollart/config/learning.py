"""How it is learned, as configuration: schedule, algorithm, optimiser, sampling. See `schema.py` for the whole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollart.config.node import Node, refuse


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


class Schedule(Node):
    """How much is trained, on how old data."""

    steps: int = Field(default=10, ge=1)
    """Batches that are trained; each is followed by one publish."""
    batch: int = Field(default=64, ge=1)
    """Trajectories that are trained together; a multiple of group_size."""
    group_size: int = Field(default=8, ge=1)
    """Attempts at one task instance; the unit of advantage."""
    steps_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps that a batch is split into; divides the groups of a batch."""
    max_staleness: int = Field(default=1, ge=0)
    """Hard bound: trainer's version when trained minus version of the oldest trained token. 0: synchronous."""
    sync_order: Literal["early", "paper"] = "early"
    """early: engines apply a version as soon as they hold it; paper: between get_batch and the train step (RollArt)."""
    redundancy: int = Field(default=0, ge=0)
    """Extra members per group; the group closes at group_size and aborts the rest."""
    redundant_groups: int = Field(default=0, ge=0)
    """Groups that may be open beyond the staleness window; what they over-produce is dropped."""
    enforce: Literal["admission_and_release", "admission"] = "admission_and_release"
    """Where the bound is checked. admission: at the start of a group only, as AReaL does, so that it does not hold when
    batches take whatever finished first; for comparison on virtual time, refused by `train`."""
    barrier: Literal["none", "turn"] = "none"
    """turn: all attempts that are open step their environments together, as batched environments do."""
    score: Literal["trajectory", "batch"] = "trajectory"
    """When rewards are asked for: as each trajectory ends, or when all that are open have."""
    colocated: bool = False
    """Engines and trainer take turns on the same devices: the train pool's kind samples as well, and sleeps while training
    runs. Needs max_staleness=0."""
    mix_window: int = Field(default=10, ge=1)
    """Steps over which each task's share of what is trained is kept and reported."""

    @property
    def groups_per_batch(self) -> int:
        return self.batch // self.group_size

    @property
    def groups_window(self) -> int:
        """Groups that may be open, buffered or in training at once (design: admission)."""
        return (self.max_staleness + 1) * self.groups_per_batch + self.redundant_groups

    @model_validator(mode="after")
    def _whole_groups(self) -> Schedule:
        whole = self.batch % self.group_size == 0
        low = self.batch // self.group_size * self.group_size
        near = " or ".join(str(n) for n in (low, low + self.group_size) if n > 0)
        refuse(
            None
            if whole
            else f"schedule.batch={self.batch} is not a multiple of schedule.group_size={self.group_size}; use {near}",
            "schedule.sync_order=paper with schedule.max_staleness=0: its engines are one version behind when a batch is "
            "taken; use max_staleness=1 for a one-off pipeline, or sync_order=early"
            if self.sync_order == "paper" and self.max_staleness == 0
            else None,
            f"schedule.colocated=true with schedule.max_staleness={self.max_staleness}: devices that take turns can never "
            "overlap rollout and training; use max_staleness=0, or colocated=false"
            if self.colocated and self.max_staleness
            else None,
            f"schedule.steps_per_batch={self.steps_per_batch} does not divide the {self.groups_per_batch} groups of a "
            f"batch; use {_divisors(self.groups_per_batch)}"
            if whole and self.groups_per_batch % self.steps_per_batch
            else None,
        )
        return self


class GroupBaseline(Node):
    """GRPO: reward minus the group's mean, divided by its deviation where `normalize_std` is true."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's deviation; false leaves the difference to the mean as it is."""


class LeaveOneOut(Node):
    """RLOO: reward minus the mean of the other members."""

    kind: Literal["rloo"]


class DrGRPO(Node):
    """Dr.GRPO: reward minus the group's mean, never divided: neither easy nor hard problems weigh more. Its other half is
    algorithm.loss.normalize=constant."""

    kind: Literal["dr_grpo"]


class ReinforcePP(Node):
    """REINFORCE++: the difference to a baseline, divided by its deviation over all trajectories of the batch."""

    kind: Literal["reinforce_pp"]
    baseline: Literal["group", "batch"] = "group"
    """group: the mean of the group, so equal rewards teach nothing; batch: the mean of the batch, which also works with
    schedule.group_size=1."""


Normalize = Literal["trajectory", "sequence", "token", "constant"]


class PPOClip(Node):
    """PPO's clipped objective, with a bound of its own on each side."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    eps_clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped below 1 - this."""
    eps_clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped above 1 + this."""
    normalize: Normalize = "trajectory"
    """trajectory: each trajectory weighs 1, spread evenly over its tokens; sequence: each trajectory weighs 1, spread evenly
    over its segments and then over their tokens; token: each token weighs 1; constant: each token weighs 1 / the longest
    response that a task allows (max_turns x max_tokens), and the loss is divided by trajectories (Dr.GRPO)."""


class Decoupled(Node):
    """Decoupled PPO (AReaL): the clip is around the proximal policy, the one with which the batch's first update begins (its
    log-probabilities are recomputed where there are several); how far sampling was from it is the affair of
    algorithm.correction, with a bound of its own."""

    kind: Literal["decoupled"]
    eps_clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio to the proximal policy is clipped below 1 - this."""
    eps_clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio to the proximal policy is clipped above 1 + this."""
    normalize: Normalize = "trajectory"
    """As under ppo_clip."""


class GSPO(Node):
    """GSPO: one ratio per trajectory, the geometric mean of those of its tokens, clipped as a whole."""

    kind: Literal["gspo"]
    eps_clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of a trajectory is clipped below 1 - this; means over many tokens lie close to 1."""
    eps_clip_high: float = Field(default=4e-4, gt=0)
    """The ratio of a trajectory is clipped above 1 + this."""
    normalize: Normalize = "trajectory"
    """As under ppo_clip; trajectory is GSPO's own."""


class CISPO(Node):
    """CISPO: the clipped ratio is a weight without gradient on the log-probability, so no token loses its gradient."""

    kind: Literal["cispo"]
    eps_clip_low: float = Field(default=1.0, gt=0, le=1)
    """The weight is at least 1 - this; 1: no lower bound, as in its paper."""
    eps_clip_high: float = Field(default=4.0, gt=0)
    """The weight is at most 1 + this."""
    normalize: Normalize = "token"
    """As under ppo_clip; token is CISPO's own."""


class NoCorrection(Node):
    """Log-probabilities of the engine are taken as the trainer's own."""

    kind: Literal["none"]


class ClipCorrection(Node):
    """No weight beside the loss: its own probability ratio is taken to the policy that sampled, so its clip bounds how far
    training goes from there, older weights included (PPO as published; the bypass mode of verl)."""

    kind: Literal["clip"] = "clip"
    cap: float = Field(default=3.0, gt=1)
    """Largest ratio up to which a token of a trajectory that did worse than its group is pushed down: the clip has no bound
    on that side (dual clip, Ye et al. 2020). The KL term weighs a token by its ratio up to this."""


class TruncatedIS(Node):
    """Truncated importance sampling between the engine's and the trainer's log-probabilities."""

    kind: Literal["tis"]
    cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token."""


class MaskedIS(Node):
    """Masked importance sampling (IcePop): a token is weighted within the bounds and out of the loss beyond them."""

    kind: Literal["masked"]
    low: float = Field(default=0.5, ge=0, lt=1)
    """Tokens with a smaller weight, old over behaviour probability, leave the loss."""
    high: float = Field(default=5.0, gt=1)
    """Tokens with a larger weight leave the loss."""


class NoReject(Node):
    """Every trajectory of a batch has its part in the loss."""

    kind: Literal["none"] = "none"


class GeometricReject(Node):
    """A whole trajectory leaves the loss when the geometric mean of old over behaviour probabilities is out of bounds; under
    correction.kind=clip, which has no old ones, of present over behaviour probabilities."""

    kind: Literal["geometric"]
    low: float = Field(default=0.9, ge=0, lt=1)
    """Smallest geometric mean."""
    high: float = Field(default=1.1, gt=1)
    """Largest geometric mean."""


class NoKL(Node):
    """Nothing holds the policy near where it began, and no copy of the weights is kept."""

    kind: Literal["none"] = "none"


class KL1(Node):
    """The plain difference of log-probabilities, differentiated as an expectation: its own gradient would have mean 0."""

    kind: Literal["k1"]
    coef: float = Field(default=1e-3, gt=0)
    """Weight of the term per sampled token. The trainer keeps the initial weights: 4 bytes per parameter, over the ranks."""


class KL2(Node):
    """Half the squared difference of log-probabilities: the gradient of k1, and never negative."""

    kind: Literal["k2"]
    coef: float = Field(default=1e-3, gt=0)
    """Weight of the term per sampled token. The trainer keeps the initial weights: 4 bytes per parameter, over the ranks."""


class KL3(Node):
    """r - 1 - ln r with r = reference over present probability: GRPO's own."""

    kind: Literal["k3"]
    coef: float = Field(default=1e-3, gt=0)
    """Weight of the term per sampled token. The trainer keeps the initial weights: 4 bytes per parameter, over the ranks."""


class Algorithm(Node):
    """What is learned from a batch."""

    advantage: Annotated[GroupBaseline | LeaveOneOut | DrGRPO | ReinforcePP, Field(discriminator="kind")] = (
        GroupBaseline()
    )
    loss: Annotated[PPOClip | Decoupled | GSPO | CISPO, Field(discriminator="kind")] = PPOClip()
    correction: Annotated[ClipCorrection | TruncatedIS | MaskedIS | NoCorrection, Field(discriminator="kind")] = (
        ClipCorrection()
    )
    reject: Annotated[NoReject | GeometricReject, Field(discriminator="kind")] = NoReject()
    mask_older_than: int = Field(default=-1, ge=-1)
    """Tokens sampled more versions ago than this leave the loss, when it is trained; they count for staleness all the same.
    -1: none."""
    kl: Annotated[NoKL | KL1 | KL2 | KL3, Field(discriminator="kind")] = NoKL()
    zero_variance: Literal["train", "drop"] = "train"
    """Groups whose rewards are all equal: train keeps them in the batch; drop opens others of the same task in their place
    (DAPO's dynamic sampling)."""
    refills: int = Field(default=10, ge=1)
    """Under zero_variance=drop: a task's groups that may be dropped for one batch, in multiples of its groups in a batch.
    Beyond them, and after half of deadlines.batch_s of waiting, the batch goes on with what it has."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus per sampled token; 0: none. It keeps groups from agreeing before they have learned."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted across the groups of a batch, so nothing can be learned."""

    @property
    def compares_members(self) -> bool:
        """Whether an advantage is the difference to other members of the group."""
        return not (isinstance(self.advantage, ReinforcePP) and self.advantage.baseline == "batch")

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss cannot do without the engine's log-probabilities."""
        return self.correction.kind != "none" or self.reject.kind != "none"

    def needs_old(self, steps_per_batch: int) -> bool:
        """Whether log-probabilities are recomputed before a batch is trained: where the clip is around them, and they are
        not what the only update computes in any case."""
        return steps_per_batch > 1 and self.correction.kind != "clip"


OWN_RATIO = {
    "decoupled": "its clip is around the proximal policy, so that the distance from sampling needs a weight of its own",
    "gspo": "its bounds are for the updates of one batch, and a trajectory that is one version old would be beyond them",
}
"""Losses whose ratio cannot be the one to the policy that sampled, and why."""


def algorithm_problems(algorithm: Algorithm, schedule: Schedule, sampling: SamplingConfig) -> list[str]:
    """Broken rules between what is learned, how it is scheduled and how it is sampled, a line each."""
    problems: list[str] = []
    if schedule.group_size == 1 and algorithm.compares_members:
        problems.append(
            f"schedule.group_size=1 with algorithm.advantage={algorithm.advantage.kind}: a group baseline over one "
            "member is that member's own reward, so every advantage is 0; use group_size >= 2"
        )
    elif schedule.group_size == 1 and algorithm.zero_variance == "drop":
        problems.append(
            "algorithm.zero_variance=drop with schedule.group_size=1: the rewards of one member are always equal, so every "
            "group would be dropped; use algorithm.zero_variance=train, or group_size >= 2"
        )
    if schedule.max_staleness > 0 and algorithm.correction.kind == "none":
        problems.append(
            f"algorithm.correction.kind=none with schedule.max_staleness={schedule.max_staleness}: tokens sampled under "
            "older weights cannot be trained without their behaviour log-probabilities; use algorithm.correction.kind=clip, "
            "or schedule.max_staleness=0"
        )
    elif algorithm.correction.kind == "clip" and algorithm.loss.kind in OWN_RATIO:
        problems.append(
            f"algorithm.correction.kind=clip (the default) with algorithm.loss.kind={algorithm.loss.kind}: "
            f"{OWN_RATIO[algorithm.loss.kind]}; use algorithm.correction.kind=tis or masked, or algorithm.loss.kind=ppo_clip"
        )
    elif algorithm.loss.kind == "decoupled" and algorithm.correction.kind == "none":
        problems.append(
            "algorithm.loss.kind=decoupled with algorithm.correction.kind=none: the weight between sampling and the proximal "
            "policy is the other half of it; use algorithm.correction.kind=tis or masked, or algorithm.loss.kind=ppo_clip"
        )
    if algorithm.correction.kind == "none" and sampling.truncates:
        cut = f"sampling.top_p={sampling.top_p:g}, sampling.top_k={sampling.top_k}, sampling.min_p={sampling.min_p:g}"
        problems.append(
            f"algorithm.correction.kind=none with {cut}: tokens are drawn from a truncated distribution and would be trained "
            "as though from the whole one; use algorithm.correction.kind=clip, which counts the kept mass, or "
            "sampling.top_p=1, sampling.top_k=0 and sampling.min_p=0"
        )
    if algorithm.mask_older_than >= max(0, schedule.max_staleness):
        near = f"at most {schedule.max_staleness - 1}, or -1" if schedule.max_staleness else "-1"
        problems.append(
            f"algorithm.mask_older_than={algorithm.mask_older_than} with schedule.max_staleness={schedule.max_staleness}: "
            f"nothing that old is trained, so it would mask nothing; use {near} for none"
        )
    return problems


class Optimizer(Node):
    """AdamW."""

    lr: float = Field(default=1e-3, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down to it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises from 0 to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from lr to 0 over the steps of the run."""


MIN_TEMPERATURE = 1e-3
"""Logits are divided by it and exponentiated; below it a draw is greedy and its log-probabilities say nothing."""


class SamplingConfig(Node):
    """How tokens are drawn while training."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Logits are divided by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens with at least this probability; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """The k most likely tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens with at least this share of the largest probability; 0: all."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that log-probabilities alone do not say how the others were."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
