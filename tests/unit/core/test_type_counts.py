"""What the nouns count: tokens of segments, spans of trajectories, ids of instances."""

from __future__ import annotations

import pickle
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Manifest, Sampling, Segment, Span, TaskInstance, Tokens, Trajectory, Turn

spans = st.lists(st.builds(Span, version=st.integers(0, 3), n_tokens=st.integers(1, 5)), max_size=4).map(tuple)
written = st.builds(Tokens, n_tokens=st.integers(0, 9))
sampled = spans.map(lambda many: Tokens(n_tokens=sum(span.n_tokens for span in many), spans=many))
segments = st.lists(
    st.lists(st.one_of(written, sampled), max_size=5).map(lambda p: Segment(pieces=tuple(p))), max_size=3
)


def trajectory(many: list[Segment]) -> Trajectory:
    instance = TaskInstance(task="t", epoch=2, index=5, seed=9)
    return Trajectory(
        id=instance.traj_id(1), attempt=0, group_id=instance.group_id, instance=instance, member=1, segments=tuple(many),
        status="done", finish_cause="env_done",
    )  # fmt: skip


@given(segments)
def test_spans_hold_every_sampled_token_once_and_neighbours_differ(many: list[Segment]) -> None:
    made = trajectory(many)
    flat = [span.version for s in many for p in s.pieces for span in p.spans for _ in range(span.n_tokens)]
    assert [span.version for span in made.spans for _ in range(span.n_tokens)] == flat
    assert made.n_sampled == len(flat)
    assert all(a.version != b.version for a, b in pairwise(made.spans))
    assert (made.oldest_version, made.newest_version) == ((min(flat), max(flat)) if flat else (None, None))


@given(segments)
def test_a_segment_counts_all_tokens_and_the_sampled_ones_apart(many: list[Segment]) -> None:
    for segment in many:
        assert segment.n_tokens == sum(piece.n_tokens for piece in segment.pieces)
        assert segment.n_sampled == sum(piece.n_tokens for piece in segment.pieces if piece.sampled)


@given(segments.filter(bool), st.integers(0, 40))
def test_what_is_shared_with_the_parent_is_counted_in_the_parent_alone(many: list[Segment], shared: int) -> None:
    """However much of a segment is shared: its own tokens are those beyond that, and a trajectory counts each token once."""
    parent = many[0]
    child = Segment(pieces=parent.pieces, parent=0, shared_tokens=shared)
    flat = [span.version if span else None for p in parent.pieces for span in spread(p)]
    own = [version for version in flat[shared:] if version is not None]
    assert [span.version for span in child.spans for _ in range(span.n_tokens)] == own
    assert child.n_sampled == len(own)
    whole = trajectory([parent, child])
    assert whole.n_sampled == parent.n_sampled + len(own) == sum(span.n_tokens for span in whole.spans)


def spread(piece: Tokens) -> list[Span | None]:
    """One entry per token."""
    return [span for span in piece.spans for _ in range(span.n_tokens)] if piece.sampled else [None] * piece.n_tokens


def test_an_extended_segment_keeps_its_parent_and_its_pieces() -> None:
    own, new = Tokens(n_tokens=3), Tokens(n_tokens=2, spans=(Span(version=1, n_tokens=2),))
    before = Segment(pieces=(own,), parent=0, shared_tokens=1)
    assert before.extended(new) == Segment(pieces=(own, new), parent=0, shared_tokens=1)
    assert before.pieces == (own,)


def test_ids_are_made_from_counters() -> None:
    instance = TaskInstance(task="lake", epoch=1, index=7, seed=123)
    assert instance.group_id == "train/lake/1/7"
    assert instance.traj_id(3) == "train/lake/1/7/3"
    assert TaskInstance(task="lake", epoch=1, index=7, seed=123, purpose="eval").group_id == "eval/lake/1/7"


def test_sampling_truncates_when_any_of_its_limits_bites() -> None:
    assert not Sampling().truncates
    assert not Sampling(temperature=0.3).truncates
    assert Sampling(top_p=0.9).truncates
    assert Sampling(top_k=1).truncates
    assert Sampling(min_p=0.1).truncates


def test_sizes_of_turns_and_manifests_are_sums() -> None:
    assert Turn(pieces=(Tokens(n_tokens=2), Tokens(n_tokens=5)), finish="stop").n_tokens == 7
    assert Manifest(version=0, shards={"a/0/0-1/float32": 4, "b/0/0-1/float32": 8}).n_bytes == 12
    assert Manifest(version=0).n_bytes == 0


@given(st.lists(st.tuples(st.one_of(written, sampled), st.booleans()), max_size=8))
def test_a_segment_that_grows_counts_its_tokens_whenever_it_is_asked(pieces: list[tuple[Tokens, bool]]) -> None:
    segment, expected = Segment(), 0
    for piece, asked in pieces:
        segment, expected = segment.extended(piece), expected + piece.n_tokens
        if asked:
            assert segment.n_tokens == expected
    again = pickle.loads(pickle.dumps(segment))
    assert segment.n_tokens == again.n_tokens == expected
    assert again == segment == Segment(pieces=tuple(piece for piece, _ in pieces))
    assert segment.n_sampled == sum(span.n_tokens for span in segment.spans)
