"""Seconds of a simulated training step: the law of `perf` where all lengths are equal, sensible where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.shapes import model_shape
from rollart.sim.training import TrainerHardware, trainer_hardware
from virtual_configs import a_virtual

TRAIN = {"device": "H800", "nodes": 2, "roles": ["train"]}
POOLS = {"train": TRAIN, "roll": {"device": "H20"}}


def a_trainer(model: str = "qwen3-8b", *, longest: int = 32768, **plan: Any) -> TrainerHardware:
    config = a_virtual(pools=POOLS, trainer={"plan": plan})
    return trainer_hardware(config, model_shape(model), longest=longest, usual=8192.0)


TRAINER = a_trainer()


@pytest.mark.parametrize("length", [512, 4096, 20000])
@pytest.mark.parametrize("per_rank", [4, 16])
def test_equal_lengths_take_what_the_law_says(length: int, per_rank: int) -> None:
    plan = replace(TRAINER.plan, sequence=length, global_batch=TRAINER.plan.dp * per_rank)
    mine = TRAINER.step_s([length] * plan.global_batch)
    # the law knows that 512 and 4096 fill a device's tiles exactly; lengths as they come do not
    assert mine == pytest.approx(TRAINER.law.step(plan).total_s, rel=0.07)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 32768), min_size=1, max_size=64), more=st.integers(1, 32768))
def test_more_never_takes_less(lengths: list[int], more: int) -> None:
    seconds = TRAINER._passes_s(lengths)
    assert TRAINER._passes_s([*lengths, more]) >= seconds * (1 - 1e-12)
    assert TRAINER._passes_s([min(32768, length + more) for length in lengths]) >= seconds
    assert seconds >= max(TRAINER._sequence_s(length) for length in lengths)
    assert TRAINER.step_s(lengths) >= seconds


def test_one_long_sequence_weighs_more_than_its_tokens() -> None:
    """Attention grows with the square: the same tokens in longer sequences take longer."""
    short, long = TRAINER.step_s([1024] * 512), TRAINER.step_s([32768] * 16)
    assert long > 1.1 * short


def test_a_chosen_plan_fits_and_is_the_fastest_that_does() -> None:
    law, plan = TRAINER.law, TRAINER.plan
    assert law.memory_bytes(replace(plan, sequence=32768)) <= law.device.memory_bytes
    for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
        other = replace(plan, tp=tp, pp=pp, dp=16 // (tp * pp), sequence_parallel=tp > 1)
        if law.memory_bytes(replace(other, sequence=32768)) <= law.device.memory_bytes:
            assert law.step(plan).total_s <= law.step(other).total_s * (1 + 1e-12)


def test_given_degrees_are_kept() -> None:
    plan = a_trainer(tp=8, pp=2).plan
    assert (plan.tp, plan.pp, plan.dp) == (8, 2, 1)


def test_a_second_forward_pass_takes_its_time() -> None:
    lengths = [4096] * 64
    plain, twice = a_trainer(tp=4, pp=1), a_trainer(tp=4, pp=1, logprob_pass=True)
    extra = twice.step_s(lengths) - plain.step_s(lengths)
    assert extra == pytest.approx(plain._passes_s(lengths) / 3.0)


@pytest.mark.parametrize(
    ("model", "plan", "says"),
    [
        ("qwen3-8b", {"tp": 3}, "do not divide the 16 devices"),
        ("qwen3-8b", {"ep": 4}, "has no experts; use trainer.plan.ep=1"),
        ("llama3-70b", {"recompute": "none"}, "GiB on each of 16 H800 SXM 80GB with"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(model: str, plan: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        a_trainer(model, **plan)
