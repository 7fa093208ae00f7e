"""Every loss, correction and KL term against plain float64 loops, and against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_loss import Token, naive
from numpy.typing import NDArray

from rollart.config.learning import OWN_RATIO
from rollart.config.schema import (
    CISPO,
    GSPO,
    KL1,
    KL2,
    KL3,
    Algorithm,
    ClipCorrection,
    Decoupled,
    GeometricReject,
    MaskedIS,
    NoCorrection,
    NoKL,
    NoReject,
    PPOClip,
    TruncatedIS,
)
from rollart.core.errors import TrainerError
from rollart.core.types import TrajId
from rollart.runtime.trainer import sequences
from rollart.runtime.trainer.loss import policy_loss, reference_kl
from rollart.runtime.trainer.metrics import merge, summary
from rollart.runtime.trainer.rows import LossRow, LossTerms, Row, SampleKey

PLAIN = NoCorrection(kind="none")
LOSSES = [
    PPOClip(eps_clip_high=0.3),
    Decoupled(kind="decoupled"),
    GSPO(kind="gspo", eps_clip_low=0.05, eps_clip_high=0.07),
    CISPO(kind="cispo", eps_clip_low=0.4, eps_clip_high=0.5),
]
CORRECTIONS: list[Any] = [
    PLAIN,
    ClipCorrection(cap=1.6),
    TruncatedIS(kind="tis", cap=1.3),
    MaskedIS(kind="masked", low=0.7, high=1.6),
]
KLS = [NoKL(), KL1(kind="k1", coef=0.1), KL2(kind="k2", coef=0.2), KL3(kind="k3", coef=0.3)]
REJECT = GeometricReject(kind="geometric", low=0.9, high=1.1)


def random_tokens(seed: int, sizes: Sequence[int] = (1, 4, 2, 7, 3, 5)) -> list[Token]:
    """Trajectories of these many tokens; everything differs, some tokens are old."""
    rng = np.random.default_rng(seed)
    tokens = []
    for number, size in enumerate(sizes):
        advantage = float(rng.normal())
        shift = float(rng.normal(0, 0.2))
        for _ in range(size):
            now = float(-abs(rng.normal(1, 0.5)))
            old = now + float(rng.normal(0, 0.3))
            tokens.append(
                Token(
                    traj=f"t{number}", now=now, old=old, behaviour=old + shift + float(rng.normal(0, 0.3)),
                    advantage=advantage, weight=1 / size, reference=now + float(rng.normal(0, 0.5)),
                    fresh=bool(rng.random() < 0.8), log_kept=float(-rng.random()),
                )
            )  # fmt: skip
    return tokens


def loss_of(
    tokens: Sequence[Token], algorithm: Algorithm, micro_batches: Sequence[Sequence[int]] | None = None
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient per token and metrics, of tokens as segments of one token each, spread over micro-batches; as the
    training rank puts the parts together."""
    batches = micro_batches or [range(len(tokens))]
    counts = {token.traj: sum(one.traj == token.traj for one in tokens) for token in tokens}
    rows = [
        LossRow(
            key=(TrajId(token.traj), place),
            row=Row(
                ids=np.zeros(1, np.int64), positions=np.zeros(1, np.int64), targets=np.zeros(1, np.int64),
                behaviour=np.array([token.behaviour], np.float32), log_kept=np.array([token.log_kept], np.float32),
            ),
            advantage=token.advantage, token_weight=token.weight, share=1 / counts[token.traj],
        )
        for place, token in enumerate(tokens)
    ]  # fmt: skip
    old: dict[SampleKey, NDArray[np.float32]] = {
        row.key: np.array([t.old], np.float32) for row, t in zip(rows, tokens, strict=True)
    }
    split = [[rows[place] for place in batch] for batch in batches]
    whole = None
    if sequences.needed(algorithm) and sequences.spread(split):
        parts = [
            sequences.totals(part, [np.array([tokens[place].now]) for place in batch], old)
            for part, batch in zip(split, batches, strict=True)
        ]
        whole = sequences.added(parts)
    loss, gradient, sums = 0.0, [0.0] * len(tokens), []
    for batch, part in zip(batches, split, strict=True):
        mine = [tokens[place] for place in batch]
        now = torch.tensor([one.now for one in mine], requires_grad=True)
        terms = LossTerms(
            advantages=torch.tensor([one.advantage for one in mine]),
            weights=torch.tensor([one.weight for one in mine]),
            old=torch.tensor([one.old for one in mine]),
            fresh=torch.tensor([one.fresh for one in mine], dtype=torch.bool),
            reference=torch.tensor([one.reference for one in mine]),
            log_kept=torch.tensor([one.log_kept for one in mine]),
        )
        if sequences.needed(algorithm):
            present = [np.array([one.now]) for one in mine]
            terms = sequences.filled(terms, part, whole or sequences.totals(part, present, old))
        value, found = policy_loss(now, torch.tensor([one.behaviour for one in mine]), terms, algorithm)
        value.backward()  # type: ignore[no-untyped-call]
        loss += float(value.detach())
        assert now.grad is not None
        for place, slope in zip(batch, now.grad.tolist(), strict=True):
            gradient[place] = slope
        sums.append(found | {"rejected_trajectories": sequences.rejected(part, terms, algorithm)})
    return loss, gradient, summary(merge(sums), with_entropy=False)


