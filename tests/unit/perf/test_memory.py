"""Memory of a training step against the closed forms of arXiv 2205.05198 and 1910.02054."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollart.perf.memory import (
    layer_activation_bytes,
    layers_in_flight,
    peak_memory_bytes,
    rank_parameters,
    stage_memory,
)
from rollart.perf.shapes import gpt_shape, model_shape
from rollart.perf.train_plan import Framework, TrainingPlan

GPT = gpt_shape(layers=96, hidden=12288, heads=96, vocab=51200)
EARLY = Framework(attention="scores", dropout=True, grad_bytes=4)
PLAN = TrainingPlan(
    devices=64, micro_batch=2, global_batch=64, sequence=2048, tp=8, pp=8, chunks=1, recompute="none"
)  # fmt: skip
SBH = 2048 * 2 * 12288


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_of_a_layer_are_the_papers(t: int) -> None:
    plan = replace(PLAN, devices=8 * t, tp=t)
    scores = 5 * 96 * 2048 / (12288 * t)
    assert layer_activation_bytes(GPT, plan, EARLY) == pytest.approx(SBH * (10 + 24 / t + scores), rel=1e-12)
    spread = replace(plan, sequence_parallel=True)
    assert layer_activation_bytes(GPT, spread, EARLY) == pytest.approx(SBH * (34 / t + scores), rel=1e-12)
    selective = replace(spread, recompute="selective")
    assert layer_activation_bytes(GPT, selective, EARLY) == pytest.approx(34 * SBH / t, rel=1e-12)


def test_full_recomputation_keeps_the_input_alone_and_a_share_of_it_lies_between() -> None:
    full = replace(PLAN, recompute="full")
    assert layer_activation_bytes(GPT, full, EARLY) == 2 * SBH
    half = layer_activation_bytes(GPT, replace(full, recompute_share=0.5), EARLY)
    assert half == pytest.approx((2 * SBH + layer_activation_bytes(GPT, PLAN, EARLY)) / 2)


def test_the_first_stage_keeps_all_layers_in_1f1b_and_more_when_interleaved() -> None:
    assert layers_in_flight(PLAN, 96) == 96
    assert layers_in_flight(PLAN, 96, stage=7) == 12
    interleaved = replace(PLAN, schedule="interleaved", chunks=3)
    assert layers_in_flight(interleaved, 96) == pytest.approx(96 * (1 + 7 / (8 * 3)))
    gpipe = replace(PLAN, schedule="gpipe")
    assert layers_in_flight(gpipe, 96) == 12 * gpipe.micro_batches


def test_later_stages_hold_more_than_their_distance_from_the_end_when_interleaved_and_in_zero_bubble() -> None:
    plan = TrainingPlan(
        devices=4, micro_batch=1, global_batch=16, sequence=2048, pp=4, chunks=2, schedule="interleaved"
    )  # fmt: skip
    assert [layers_in_flight(plan, 4, stage) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]
    deferring = replace(plan, chunks=1, schedule="zero_bubble")
    assert [layers_in_flight(deferring, 4, stage) for stage in range(4)] == [4, 4, 4, 4]
    plain = replace(deferring, schedule="1f1b")
    more = [
        stage_memory(GPT, deferring, EARLY, stage=stage).activations
        - stage_memory(GPT, plain, EARLY, stage=stage).activations
        for stage in range(4)
    ]
    layer, gradient = layer_activation_bytes(GPT, plain, EARLY), 2 * 2048 * 51200
    assert more == pytest.approx([0, 24 * layer, 48 * layer, 72 * layer + 3 * gradient])


def test_parameters_of_ranks_sum_to_the_model() -> None:
    moe = model_shape("Qwen3-30B-A3B")
    plan = TrainingPlan(devices=8, micro_batch=1, global_batch=64, sequence=4096, dp=8, ep=8)
    dense, expert = rank_parameters(moe, plan)
    assert dense + 8 * expert == moe.parameters


def test_adam_in_mixed_precision_needs_18_bytes_a_parameter_and_sharding_takes_them_away_stage_by_stage() -> None:
    plan = TrainingPlan(devices=8, micro_batch=1, global_batch=64, sequence=2048, dp=8)
    model = gpt_shape(layers=24, hidden=2048, heads=16, vocab=51200)
    stages = [stage_memory(model, replace(plan, shards=stage), EARLY) for stage in range(4)]
    count = model.parameters
    assert stages[0].weights + stages[0].gradients + stages[0].optimizer == (2 + 4 + 12) * count
    assert [stage.optimizer for stage in stages[1:]] == [12 * count / 8] * 3
    assert [stage.gradients for stage in stages[2:]] == [4 * count / 8] * 2
    assert stages[3].weights == 2 * count / 8
    held = [stage.weights + stage.gradients + stage.optimizer for stage in stages]
    assert held == sorted(held, reverse=True)


def test_frozen_weights_have_no_gradients_and_no_optimizer() -> None:
    memory = stage_memory(GPT, replace(PLAN, lora=True), EARLY)
    assert memory.gradients == memory.optimizer == 0
    assert memory.total == memory.weights + memory.activations + memory.buffers


def test_the_peak_is_the_largest_stage() -> None:
    totals = [stage_memory(GPT, PLAN, EARLY, stage=stage).total for stage in (0, 4, 7)]
    assert peak_memory_bytes(GPT, PLAN, EARLY) == max(totals)
