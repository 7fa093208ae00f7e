"""Truncated sampling under every correction: the kept mass is counted, or the run is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from trainer_samples import gradients, sample, sampled, spec_with, train_step, trainer_rank, written

from rollart.config.schema import (
    Algorithm,
    ClipCorrection,
    GeometricReject,
    MaskedIS,
    MaxDigitEnv,
    NoCorrection,
    Optimizer,
    RunConfig,
    SamplingConfig,
    Schedule,
    TaskConfig,
    TruncatedIS,
)
from rollart.core.errors import TrainerError
from rollart.runtime.trainer.rows import loss_rows

WIDE = 1e9
CORRECTIONS: list[dict[str, Any]] = [
    {"correction": ClipCorrection()},
    {"correction": TruncatedIS(kind="tis", cap=WIDE)},
    {"correction": MaskedIS(kind="masked", low=0.0, high=WIDE)},
    {"correction": TruncatedIS(kind="tis", cap=WIDE), "reject": GeometricReject(kind="geometric", low=0.0, high=WIDE)},
]
TOP_P = SamplingConfig(top_p=0.6)
TASKS = {"digits": TaskConfig(env=MaxDigitEnv(kind="max_digit"))}


@pytest.mark.parametrize("rules", CORRECTIONS)
def test_a_step_on_truncated_draws_weighs_each_token_by_what_it_was_drawn_with(rules: dict[str, Any]) -> None:
    """Field case 18: over all tokens that truncation keeps, each as often as it is drawn, the corrected gradient is the sum
    of p grad log p A over them, as if nothing had been cut but the tokens themselves."""
    spec = spec_with(algorithm=Algorithm(**rules), sampling=TOP_P, optimizer=Optimizer(lr=0.0))
    plain = spec_with(algorithm=Algorithm(correction=NoCorrection(kind="none")), optimizer=Optimizer(lr=0.0))
    tokens, advantages = [3, 4, 5, 6], [1.0, -0.5, 2.0, 0.3]
    prompt = written([1, 2])
    with trainer_rank(spec) as rank:
        probes = [sample(prompt, sampled([token], [0.0], [0.0]), traj=f"t{token}") for token in tokens]
        found = rank.logprobs([loss_rows(probes, spec.algorithm, spec.sampling)])
        exact = [float(found[probe.traj, 0][0]) for probe in probes]
        rank.publish(0)
        mass = math.log(sum(math.exp(one) for one in exact))
        drawn = [
            # drawn with probability p / mass
            sample(
                prompt, sampled([token], [one], [mass]), traj=f"t{token}", advantage=advantage * math.exp(one - mass)
            )
            for token, one, advantage in zip(tokens, exact, advantages, strict=True)
        ]
        corrected = gradients(rank, drawn)
        weights = rank.finish()["tis_mean"]
    with trainer_rank(plain) as rank:
        wanted = gradients(
            rank,
            [
                sample(prompt, sampled([token], [one]), traj=f"t{token}", advantage=advantage * math.exp(one))
                for token, one, advantage in zip(tokens, exact, advantages, strict=True)
            ],
        )
    assert weights == pytest.approx(math.exp(mass), rel=1e-5), "old over drawn probability is the kept mass"
    assert math.exp(mass) < 0.5, "the cut was put to the test"
    for name, gradient in wanted.items():
        assert corrected[name].numpy() == pytest.approx(gradient.numpy(), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("rules", CORRECTIONS)
def test_a_truncated_draw_without_its_kept_mass_is_refused_by_name(rules: dict[str, Any]) -> None:
    """Field case 18: by every correction, before any rank begins."""
    one = sample(written([1, 2]), sampled([3], [-1.0]), traj="train/t/0/7/0")
    with pytest.raises(TrainerError, match=r"train/t/0/7/0 .* lack the mass that truncation kept"):
        loss_rows([one], Algorithm(**rules), TOP_P)
    whole = loss_rows([one], Algorithm(**rules), SamplingConfig())
    assert whole[0].row.behaviour == pytest.approx(np.array([-1.0], np.float32))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_without_a_correction_is_refused_when_the_configuration_is_read(cut: dict[str, Any]) -> None:
    """Field case 18: the message has the values and both ways out."""
    ((name, value),) = cut.items()
    uncorrected = Algorithm(correction=NoCorrection(kind="none"))
    with pytest.raises(ValidationError, match=rf"sampling.{name}={value:g}.*which counts the kept mass"):
        RunConfig(
            tasks=TASKS, schedule=Schedule(max_staleness=0), algorithm=uncorrected, sampling=SamplingConfig(**cut)
        )
    for rules in CORRECTIONS:
        assert RunConfig(tasks=TASKS, algorithm=Algorithm(**rules), sampling=SamplingConfig(**cut))
    assert RunConfig(tasks=TASKS, schedule=Schedule(max_staleness=0), algorithm=uncorrected)


def test_rejection_sees_the_kept_mass() -> None:
    """Frozen weights: old over drawn probability is the kept mass, here a half, so bounds around 1 reject and bounds around a
    half do not."""
    spec = spec_with(optimizer=Optimizer(lr=0.0), sampling=TOP_P)
    with trainer_rank(spec) as rank:
        probe = sample(written([1, 2]), sampled([3, 4], [0.0, 0.0], [0.0, 0.0]))
        known = rank.logprobs([loss_rows([probe], spec.algorithm, spec.sampling)])[probe.traj, 0]
    half = sample(written([1, 2]), sampled([3, 4], known.tolist(), [math.log(0.5)] * 2))
    for low, high, wanted in ((0.9, 1.1, 1), (0.45, 1.1, 0)):
        rules = Algorithm(reject=GeometricReject(kind="geometric", low=low, high=high))
        with trainer_rank(spec_with(algorithm=rules, optimizer=Optimizer(lr=0.0), sampling=TOP_P)) as rank:
            assert train_step(rank, [half])["rejected_trajectories"] == wanted