@pytest.mark.parametrize("rule", LOSSES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("kl", KLS, ids=lambda kl: kl.kind)
def test_each_loss_with_each_correction_equals_plain_loops_in_float64(rule: Any, kl: Any) -> None:
    """Value and gradient; what is taken out is counted under one reason each."""
    seen = {"masked": 0, "rejected": 0, "aged": 0}
    for correction, reject, entropy_coef in product(CORRECTIONS, [NoReject(), REJECT], [0.0, 0.1]):
        if correction.kind == "clip" and rule.kind in OWN_RATIO:
            continue  # no configuration has it
        algorithm = Algorithm(loss=rule, kl=kl, correction=correction, reject=reject, entropy_coef=entropy_coef)
        for seed in range(3):
            tokens = random_tokens(seed)
            expected = naive(tokens, algorithm)
            loss, gradient, metrics = loss_of(tokens, algorithm)
            assert loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
            assert gradient == pytest.approx(expected.gradient, rel=1e-4, abs=1e-5)
            names = {"masked": "masked_tokens", "rejected": "rejected_tokens", "aged": "old_tokens"}
            assert {why: metrics[name] for why, name in names.items()} == expected.counts
            seen = {why: n + expected.counts[why] for why, n in seen.items()}
    assert all(seen.values()), f"not everything was put to the test: {seen}"


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Token], list[list[int]]]:
    """Tokens, and their places dealt into micro-batches, some of them empty."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    tokens = random_tokens(draw(st.integers(0, 10**6)), sizes)
    n = draw(st.integers(1, 5))
    batches: list[list[int]] = [[] for _ in range(n)]
    for place in draw(st.permutations(range(len(tokens)))):
        batches[draw(st.integers(0, n - 1))].append(place)
    return tokens, batches


@settings(max_examples=60, deadline=None)
@given(cuts(), st.sampled_from(LOSSES), st.sampled_from(KLS))
def test_no_split_over_segments_micro_batches_and_ranks_changes_a_loss_a_gradient_or_a_metric(
    cut: tuple[list[Token], list[list[int]]], rule: Any, kl: Any
) -> None:
    """Also where the loss needs means over trajectories of which each micro-batch holds a part."""
    tokens, micro_batches = cut
    masked = MaskedIS(kind="masked", low=0.7, high=1.6)
    algorithm = Algorithm(loss=rule, kl=kl, correction=masked, reject=REJECT)
    loss, gradient, metrics = loss_of(tokens, algorithm)
    again, slopes, measured = loss_of(tokens, algorithm, micro_batches)
    assert again == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert slopes == pytest.approx(gradient, rel=1e-4, abs=1e-6)
    assert measured == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_a_part_of_a_trajectory_is_refused_where_its_mean_is_needed() -> None:
    tokens = random_tokens(0, (3,))
    rows = [
        LossRow(
            key=(TrajId("t0"), place),
            row=Row(
                ids=np.zeros(1, np.int64), positions=np.zeros(1, np.int64), targets=np.zeros(1, np.int64),
                behaviour=np.zeros(1, np.float32),
            ),
            advantage=1.0, token_weight=1.0, share=1 / 3,
        )
        for place in range(2)
    ]  # fmt: skip
    assert sequences.spread([rows])
    part = sequences.totals(rows, [np.array([token.now]) for token in tokens[:2]], {})
    with pytest.raises(TrainerError, match=r"trajectory t0 came with 0.667 of its weight"):
        sequences.added([part])


def logs(*probabilities: float) -> list[float]:
    return [math.log(one) for one in probabilities]


def by_hand(
    now: Sequence[float], old: Sequence[float], algorithm: Algorithm, *, advantage: float = 1.0, **more: Sequence[float]
) -> tuple[float, list[float]]:
    """One trajectory, each token with weight 1."""
    tokens = [
        Token(
            traj="t", now=now[n], old=old[n], behaviour=more.get("behaviour", old)[n], advantage=advantage, weight=1.0,
            reference=more.get("reference", now)[n],
        )
        for n in range(len(now))
    ]  # fmt: skip
    loss, gradient, _ = loss_of(tokens, algorithm)
    return loss, gradient


def test_gspo_clips_the_geometric_mean_of_a_trajectory_and_moves_all_its_tokens_alike() -> None:
    rule = Algorithm(loss=GSPO(kind="gspo", eps_clip_low=0.2, eps_clip_high=0.2), correction=PLAIN)
    # ratios 2 and 0.5: the geometric mean is 1, where PPO would clip both
    loss, gradient = by_hand(logs(0.4, 0.1), logs(0.2, 0.2), rule)
    assert loss == pytest.approx(-2.0, abs=1e-6)
    assert gradient == pytest.approx([-1.0, -1.0], abs=1e-6)
    # ratios 4 and 1: mean 2, beyond the bound: no token moves; with a negative advantage both do
    assert by_hand(logs(0.8, 0.2), logs(0.2, 0.2), rule)[1] == [0.0, 0.0]
    loss, gradient = by_hand(logs(0.8, 0.2), logs(0.2, 0.2), rule, advantage=-1.0)
    assert loss == pytest.approx(4.0, abs=1e-5)
    assert gradient == pytest.approx([2.0, 2.0], abs=1e-5)


def test_cispo_caps_the_weight_and_leaves_no_token_without_a_gradient() -> None:
    rule = Algorithm(loss=CISPO(kind="cispo", eps_clip_low=1.0, eps_clip_high=1.0), correction=PLAIN)
    # ratios 4 -> 2, 0.5, 1
    _, gradient = by_hand(logs(0.8, 0.1, 0.2), logs(0.2, 0.2, 0.2), rule)
    assert gradient == pytest.approx([-2.0, -0.5, -1.0], abs=1e-6)


def test_decoupled_ppo_weighs_sampling_beside_the_clip_around_its_proximal_policy() -> None:
    rule = Algorithm(loss=Decoupled(kind="decoupled"), correction=MaskedIS(kind="masked", low=0.0, high=5.0))
    # clipped at 1.2 with weight 4; a weight of 6 leaves the loss
    loss, gradient = by_hand(logs(0.3, 0.3), logs(0.2, 0.3), rule, behaviour=logs(0.05, 0.05))
    assert loss == pytest.approx(-1.2 * 4, abs=1e-5)
    assert gradient == [0.0, 0.0]
    loss, gradient = by_hand(logs(0.22, 0.3), logs(0.2, 0.3), rule, behaviour=logs(0.05, 0.05))
    assert gradient == pytest.approx([-1.1 * 4, 0.0], abs=1e-5)


def test_a_token_beyond_the_bounds_is_masked_and_nothing_else_grows() -> None:
    rule = Algorithm(correction=MaskedIS(kind="masked", low=0.5, high=2.0))
    # weights 1.5, 4 (out), 0.25 (out)
    _, gradient = by_hand(logs(0.3, 0.4, 0.1), logs(0.3, 0.4, 0.1), rule, behaviour=logs(0.2, 0.1, 0.4))
    assert gradient == pytest.approx([-1.5, 0.0, 0.0], abs=1e-6)


def test_rejection_takes_a_whole_trajectory_whose_geometric_mean_is_out_of_bounds() -> None:
    algorithm = Algorithm(correction=TruncatedIS(kind="tis", cap=10.0), reject=REJECT)
    # old over behaviour 2 and 0.5 have mean 1, 2 and 1 have mean 1.41
    inside = by_hand(logs(0.4, 0.1), logs(0.4, 0.1), algorithm, behaviour=logs(0.2, 0.2))[1]
    assert inside == pytest.approx([-2.0, -0.5], abs=1e-6)
    assert by_hand(logs(0.4, 0.2), logs(0.4, 0.2), algorithm, behaviour=logs(0.2, 0.2))[1] == [0.0, 0.0]


def test_a_weight_beyond_all_floats_is_masked_without_a_trace_in_the_gradient() -> None:
    algorithm = Algorithm(correction=MaskedIS(kind="masked"))
    _, gradient = by_hand([-1.0, -1.0], [-1.0, -1.0], algorithm, behaviour=[-1.0, -200.0])
    assert gradient == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("kl", "slopes"),
    [
        (KL1(kind="k1", coef=2.0), [2 * math.log(2), 2 * math.log(0.5)]),
        (KL2(kind="k2", coef=2.0), [2 * math.log(2), 2 * math.log(0.5)]),
        (KL3(kind="k3", coef=2.0), [2 * (1 - 0.5), 2 * (1 - 2.0)]),
    ],
)
def test_a_kl_term_pulls_each_sampled_token_towards_the_reference(kl: Any, slopes: list[float]) -> None:
    _, gradient = by_hand(
        logs(0.4, 0.1), logs(0.4, 0.1), Algorithm(kl=kl, correction=PLAIN), advantage=0.0, reference=logs(0.2, 0.2)
    )
    assert gradient == pytest.approx(slopes, abs=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_term_over_all_tokens_is_that_of_the_kl_itself(kind: str) -> None:
    """k1 and k2: of the policy from the reference; k3: of the reference from the policy."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, 0.3, -0.4], dtype=torch.float64).log_softmax(0)
    now = logits.log_softmax(0)
    probabilities = now.detach().exp()
    (found,) = torch.autograd.grad(
        (probabilities * reference_kl(now, reference, kind)).sum(), logits, retain_graph=True
    )
    exact = (now.exp() * (now - reference)).sum()
    if kind == "k3":
        # the mean of (1 - reference / p) grad log p over draws of p
        exact = (reference.exp() * (reference - now)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(found, wanted, atol=1e-12)
