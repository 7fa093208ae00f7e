"""Advantages: how much better a trajectory did than its siblings.

Owns the group baselines and the step from a batch of groups to the trainer's samples. Invariants: a group is a set of
attempts at one task instance and may have any size; an unscored trajectory is in no mean, no deviation and no loss; a
group whose rewards are equal has advantages of exactly 0; neither the order of the groups nor that of their members
matters. One advantage per trajectory: how it is credited to segments and tokens is `credit`'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollart.config.schema import Algorithm, GroupBaseline, LeaveOneOut
from rollart.core.errors import InvariantBroken
from rollart.core.types import Sample, Trajectory, TrajId
from rollart.learn.credit import loss_tokens, segment_shares

Reward = float | None
"""None or not finite: unscored."""

ROUNDING = 1e-9
"""Rewards whose spread is below this share of their size differ by rounding only: dividing by their deviation would make
full-size advantages out of noise."""


def is_scored(reward: Reward) -> bool:
    """Whether a reward may enter statistics and loss."""
    return reward is not None and math.isfinite(reward)


def group_advantages(rewards: Sequence[Reward], rule: GroupBaseline | LeaveOneOut) -> tuple[float | None, ...]:
    """One advantage per member of a group, None where the reward is missing or not finite.

    `grpo`: reward - mean, divided by the population deviation where `normalize_std` (DeepSeekMath, section 4.1.2): the
    advantages of a group then have mean square 1 whatever its size. `rloo`: reward - mean of the *other* members (Ahmadian
    et al. 2024). A single scored member has nothing to be compared with: 0.
    """
    scored = np.array([reward for reward in rewards if is_scored(reward)], np.float64)
    values = iter(_of_scored(scored, rule).tolist())
    return tuple(next(values) if is_scored(reward) else None for reward in rewards)


def _of_scored(rewards: NDArray[np.float64], rule: GroupBaseline | LeaveOneOut) -> NDArray[np.float64]:
    n = len(rewards)
    spread = np.ptp(rewards) if n else 0.0
    if n < 2 or spread <= ROUNDING * np.abs(rewards).max():
        return np.zeros(n)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    if rule.kind == "rloo":
        centred *= n / (n - 1)
    elif rule.normalize_std:
        centred /= spread  # squares of very small rewards would be 0
        centred /= np.sqrt(np.mean(centred**2))
    return centred


def build_samples(groups: Sequence[Sequence[Trajectory]], algorithm: Algorithm, rng: Random) -> tuple[Sample, ...]:
    """The trainer's rows for a batch: one per segment that holds trainable tokens, in the order of groups and members.

    A trajectory's samples share its advantage, and their weights sum to 1. Unscored trajectories and those without a
    sampled token give no sample. `rng` is used only to shuffle rewards (`algorithm.shuffle_rewards`).
    Raises InvariantBroken for a trajectory that is not done or that stands in another group than its own.
    """
    _check(groups)
    rewards = {trajectory.id: trajectory.reward for group in groups for trajectory in group}
    if algorithm.shuffle_rewards:
        rewards |= shuffled_rewards([trajectory for group in groups for trajectory in group], rng)
    samples: list[Sample] = []
    for group in groups:
        advantages = group_advantages([rewards[member.id] for member in group], algorithm.advantage)
        for trajectory, advantage in zip(group, advantages, strict=True):
            if advantage is not None:
                samples += _rows(trajectory, advantage, algorithm)
    return tuple(samples)


def shuffled_rewards(trajectories: Sequence[Trajectory], rng: Random) -> dict[TrajId, float]:
    """Permute the rewards of scored trajectories among all of the same task.

    Every permutation within a task is equally likely, so a reward says nothing about the trajectory that gets it, while the
    distribution of rewards of each task stays what it was: the control experiment of a learning run. The order in which
    the trajectories are given does not matter.
    """
    by_task: dict[str, list[tuple[TrajId, float]]] = {}
    for trajectory in sorted(trajectories, key=lambda one: one.id):
        if trajectory.reward is not None and is_scored(trajectory.reward):
            by_task.setdefault(trajectory.instance.task, []).append((trajectory.id, trajectory.reward))
    permuted: dict[TrajId, float] = {}
    for task in sorted(by_task):
        ids, rewards = zip(*by_task[task], strict=True)
        permuted |= zip(ids, rng.sample(rewards, len(rewards)), strict=True)
    return permuted


def _rows(trajectory: Trajectory, advantage: float, algorithm: Algorithm) -> list[Sample]:
    shares = segment_shares(trajectory.segments, algorithm.loss.normalize)
    return [
        Sample(
            traj=trajectory.id,
            index=index,
            task=trajectory.instance.task,
            segment=segment,
            advantage=advantage,
            weight=share,
        )
        for index, (segment, share) in enumerate(zip(trajectory.segments, shares, strict=True))
        if loss_tokens(segment)
    ]


def _check(groups: Sequence[Sequence[Trajectory]]) -> None:
    seen: set[TrajId] = set()
    for group in groups:
        for trajectory in group:
            if trajectory.status != "done":
                raise InvariantBroken(f"{trajectory.id} is {trajectory.status}; only trajectories that are done train")
            if trajectory.group_id != group[0].group_id:
                raise InvariantBroken(
                    f"{trajectory.id} of group {trajectory.group_id} stands in group {group[0].group_id}; a group is a "
                    "set of attempts at one task instance"
                )
            if trajectory.id in seen:
                raise InvariantBroken(f"{trajectory.id} stands twice in one batch; it would be trained twice")
            seen.add(trajectory.id)
