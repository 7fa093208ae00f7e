"""Advantages: how much better a trajectory did than its siblings.

Owns the group baselines and the step from a batch of groups to the trainer's samples. Invariants: a group is a set of
attempts at one task instance and may have any size; an unscored trajectory is in no mean, no deviation and no loss; a
group whose rewards are equal has advantages of exactly 0, wherever members are compared with their group (that is, but for
`reinforce_pp` with the batch as its baseline); neither the order of the groups nor that of their members matters. One
advantage per trajectory: how it is credited to segments and tokens is `credit`'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollart.config.schema import Algorithm, DrGRPO, GroupBaseline, LeaveOneOut, ReinforcePP
from rollart.core.errors import InvariantBroken
from rollart.core.types import Sample, Trajectory, TrajId, Version
from rollart.learn.credit import loss_tokens, segment_shares
from rollart.sched.variance import equal_rewards

Reward = float | None
"""None or not finite: unscored."""

GroupRule = GroupBaseline | LeaveOneOut | DrGRPO
"""Advantages that a group alone decides."""


def is_scored(reward: Reward) -> bool:
    """Whether a reward may enter statistics and loss."""
    return reward is not None and math.isfinite(reward)


def group_advantages(rewards: Sequence[Reward], rule: GroupRule) -> tuple[float | None, ...]:
    """One advantage per member of a group, None where the reward is missing or not finite.

    `grpo`: reward - mean, divided by the population deviation where `normalize_std` (DeepSeekMath, section 4.1.2): the
    advantages of a group then have mean square 1 whatever its size. `rloo`: reward - mean of the *other* members (Ahmadian
    et al. 2024). `dr_grpo`: reward - mean (Liu et al. 2025, section 3.2). A single scored member has nothing to be compared
    with: 0.
    """
    scored = np.array([reward for reward in rewards if is_scored(reward)], np.float64)
    values = iter(_of_scored(scored, rule).tolist())
    return tuple(next(values) if is_scored(reward) else None for reward in rewards)


def batch_advantages(
    groups: Sequence[Sequence[Reward]], rule: GroupRule | ReinforcePP
) -> tuple[tuple[float | None, ...], ...]:
    """The advantages of all groups of a batch, None where the reward is missing or not finite.

    `reinforce_pp`: reward - baseline, divided by the population deviation of these differences over the scored trajectories
    of the batch, each counted once (Hu 2025: normalised over the batch). The baseline is the mean of the group, or that of
    the batch. Where all of them are equal, to rounding, they are 0.
    """
    if not isinstance(rule, ReinforcePP):
        return tuple(group_advantages(group, rule) for group in groups)
    if rule.baseline == "group":
        centred = [group_advantages(group, DrGRPO(kind="dr_grpo")) for group in groups]
    else:
        flat = iter(group_advantages([reward for group in groups for reward in group], DrGRPO(kind="dr_grpo")))
        centred = [tuple(next(flat) for _ in group) for group in groups]
    largest = max((abs(value) for group in centred for value in group if value is not None), default=0.0)
    if not largest:
        return tuple(centred)
    # squares of very small differences would be 0
    squares = [(value / largest) ** 2 for group in centred for value in group if value is not None]
    deviation = largest * math.sqrt(math.fsum(squares) / len(squares))
    return tuple(tuple(None if value is None else value / deviation for value in group) for group in centred)


def _of_scored(rewards: NDArray[np.float64], rule: GroupBaseline | LeaveOneOut | DrGRPO) -> NDArray[np.float64]:
    n = len(rewards)
    if equal_rewards(rewards.tolist()):
        return np.zeros(n)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    if rule.kind == "rloo":
        centred *= n / (n - 1)
    elif rule.kind == "grpo" and rule.normalize_std:
        centred /= np.ptp(rewards)  # squares of very small rewards would be 0
        centred /= np.sqrt(np.mean(centred**2))
    return centred


def needs_whole_batch(algorithm: Algorithm) -> bool:
    """Whether the samples of a group depend on the other groups of its batch."""
    return algorithm.shuffle_rewards or algorithm.advantage.kind == "reinforce_pp"


def build_samples(
    groups: Sequence[Sequence[Trajectory]], algorithm: Algorithm, rng: Random, *, min_version: Version = 0
) -> tuple[Sample, ...]:
    """The trainer's rows for a batch: one per segment that holds trainable tokens, in the order of groups and members.

    A trajectory's samples share its advantage, and their weights sum to 1. Unscored trajectories and those without a
    sampled token give no sample. `rng` is used only to shuffle rewards (`algorithm.shuffle_rewards`). Tokens sampled under a
    version below `min_version` are masked by the trainer. Where `needs_whole_batch`, all groups must come in one call.
    Raises InvariantBroken for a trajectory that is not done or that stands in another group than its own.
    """
    _check(groups)
    rewards = {trajectory.id: trajectory.reward for group in groups for trajectory in group}
    if algorithm.shuffle_rewards:
        rewards |= shuffled_rewards([trajectory for group in groups for trajectory in group], rng)
    samples: list[Sample] = []
    by_group = batch_advantages([[rewards[member.id] for member in group] for group in groups], algorithm.advantage)
    for group, advantages in zip(groups, by_group, strict=True):
        for trajectory, advantage in zip(group, advantages, strict=True):
            if advantage is not None:
                samples += _rows(trajectory, advantage, algorithm, min_version)
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


def _rows(trajectory: Trajectory, advantage: float, algorithm: Algorithm, min_version: Version) -> list[Sample]:
    shares = segment_shares(trajectory.segments, algorithm.loss.normalize)
    return [
        Sample(
            traj=trajectory.id,
            index=index,
            task=trajectory.instance.task,
            segment=segment,
            advantage=advantage,
            weight=share,
            min_version=min_version,
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
