"""The loss against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rollart.config.schema import Algorithm, ClipCorrection, NoCorrection, PPOClip, TruncatedIS
from rollart.runtime.trainer.loss import policy_loss
from rollart.runtime.trainer.metrics import merge, summary
from rollart.runtime.trainer.rows import LossTerms

UNCORRECTED = NoCorrection(kind="none")


def terms(advantages: list[float], weights: list[float] | None = None, old: list[float] | None = None) -> LossTerms:
    return LossTerms(
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights or [1.0] * len(advantages)),
        old=None if old is None else torch.tensor(old),
    )


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(one) for one in probabilities])


def test_clipping_has_separate_bounds_and_stops_the_gradient_beyond_them() -> None:
    algorithm = Algorithm(loss=PPOClip(eps_clip_low=0.2, eps_clip_high=0.5), correction=UNCORRECTED)
    # ratios 1.4 (inside the upper bound), 1.6 (outside), 0.9 (inside the lower), 0.7 (outside); advantages +1 and -1
    now = logs(0.14, 0.16, 0.09, 0.07, 0.14, 0.16, 0.09, 0.07).requires_grad_()
    given = terms([1.0] * 4 + [-1.0] * 4, old=logs(*[0.1] * 8).tolist())
    loss, sums = policy_loss(now, logs(*[0.1] * 8), given, algorithm)
    # -min(r A, clip(r) A): +1: 1.4, 1.5, 0.9, 0.7; -1: -1.4, -1.6, -0.9, -0.8
    assert float(loss.detach()) == pytest.approx(-(1.4 + 1.5 + 0.9 + 0.7) + (1.4 + 1.6 + 0.9 + 0.8), abs=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    # d(-r A)/d log p = -r A where the unclipped term is the smaller one
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.4, 0.0, -0.9, -0.7, 1.4, 1.6, 0.9, 0.0], abs=1e-5)
    metrics = summary(merge([sums]), with_entropy=False)
    assert metrics["clip_frac"] == 2 / 8
    assert metrics["ratio_mean"] == pytest.approx((1.4 + 1.6 + 0.9 + 0.7) / 4, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1.6, abs=1e-6)
    # r - 1 - ln r, over the eight tokens
    expected_kl = sum(r - 1 - math.log(r) for r in (1.4, 1.6, 0.9, 0.7)) / 4
    assert metrics["kl"] == pytest.approx(expected_kl, abs=1e-6)


def test_without_recomputed_logprobs_the_ratio_is_one_and_the_gradient_is_that_of_the_policy_gradient() -> None:
    now = logs(0.5, 0.25).requires_grad_()
    loss, sums = policy_loss(now, logs(0.5, 0.25), terms([2.0, -3.0], [0.5, 0.25]), Algorithm(correction=UNCORRECTED))
    assert float(loss.detach()) == pytest.approx(-2.0 * 0.5 + 3.0 * 0.25)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.0, 0.75])
    assert summary(merge([sums]), with_entropy=False)["loss"] == pytest.approx((-1.0 + 0.75) / 0.75)


def test_the_importance_weight_is_old_over_behaviour_truncated_at_its_cap_and_carries_no_gradient() -> None:
    algorithm = Algorithm(correction=TruncatedIS(kind="tis", cap=2.0))
    now = logs(0.3, 0.3, 0.3).requires_grad_()
    behaviour = logs(0.4, 0.2, 0.05)  # weights 0.75, 1.5, 6 -> 2
    loss, sums = policy_loss(now, behaviour, terms([1.0, 1.0, 1.0]), algorithm)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-0.75, -1.5, -2.0], abs=1e-6)
    metrics = summary(merge([sums]), with_entropy=False)
    assert metrics["tis_mean"] == pytest.approx(4.25 / 3, abs=1e-6)
    assert metrics["tis_clip_frac"] == pytest.approx(1 / 3)
    assert metrics["mismatch_ratio_mean"] == pytest.approx((0.75 + 1.5 + 6) / 3, abs=1e-5)
    assert metrics["mismatch_abs_max"] == pytest.approx(math.log(6), abs=1e-6)
    assert metrics["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (0.75, 1.5, 6)) / 3, abs=1e-5)


def test_clipped_around_the_policy_that_sampled_a_token_that_has_already_moved_far_is_moved_no_further() -> None:
    """Weights of another version sampled: the present ones are 1.1, 1.5, 0.9 and 0.5 times as likely to say the token. With a
    weight beside a ratio of 1 all four would go on in their direction, the second one by 1.5 as much."""
    algorithm = Algorithm(loss=PPOClip(eps_clip_low=0.2, eps_clip_high=0.3), correction=ClipCorrection())
    behaviour, present = logs(*[0.1] * 8), logs(0.11, 0.15, 0.09, 0.05, 0.11, 0.15, 0.09, 0.05)
    now = present.clone().requires_grad_()
    loss, sums = policy_loss(now, behaviour, terms([1.0] * 4 + [-1.0] * 4), algorithm)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.1, 0.0, -0.9, -0.5, 1.1, 1.5, 0.9, 0.0], abs=1e-5)
    metrics = summary(merge([sums]), with_entropy=False)
    assert metrics["clip_frac"] == 2 / 8
    assert metrics["tis_mean"] == 1.0
    assert metrics["ratio_mean"] == pytest.approx(metrics["mismatch_ratio_mean"], abs=1e-6)
    now = present.clone().requires_grad_()
    weighted = Algorithm(loss=algorithm.loss, correction=TruncatedIS(kind="tis", cap=10.0))
    policy_loss(now, behaviour, terms([1.0] * 4 + [-1.0] * 4), weighted)[0].backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.1, -1.5, -0.9, -0.5, 1.1, 1.5, 0.9, 0.5], abs=1e-5)


def test_a_token_of_a_bad_trajectory_that_became_many_times_likelier_does_not_rule_the_step() -> None:
    """Without the dual clip its gradient would be 300 times that of a fresh token."""
    now = logs(0.3, 0.3, 0.3).requires_grad_()
    loss, sums = policy_loss(now, logs(0.001, 0.11, 0.001), terms([-1.0, -1.0, 1.0]), Algorithm())
    assert float(loss.detach()) == pytest.approx(3.0 + 0.3 / 0.11 - 1.2, abs=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, 0.3 / 0.11, 0.0], abs=1e-4)
    assert summary(merge([sums]), with_entropy=False)["clip_frac"] == pytest.approx(2 / 3)


def test_what_truncation_cut_off_is_a_weight_and_no_move_of_the_policy() -> None:
    """Drawn with 0.2 / 0.5 from a policy that has not moved since: nothing is clipped, and the weight is the kept mass."""
    given = replace(terms([1.0, -1.0]), log_kept=logs(0.5, 0.5))
    now = logs(0.2, 0.2).requires_grad_()
    loss, sums = policy_loss(now, logs(0.4, 0.4), given, Algorithm(correction=ClipCorrection()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)
    assert summary(merge([sums]), with_entropy=False)["clip_frac"] == 0.0


def test_recomputed_old_logprobs_split_staleness_from_the_update() -> None:
    """The ratio is present over old, the importance weight old over behaviour: they multiply, only the first is clipped."""
    algorithm = Algorithm(
        loss=PPOClip(eps_clip_low=0.2, eps_clip_high=0.2), correction=TruncatedIS(kind="tis", cap=10.0)
    )
    now = logs(0.3).requires_grad_()
    loss, _ = policy_loss(now, logs(0.05), terms([1.0], old=logs(0.2).tolist()), algorithm)
    assert float(loss.detach()) == pytest.approx(-1.2 * 4.0, abs=1e-5), "ratio 1.5 is clipped to 1.2, weight 4 is not"
    loss, _ = policy_loss(now, logs(0.05), terms([-1.0], old=logs(0.2).tolist()), algorithm)
    assert float(loss.detach()) == pytest.approx(1.5 * 4.0, abs=1e-5)


def test_tokens_without_behaviour_logprobs_are_left_out_of_the_mismatch_and_reported_by_absence() -> None:
    algorithm = Algorithm(correction=UNCORRECTED)
    some = torch.tensor([math.log(0.5), float("nan")])
    _, sums = policy_loss(logs(0.25, 0.25), some, terms([1.0, 1.0]), algorithm)
    assert summary(merge([sums]), with_entropy=False)["mismatch_abs_mean"] == pytest.approx(math.log(2), abs=1e-6)
    _, sums = policy_loss(logs(0.25, 0.25), torch.full((2,), float("nan")), terms([1.0, 1.0]), algorithm)
    metrics = summary(merge([sums]), with_entropy=False)
    assert not any(name.startswith("mismatch") for name in metrics)
    assert all(math.isfinite(value) for value in metrics.values())


def test_an_empty_micro_batch_measures_nothing_and_has_loss_zero() -> None:
    loss, sums = policy_loss(torch.empty(0, requires_grad=True), torch.empty(0), terms([]), Algorithm())
    assert float(loss.detach()) == 0.0
    assert set(sums.values()) == {0.0}


def test_metrics_do_not_depend_on_how_tokens_are_split() -> None:
    generator = torch.Generator().manual_seed(0)
    now, behaviour, old = (-torch.rand(12, generator=generator) * 3 for _ in range(3))
    advantages, weights = torch.randn(12, generator=generator), torch.rand(12, generator=generator)

    def part(where: slice) -> dict[str, float]:
        given = LossTerms(advantages=advantages[where], weights=weights[where], old=old[where])
        return policy_loss(now[where], behaviour[where], given, Algorithm())[1]

    whole = summary(merge([part(slice(0, 12))]), with_entropy=False)
    split = summary(
        merge([part(slice(0, 5)), part(slice(5, 5)), part(slice(5, 6)), part(slice(6, 12))]), with_entropy=False
    )
    assert split == pytest.approx(whole, rel=1e-12)
    assert len(whole) >= 15


def test_the_entropy_bonus_follows_the_gradient_of_the_entropy() -> None:
    """Summed over all tokens with their probabilities, the bonus of sampled tokens has exactly the entropy's gradient."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    probs = logits.detach().softmax(0)
    terms = LossTerms(advantages=torch.zeros(4, dtype=torch.float64), weights=probs, old=None)
    algorithm = Algorithm(entropy_coef=0.5, correction=NoCorrection(kind="none"))
    loss, _ = policy_loss(logits.log_softmax(0), torch.full((4,), float("nan"), dtype=torch.float64), terms, algorithm)
    (found,) = torch.autograd.grad(loss, logits)
    entropy = -(logits.softmax(0) * logits.log_softmax(0)).sum()
    (wanted,) = torch.autograd.grad(entropy, logits)
    assert torch.allclose(found, -0.5 * wanted, atol=1e-12)
