"""Rules between the algorithm and the schedule: what would be a silent no-op or a wrong training is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollart.config.schema import RunConfig

TASKS: dict[str, Any] = {"digits": {"env": {"kind": "max_digit"}}}


def read(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"tasks": TASKS, **sections})


@pytest.mark.parametrize(
    ("max_staleness", "mask", "near"),
    [(0, 0, "use -1"), (1, 1, "use at most 0, or -1"), (3, 7, "use at most 2, or -1")],
)
def test_a_mask_that_nothing_is_old_enough_for_is_refused(max_staleness: int, mask: int, near: str) -> None:
    with pytest.raises(ValidationError, match=rf"algorithm.mask_older_than={mask} .* {near}"):
        read(schedule={"max_staleness": max_staleness}, algorithm={"mask_older_than": mask})
    for valid in range(-1, max_staleness):
        config = read(schedule={"max_staleness": max_staleness}, algorithm={"mask_older_than": valid})
        assert config.algorithm.mask_older_than == valid


def test_decoupled_ppo_without_a_correction_is_refused() -> None:
    uncorrected = {"loss": {"kind": "decoupled"}, "correction": {"kind": "none"}}
    with pytest.raises(ValidationError, match=r"algorithm.loss.kind=decoupled with algorithm.correction.kind=none"):
        read(schedule={"max_staleness": 0}, algorithm=uncorrected)
    for correction in ({"kind": "tis"}, {"kind": "masked"}):
        assert read(algorithm={"loss": {"kind": "decoupled"}, "correction": correction})


@pytest.mark.parametrize("loss", ["decoupled", "gspo"])
def test_a_loss_with_a_ratio_of_its_own_needs_a_weight_between_sampling_and_training(loss: str) -> None:
    with pytest.raises(
        ValidationError, match=rf"clip \(the default\) with algorithm.loss.kind={loss}: .* use .*kind=tis"
    ):
        read(algorithm={"loss": {"kind": loss}})
    assert read(algorithm={"loss": {"kind": loss}, "correction": {"kind": "tis"}})
    for free in ("ppo_clip", "cispo"):
        assert read(algorithm={"loss": {"kind": free}}).algorithm.correction.kind == "clip"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"kind": "masked", "low": 1.0}},
        {"correction": {"kind": "masked", "high": 1.0}},
        {"reject": {"kind": "geometric", "low": 1.0}},
        {"reject": {"kind": "geometric", "high": 0.9}},
        {"loss": {"kind": "cispo", "eps_clip_low": 1.1}},
        {"loss": {"kind": "gspo", "eps_clip_low": 1.0}},
        {"kl": {"kind": "k3", "coef": 0.0}},
        {"refills": 0},
        {"mask_older_than": -2},
    ],
)
def test_bounds_that_keep_nothing_or_say_nothing_are_refused(algorithm: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="should be"):
        read(algorithm=algorithm)


def test_the_defaults_are_grpo_clipped_around_the_policy_that_sampled_and_nothing_else() -> None:
    algorithm = read().algorithm
    assert algorithm.model_dump() == {
        "advantage": {"kind": "grpo", "normalize_std": True},
        "loss": {"kind": "ppo_clip", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "normalize": "trajectory"},
        "correction": {"kind": "clip", "cap": 3.0},
        "reject": {"kind": "none"},
        "mask_older_than": -1,
        "kl": {"kind": "none"},
        "zero_variance": "train",
        "refills": 10,
        "entropy_coef": 0.0,
        "shuffle_rewards": False,
    }
