"""The trajectory stays the unit of account however it is cut into segments."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.schema import Algorithm, MaxDigitEnv, PPOClip, RunConfig, TaskConfig
from rollart.core.types import Sample, Segment, Span, TaskInstance, Tokens, Trajectory
from rollart.learn.advantages import build_samples
from rollart.learn.credit import (
    Normalize,
    longest_response,
    loss_tokens,
    segment_shares,
    token_weight,
    total_weight,
)

MODES: tuple[Normalize, ...] = get_args(Normalize)


def piece(n_tokens: int, *, sampled: bool) -> Tokens:
    return Tokens(n_tokens=n_tokens, spans=(Span(version=0, n_tokens=n_tokens),) if sampled else ())


def segment(*sizes: int, shared: int = 0) -> Segment:
    """Pieces written and sampled in turn."""
    pieces = tuple(piece(size, sampled=bool(place % 2)) for place, size in enumerate(sizes))
    return Segment(pieces=pieces, shared_tokens=shared, parent=0 if shared else None)


def trajectory(member: int, reward: float, *segments: Segment) -> Trajectory:
    instance = TaskInstance(task="t", epoch=0, index=0, seed=0)
    return Trajectory(
        id=instance.traj_id(member),
        attempt=0,
        group_id=instance.group_id,
        instance=instance,
        member=member,
        segments=segments,
        status="done",
        finish_cause="env_done",
        reward=reward,
    )


def samples_of(normalize: Normalize, *members: Trajectory) -> tuple[Sample, ...]:
    return build_samples([members], Algorithm(loss=PPOClip(normalize=normalize)), Random(0))


def test_loss_tokens_are_the_sampled_ones_beyond_the_prefix_shared_with_the_parent() -> None:
    assert loss_tokens(segment(5, 3, 2, 4)) == 7
    assert loss_tokens(segment(5, 3, 2, 4, shared=8)) == 4, "the whole first turn is trained in the parent"
    assert loss_tokens(segment(5, 3, 2, 4, shared=6)) == 6, "a prefix may end within a turn"
    assert loss_tokens(segment(5, 3, 2, 4, shared=14)) == 0
    assert loss_tokens(segment(5)) == 0
    assert loss_tokens(Segment()) == 0


def test_shares_equal_those_worked_out_by_hand() -> None:
    segments = (segment(2, 6), segment(4), segment(3, 2))
    assert segment_shares(segments, "trajectory") == (0.75, 0.0, 0.25)
    assert segment_shares(segments, "token") == (0.75, 0.0, 0.25)
    assert segment_shares(segments, "sequence") == (0.5, 0.0, 0.5)
    assert segment_shares((segment(4),), "trajectory") == (0.0,)


def test_token_weights_equal_those_worked_out_by_hand() -> None:
    two = trajectory(0, 1.0, segment(2, 6), segment(3, 2))
    one = trajectory(1, 0.0, segment(1, 4))
    expected = {
        "trajectory": [1 / 8, 1 / 8, 1 / 4],
        "sequence": [1 / 12, 1 / 4, 1 / 4],
        "token": [1.0, 1.0, 1.0],
        "constant": [1 / 20, 1 / 20, 1 / 20],
    }
    for mode in MODES:
        samples = samples_of(mode, two, one)
        assert [token_weight(sample, mode, 20) for sample in samples] == pytest.approx(expected[mode])
        assert total_weight(samples) == pytest.approx(2)


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    other=st.integers(1, 30),
    mode=st.sampled_from(MODES),
)
def test_splitting_a_trajectory_into_segments_changes_no_advantage_and_no_weight_of_it(
    cuts: list[int], other: int, mode: Normalize
) -> None:
    """Cut the sampled tokens into segments (each reads what came before): the trajectory's part in the loss stays."""
    whole = trajectory(0, 1.0, segment(3, sum(cuts)))
    parts = tuple(segment(3 + sum(cuts[:place]), size) for place, size in enumerate(cuts))
    split = trajectory(0, 1.0, *parts)
    rival = trajectory(1, 0.0, segment(3, other))
    before, after = samples_of(mode, whole, rival), samples_of(mode, split, rival)
    assert len(after) == len(cuts) + 1
    assert {s.advantage for s in after if s.traj == whole.id} == {s.advantage for s in before if s.traj == whole.id}
    assert total_weight(after) == pytest.approx(total_weight(before)) == 2
    for sample in (whole, rival):
        mine = [s for s in before if s.traj == sample.id]
        cut = [s for s in after if s.traj == sample.id]
        assert sum(token_weight(s, mode) * loss_tokens(s.segment) for s in cut) == pytest.approx(
            sum(token_weight(s, mode) * loss_tokens(s.segment) for s in mine)
        )
        if mode != "sequence":
            assert [token_weight(s, mode) for s in cut] == pytest.approx([token_weight(mine[0], mode)] * len(cut))


@given(pieces=st.integers(1, 5), size=st.integers(1, 6))
def test_equal_cuts_change_no_weight_of_any_token_under_sequence_normalisation(pieces: int, size: int) -> None:
    whole = samples_of("sequence", trajectory(0, 1.0, segment(3, pieces * size)))
    parts = (segment(3 + place * size, size) for place in range(pieces))
    split = samples_of("sequence", trajectory(0, 1.0, *parts))
    assert [token_weight(s, "sequence") for s in split] == pytest.approx([token_weight(whole[0], "sequence")] * pieces)


def test_the_longest_response_is_every_turn_of_any_task_taken_and_full() -> None:
    env = MaxDigitEnv(kind="max_digit")
    tasks = {"a": TaskConfig(env=env, max_turns=10, max_tokens=2), "b": TaskConfig(env=env, max_turns=3, max_tokens=8)}
    assert longest_response(RunConfig(tasks=tasks)) == 24


def test_a_branch_trains_its_shared_prefix_once() -> None:
    stem, branch = segment(4, 2, 3, 5), segment(4, 2, 7, 3, shared=6)
    samples = samples_of("token", trajectory(0, 1.0, stem, branch), trajectory(1, 0.0, segment(1, 1)))
    assert [loss_tokens(sample.segment) for sample in samples] == [7, 3, 1]
    assert [sample.index for sample in samples] == [0, 1, 0]


def test_a_trajectory_without_sampled_tokens_gives_no_sample() -> None:
    samples = samples_of("trajectory", trajectory(0, 1.0, segment(4)), trajectory(1, 0.0, segment(1, 1)))
    assert [sample.traj[-1] for sample in samples] == ["1"]
    assert samples[0].advantage < 0, "its reward still counts in the baseline"
