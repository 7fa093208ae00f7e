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


class PPOClip(Node):
    """PPO's clipped objective, with a bound of its own on each side."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    eps_clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped below 1 - this."""
    eps_clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped above 1 + this."""
    normalize: Literal["trajectory", "sequence", "token"] = "trajectory"
    """trajectory: each trajectory weighs 1, spread evenly over its tokens; sequence: each trajectory weighs 1, spread evenly
    over its segments and then over their tokens; token: each token weighs 1."""


class NoCorrection(Node):
    """Log-probabilities of the engine are taken as the trainer's own."""

    kind: Literal["none"]


class TruncatedIS(Node):
    """Truncated importance sampling between the engine's and the trainer's log-probabilities."""

    kind: Literal["tis"] = "tis"
    cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token."""


class Algorithm(Node):
    """What is learned from a batch."""

    advantage: Annotated[GroupBaseline | LeaveOneOut, Field(discriminator="kind")] = GroupBaseline()
    loss: PPOClip = PPOClip()
    correction: Annotated[TruncatedIS | NoCorrection, Field(discriminator="kind")] = TruncatedIS()
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus per sampled token; 0: none. It keeps groups from agreeing before they have learned."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted across the groups of a batch, so nothing can be learned."""


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
