"""Group baselines and the samples of a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollart.config.schema import (
    Algorithm,
    DrGRPO,
    GroupBaseline,
    LeaveOneOut,
    MaxDigitEnv,
    NoCorrection,
    ReinforcePP,
    RunConfig,
    Schedule,
    TaskConfig,
)
from rollart.core.errors import InvariantBroken
from rollart.core.types import Segment, Span, Status, TaskInstance, Tokens, Trajectory
from rollart.learn.advantages import GroupRule, batch_advantages, build_samples, group_advantages

REINFORCE_PP = ReinforcePP(kind="reinforce_pp")
OVER_BATCH = ReinforcePP(kind="reinforce_pp", baseline="batch")
DR_GRPO = DrGRPO(kind="dr_grpo")
STD = GroupBaseline()
NO_STD = GroupBaseline(normalize_std=False)
RLOO = LeaveOneOut(kind="rloo")
RULES = [STD, NO_STD, RLOO, DR_GRPO]
WITH_GROUPS = [*RULES, REINFORCE_PP]
"""Under all of these a member is compared with its group."""
TASKS = {"digits": TaskConfig(env=MaxDigitEnv(kind="max_digit"))}


def written(n_tokens: int) -> Tokens:
    return Tokens(n_tokens=n_tokens)


def sampled(n_tokens: int) -> Tokens:
    return Tokens(n_tokens=n_tokens, spans=(Span(version=0, n_tokens=n_tokens),))


def trajectory(
    member: int,
    reward: float | None,
    *,
    index: int = 0,
    task: str = "digits",
    segments: tuple[Segment, ...] = (Segment(pieces=(written(3), sampled(2))),),
    status: Status = "done",
) -> Trajectory:
    instance = TaskInstance(task=task, epoch=0, index=index, seed=index)
    return Trajectory(
        id=instance.traj_id(member),
        attempt=0,
        group_id=instance.group_id,
        instance=instance,
        member=member,
        segments=segments,
        status=status,
        finish_cause="env_done",
        reward=reward,
    )


def group(rewards: Sequence[float | None], *, index: int = 0, task: str = "digits") -> list[Trajectory]:
    return [trajectory(member, reward, index=index, task=task) for member, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # rewards 1 0 0 0: mean 1/4, population deviation sqrt(3)/4
        (STD, [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        (NO_STD, [0.75, -0.25, -0.25, -0.25]),
        # the others of the first are 0 0 0, those of each loser are 1 0 0
        (RLOO, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (DR_GRPO, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_advantages_equal_those_worked_out_by_hand(rule: GroupRule, expected: list[float]) -> None:
    assert group_advantages([1, 0, 0, 0], rule) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("rule", WITH_GROUPS)
def test_groups_of_sizes_3_2_3_have_zero_mean_advantages_in_any_arrival_order(rule: GroupRule | ReinforcePP) -> None:
    """Field case 9: a mean is that of one group, wherever its members stand in the batch."""
    groups = [group([1, 0, 0.5], index=0), group([0.25, 1], index=1), group([0, 3, -1], index=2)]
    reference: dict[str, float] | None = None
    for arrival in permutations(groups):
        samples = build_samples([members[::-1] for members in arrival], Algorithm(advantage=rule), Random(0))
        advantages = {sample.traj: sample.advantage for sample in samples}
        for members in groups:
            assert sum(advantages[member.id] for member in members) == pytest.approx(0, abs=1e-12)
        reference = reference or advantages  # type: ignore[assignment]
        assert advantages == pytest.approx(reference)


@pytest.mark.parametrize("rule", WITH_GROUPS)
@pytest.mark.parametrize("equal", [0.0, 1.0, 0.1, -7.3, 1e9])
def test_a_group_with_equal_rewards_has_advantages_of_exactly_zero_between_others(
    rule: GroupRule | ReinforcePP, equal: float
) -> None:
    """Field case 10: exactly 0, among groups of 4, 3 and 4."""
    groups = [group([1, 0, 0, 1], index=0), group([equal] * 3, index=1), group([0, 0, 0, 1], index=2)]
    samples = build_samples(groups, Algorithm(advantage=rule), Random(0))
    by_group = [[s.advantage for s in samples if s.traj.split("/")[3] == str(index)] for index in range(3)]
    assert by_group[1] == [0.0, 0.0, 0.0]
    assert all(value != 0 for value in by_group[0] + by_group[2])


@pytest.mark.parametrize("rule", RULES)
def test_rewards_that_differ_by_rounding_only_count_as_equal(rule: GroupRule) -> None:
    assert group_advantages([0.1 + 0.2, 0.3], rule) == (0.0, 0.0)
    assert group_advantages([0.3, 0.3001], rule)[0] != 0


def test_rewards_1_0_1_0_of_one_task_instance_give_advantages_of_both_signs_with_mean_zero() -> None:
    """Field case 11: grouped by task instance, not by trajectory."""
    samples = build_samples([group([1, 0, 1, 0])], Algorithm(), Random(0))
    assert [sample.advantage for sample in samples] == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unscored", [None, float("nan"), float("inf")])
def test_an_unscored_trajectory_is_out_of_mean_deviation_and_loss(rule: GroupRule, unscored: float | None) -> None:
    """Field case 13: None and NaN alike."""
    with_it = group_advantages([1, unscored, 0, 0], rule)
    without = group_advantages([1, 0, 0], rule)
    assert with_it[1] is None
    assert (with_it[0], *with_it[2:]) == without
    samples = build_samples([group([1, unscored, 0, 0])], Algorithm(advantage=rule), Random(0))
    assert [sample.traj[-1] for sample in samples] == ["0", "2", "3"]
    assert [sample.advantage for sample in samples] == list(without)


@pytest.mark.parametrize("rule", RULES)
def test_a_single_scored_member_and_a_group_with_none_have_nothing_to_learn_from(rule: GroupRule) -> None:
    assert group_advantages([None, 5.0, float("nan")], rule) == (None, 0.0, None)
    assert group_advantages([None, None], rule) == (None, None)
    assert group_advantages([], rule) == ()


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_advantages_are_centred_scale_free_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    plain = np.array(group_advantages(rewards, NO_STD), float)
    scaled = np.array(group_advantages(rewards, STD), float)
    rloo = np.array(group_advantages(rewards, RLOO), float)
    assert plain.sum() == pytest.approx(0, abs=1e-8)
    assert rloo == pytest.approx(plain * len(rewards) / (len(rewards) - 1))
    if np.any(scaled):
        assert np.mean(scaled**2) == pytest.approx(1)
        order = np.argsort(rewards, kind="stable")
        assert np.all(np.diff(scaled[order]) >= 0)


@pytest.mark.parametrize("rule", [REINFORCE_PP, OVER_BATCH])
def test_reinforce_pp_is_normalised_over_the_trajectories_of_the_batch(rule: ReinforcePP) -> None:
    """Against plain sums: the baseline by group or over all, one deviation for the whole batch, unscored ones out of it."""
    groups: list[list[float | None]] = [[1.0, 0.0, 0.5, None], [4.0, 1.0], [0.25, 0.25, float("nan")]]
    known = [[r for r in group if r is not None and not math.isnan(r)] for group in groups]
    everyone = [r for group in known for r in group]
    bases = [sum(g) / len(g) if rule.baseline == "group" else sum(everyone) / len(everyone) for g in known]
    differences = [r - base for group, base in zip(known, bases, strict=True) for r in group]
    deviation = math.sqrt(sum(d * d for d in differences) / len(differences))
    found = batch_advantages(groups, rule)
    assert [[a is None for a in group] for group in found] == [
        [False] * 3 + [True], [False] * 2, [False] * 2 + [True]
    ]  # fmt: skip
    flat = [a for group in found for a in group if a is not None]
    assert flat == pytest.approx([d / deviation for d in differences])
    assert sum(a * a for a in flat) / len(flat) == pytest.approx(1)
    assert (found[2][0] == 0.0) == (rule.baseline == "group")
    assert batch_advantages([[2.0, 2.0], [2.0]], rule) == ((0.0, 0.0), (0.0,))
    assert batch_advantages([], rule) == ()


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([REINFORCE_PP, OVER_BATCH]),
)
def test_reinforce_pp_depends_on_no_order_and_on_no_scale(groups: list[list[float]], rule: ReinforcePP) -> None:
    found = batch_advantages(groups, rule)
    again = batch_advantages([group[::-1] for group in groups[::-1]], rule)
    turned = [group[::-1] for group in again[::-1]]
    for mine, theirs in zip(found, turned, strict=True):
        assert list(mine) == pytest.approx(list(theirs), rel=1e-6, abs=1e-6)
    doubled = batch_advantages([[2 * r for r in group] for group in groups], rule)
    for mine, theirs in zip(found, doubled, strict=True):
        assert list(mine) == pytest.approx(list(theirs), rel=1e-9, abs=1e-9)


def test_reinforce_pp_over_the_batch_trains_groups_of_one() -> None:
    alone = Schedule(group_size=1, batch=4)
    assert RunConfig(tasks=TASKS, schedule=alone, algorithm=Algorithm(advantage=OVER_BATCH)).schedule.group_size == 1
    with pytest.raises(ValidationError, match="use group_size >= 2"):
        RunConfig(tasks=TASKS, schedule=alone, algorithm=Algorithm(advantage=REINFORCE_PP))
    with pytest.raises(ValidationError, match=r"zero_variance=drop with schedule.group_size=1"):
        RunConfig(tasks=TASKS, schedule=alone, algorithm=Algorithm(advantage=OVER_BATCH, zero_variance="drop"))


def test_shuffled_rewards_are_a_permutation_within_each_task_over_all_its_groups() -> None:
    groups = [
        group([1, 2, 3], index=0),
        group([4, 5, None], index=1),
        group([10, 20, 30], index=0, task="lake"),
        group([40, 50, 60], index=1, task="lake"),
    ]
    rewards = {member.id: member.reward for members in groups for member in members}
    algorithm = Algorithm(advantage=NO_STD, shuffle_rewards=True)
    crossed = 0
    for seed in range(30):
        samples = build_samples(groups, algorithm, Random(seed))
        assert len(samples) == 11
        again = build_samples([members[::-1] for members in groups[::-1]], algorithm, Random(seed))
        assert {s.traj: s.advantage for s in samples} == pytest.approx({s.traj: s.advantage for s in again})
        # A group's centred rewards fix the rewards up to its mean; compare spreads instead of guessing them.
        lake = sorted(s.advantage for s in samples if s.task == "lake")
        digits = [s.advantage for s in samples if s.task == "digits"]
        assert max(map(abs, digits)) <= 4 < min(x for x in map(abs, lake) if x > 4)
        first = [s.advantage for s in samples if s.traj.startswith("train/digits/0/0/")]
        crossed += sorted(first) != [-1.0, 0.0, 1.0]
    assert crossed > 15, "rewards stay within their group"
    assert Counter(r for r in rewards.values() if r is not None) == Counter([1, 2, 3, 4, 5, 10, 20, 30, 40, 50, 60])


def test_shuffled_rewards_say_nothing_about_the_trajectory_that_gets_them() -> None:
    groups = [group([1, 1, 0, 0], index=0), group([1, 0, 0, 0], index=1)]
    algorithm = Algorithm(advantage=NO_STD, shuffle_rewards=True)
    winners = {"train/digits/0/0/0", "train/digits/0/0/1", "train/digits/0/1/0"}
    total = 0.0
    for seed in range(2000):
        total += sum(s.advantage for s in build_samples(groups, algorithm, Random(seed)) if s.traj in winners)
    # Unshuffled each draw gives 0.5 + 0.5 + 0.75. Its deviation under the null is below 1, so 2000 draws average within 0.1.
    assert abs(total / 2000) < 0.1


def test_only_done_trajectories_in_their_own_group_once_each_are_trained() -> None:
    with pytest.raises(InvariantBroken, match="is aborted"):
        build_samples([[trajectory(0, 1.0, status="aborted")]], Algorithm(), Random(0))
    with pytest.raises(InvariantBroken, match="stands in group"):
        build_samples([[trajectory(0, 1.0), trajectory(0, 1.0, index=1)]], Algorithm(), Random(0))
    with pytest.raises(InvariantBroken, match="twice"):
        build_samples([[trajectory(0, 1.0)], [trajectory(0, 1.0)]], Algorithm(), Random(0))


def test_group_size_1_with_a_group_baseline_is_refused_with_the_reason() -> None:
    """Field case 12: refused when the configuration is read."""
    for rule in WITH_GROUPS:
        with pytest.raises(ValidationError, match="every advantage is 0; use group_size >= 2"):
            RunConfig(tasks=TASKS, schedule=Schedule(group_size=1, batch=4), algorithm=Algorithm(advantage=rule))


def test_asynchronous_training_without_behaviour_logprobs_is_refused_when_the_configuration_is_read() -> None:
    """Field case 22: the message names both values and both ways out."""
    uncorrected = Algorithm(correction=NoCorrection(kind="none"))
    with pytest.raises(ValidationError, match=r"correction.kind=none with schedule.max_staleness=2"):
        RunConfig(tasks=TASKS, schedule=Schedule(max_staleness=2), algorithm=uncorrected)
    assert RunConfig(tasks=TASKS, schedule=Schedule(max_staleness=0), algorithm=uncorrected).schedule.max_staleness == 0
