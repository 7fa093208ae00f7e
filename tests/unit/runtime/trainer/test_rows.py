"""From payloads to tensors."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_samples import random_samples, sample, sampled, written

from rollart.config.schema import Algorithm, NoCorrection, SamplingConfig
from rollart.core.errors import TrainerError
from rollart.core.types import Segment, Span, Tokens
from rollart.learn.batching import read_tokens
from rollart.learn.credit import loss_tokens
from rollart.runtime.trainer.rows import loss_rows, loss_terms, pad, row_of

PLAIN = SamplingConfig()
TRUNCATED = SamplingConfig(top_p=0.9)


def test_only_sampled_tokens_are_trained_each_from_the_token_before_it() -> None:
    one = sample(
        written([10, 11, 12]), sampled([13, 14], [-0.5, -0.25]), written([15]), sampled([16], [-0.125]), written([17])
    )
    row = row_of(one, need_behaviour=True, truncates=False)
    assert row.ids.tolist() == [10, 11, 12, 13, 14, 15], "what follows the last predicting token is not read"
    assert row.positions.tolist() == [2, 3, 5]
    assert row.targets.tolist() == [13, 14, 16]
    assert row.behaviour.tolist() == [-0.5, -0.25, -0.125]


def test_the_prefix_shared_with_the_parent_is_read_and_not_trained() -> None:
    one = sample(written([1, 2]), sampled([3, 4], [-1.0, -2.0]), sampled([5, 6], [-3.0, -4.0]), shared=3)
    row = row_of(one, need_behaviour=True, truncates=False)
    assert (row.targets.tolist(), row.positions.tolist()) == ([4, 5, 6], [2, 3, 4])
    assert row.behaviour.tolist() == [-2.0, -3.0, -4.0]


def test_counts_made_without_payloads_agree_with_the_rows() -> None:
    for one in random_samples(20):
        row = row_of(one, need_behaviour=True, truncates=False)
        assert len(row.ids) == read_tokens(one.segment)
        assert len(row.targets) == loss_tokens(one.segment)


def test_a_turn_resumed_under_new_weights_keeps_ids_mask_logprobs_and_versions_of_one_length() -> None:
    """Aborted by a weight update and resumed: two pieces, or one piece of two spans, train alike."""
    whole = Tokens(
        n_tokens=3,
        spans=(Span(version=4, n_tokens=2), Span(version=5, n_tokens=1)),
        payload=sampled([7, 8, 9], [-1, -2, -3]).payload,
    )
    two = sample(written([1]), sampled([7, 8], [-1, -2], version=4), sampled([9], [-3], version=5))
    one = sample(written([1]), whole)
    a, b = (row_of(x, need_behaviour=True, truncates=False) for x in (one, two))
    for name in ("ids", "positions", "targets", "behaviour"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist()
    assert len(a.targets) == len(a.behaviour) == sum(span.n_tokens for span in whole.spans) == 3


def test_a_truncated_draw_has_the_logprob_of_the_distribution_that_it_was_drawn_from() -> None:
    """Field case 18: corrected for by the kept mass."""
    kept = np.log([0.5, 0.8])
    one = sample(written([1]), sampled([2, 3], np.log([0.25, 0.4]).tolist(), kept.tolist()))
    rows = loss_rows([one], Algorithm(), TRUNCATED)
    assert np.exp(rows[0].row.behaviour) == pytest.approx([0.5, 0.5], rel=1e-6)


def test_truncated_sampling_without_the_kept_mass_is_refused_where_it_is_corrected_for() -> None:
    one = sample(written([1]), sampled([2], [-1.0]), traj="train/t/0/3/1")
    with pytest.raises(TrainerError, match=r"train/t/0/3/1 .*the mass that truncation kept"):
        loss_rows([one], Algorithm(), TRUNCATED)
    assert loss_rows([one], Algorithm(correction=NoCorrection(kind="none")), TRUNCATED)


def test_a_trajectory_without_behaviour_logprobs_is_refused_by_name_where_they_are_needed() -> None:
    good = sample(written([1]), sampled([2], [-1.0]))
    bad = sample(written([1]), sampled([2], [-1.0]), written([3]), sampled([4, 5], None), traj="train/t/0/7/2")
    with pytest.raises(TrainerError, match=r"trajectory train/t/0/7/2 segment 0: 2 sampled tokens lack"):
        loss_rows([good, bad], Algorithm(), PLAIN)
    unneeded = loss_rows([good, bad], Algorithm(correction=NoCorrection(kind="none")), PLAIN)
    assert np.isnan(unneeded[1].row.behaviour).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        (Segment(pieces=(Tokens(n_tokens=2),)), "does not carry their ids"),
        (Segment(pieces=(Tokens(n_tokens=3, payload=written([1, 2]).payload),)), "does not carry their ids"),
        (Segment(pieces=(written([1, 2]),)), "no token to train"),
        (Segment(pieces=(sampled([1, 2], [-1, -1]),)), "nothing to predict it from"),
        (Segment(pieces=(written([1]), sampled([1, 2], [-1]))), "log-probabilities of shape"),
    ],
)
def test_payloads_that_do_not_fit_are_refused_by_name(segment: Segment, why: str) -> None:
    one = sample(traj="train/t/0/9/9")
    with pytest.raises(TrainerError, match=rf"train/t/0/9/9.*{why}"):
        loss_rows([type(one)(traj=one.traj, task="t", segment=segment, advantage=1.0)], Algorithm(), PLAIN)


def test_rows_are_padded_on_the_right_and_keep_their_order() -> None:
    rows = [
        row_of(sample(written([1, 2, 3]), sampled([4], [-1])), need_behaviour=True, truncates=False),
        row_of(sample(written([5]), sampled([6, 7], [-2, -3])), need_behaviour=True, truncates=False),
    ]
    padded = pad(rows)
    assert padded.ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert padded.valid.tolist() == [[True, False], [True, True]]
    assert padded.positions[padded.valid].tolist() == [2, 0, 1]
    assert padded.targets.tolist() == [4, 6, 7]
    assert padded.behaviour.tolist() == [-1, -2, -3]


def test_an_empty_micro_batch_is_one_row_that_trains_nothing() -> None:
    padded = pad([])
    assert padded.ids.shape == (1, 1)
    assert not padded.valid.any()
    assert padded.targets.shape == padded.behaviour.shape == (0,)


def test_old_logprobs_for_only_some_samples_are_refused() -> None:
    rows = loss_rows(random_samples(3), Algorithm(), PLAIN)
    old = {rows[0].key: rows[0].row.behaviour}
    with pytest.raises(TrainerError, match=r"train/t/0/1/0 segment 0 has no old log-probabilities"):
        loss_terms(rows, old)
    assert loss_terms(rows, {}).old is None
    assert loss_terms(rows[:1], old).old is not None
