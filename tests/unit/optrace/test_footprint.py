"""Memory counted from a trace against the closed forms of `perf.memory`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.optrace.analytic import analytic_trace
from rollart.optrace.footprint import memory
from rollart.optrace.transforms import derived
from rollart.perf.memory import FRAMEWORK_BYTES, StageMemory, stage_memory
from rollart.perf.shapes import ModelShape, gpt_shape, model_shape
from rollart.perf.train_plan import Framework, TrainingPlan

GPT = gpt_shape(layers=96, hidden=12288, heads=96, vocab=51200)
EARLY = Framework(attention="scores", loss="passes", dropout=True, grad_bytes=4)
CURRENT = Framework(attention="flash3", loss="fused", fused=True, grad_bytes=4)
PLAN = TrainingPlan(devices=64, micro_batch=2, global_batch=64, sequence=2048, tp=8, pp=8)
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


def counted(shape: ModelShape, plan: TrainingPlan, framework: Framework, stage: int = 0) -> StageMemory:
    return memory(derived(analytic_trace(shape, plan, framework), plan, framework), plan, framework, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("change", [
    {}, {"sequence_parallel": True}, {"recompute": "full"}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 3},
    {"schedule": "zero_bubble"},
    {"dp": 4, "devices": 256, "shards": 1}, {"dp": 4, "devices": 256, "shards": 2}, {"cp": 2, "devices": 128},
])  # fmt: skip
def test_stages_of_a_gpt_hold_what_the_closed_form_says(stage: int, change: dict[str, Any]) -> None:
    plan = replace(PLAN, **change)
    ours, closed = counted(GPT, plan, EARLY, stage), stage_memory(GPT, plan, EARLY, stage=stage)
    for name in PARTS:
        assert getattr(ours, name) == pytest.approx(getattr(closed, name), rel=0.001), name


@pytest.mark.parametrize("name", ["llama3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_public_models_hold_what_the_closed_form_says(name: str) -> None:
    shape = model_shape(name)
    plan = TrainingPlan(
        devices=64, micro_batch=1, global_batch=64, sequence=4096, tp=4, dp=16, ep=8 if shape.experts else 1, shards=3,
        sequence_parallel=True,
    )  # fmt: skip
    ours, closed = counted(shape, plan, CURRENT), stage_memory(shape, plan, CURRENT)
    for part in PARTS:
        assert getattr(ours, part) == pytest.approx(getattr(closed, part), rel=0.03), part


@pytest.mark.parametrize(
    "change",
    [{}, {"schedule": "interleaved", "chunks": 3}, {"schedule": "zero_bubble"}],
    ids=["1f1b", "interleaved", "zb"],
)
def test_the_last_stage_holds_the_logits_too(change: dict[str, Any]) -> None:
    plan = replace(PLAN, **change)
    ours, closed = counted(GPT, plan, EARLY, 7), stage_memory(GPT, plan, EARLY, stage=7)
    # the closed form leaves out the norm before the head
    assert 0 < ours.activations - closed.activations <= 1.01 * 2 * 2048 * 2 * 12288
    assert counted(GPT, plan, EARLY, 6).weights < ours.weights


def test_a_layer_that_is_computed_again_is_whole_for_a_while() -> None:
    full = replace(PLAN, recompute="full")
    inputs = 96 * 2 * 2048 * 2 * 12288
    assert counted(GPT, full, EARLY).activations > inputs
    kept = counted(GPT, PLAN, EARLY).activations / 96
    assert counted(GPT, full, EARLY).activations == pytest.approx(inputs + kept)


def test_32_bit_training_keeps_no_second_copy_of_the_weights() -> None:
    plan = replace(PLAN, dtype="fp32")
    ours = counted(GPT, plan, EARLY)
    assert ours.weights == ours.gradients == ours.optimizer / 2
    assert counted(GPT, replace(PLAN, lora=True), EARLY).optimizer == 0


def test_weights_gathered_at_once_are_of_the_two_largest_units_that_follow_each_other() -> None:
    shape = model_shape("llama3-8b")
    plan = TrainingPlan(devices=8, micro_batch=1, global_batch=8, sequence=1024, dp=8, shards=3)
    trace = derived(analytic_trace(shape, plan, CURRENT), plan, CURRENT)
    layer, head = trace.parts[trace.layers[0]].parameters, trace.parts[trace.head].parameters
    assert head > 2 * layer
    # the norm and the head are a unit, and so is the embedding
    assert memory(trace, plan, CURRENT, 0).buffers - FRAMEWORK_BYTES == pytest.approx(2 * (layer + head))
    deep = replace(plan, devices=24, pp=3)
    middle = memory(derived(analytic_trace(shape, deep, CURRENT), deep, CURRENT), deep, CURRENT, 1)
    assert middle.buffers - FRAMEWORK_BYTES == pytest.approx(2 * 2 * layer)
    assert memory(trace, plan, CURRENT, 0, layers=()).buffers - FRAMEWORK_BYTES == pytest.approx(2 * 2 * head)


def test_a_stage_or_trace_of_another_plan_is_refused() -> None:
    trace = derived(analytic_trace(GPT, PLAN, EARLY), PLAN, EARLY)
    with pytest.raises(ConfigError, match="give 0 to 7"):
        memory(trace, PLAN, EARLY, 8)
    with pytest.raises(ConfigError, match="derive it"):
        memory(trace, replace(PLAN, shards=1), EARLY, 0)
    two = memory(trace, PLAN, EARLY, 1, layers=trace.layers[:2])
    assert two.weights == pytest.approx(memory(trace, PLAN, EARLY, 1).weights / 6)
