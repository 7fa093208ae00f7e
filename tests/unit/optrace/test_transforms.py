"""Derived traces against the closed forms of arXiv 2104.04473 and 2205.05198 and the sharding stages of 1910.02054."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.optrace.analytic import analytic_trace, layer_kinds
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.parallel_groups import members
from rollart.optrace.transforms import derived, marked
from rollart.perf.memory import layer_activation_bytes, rank_parameters
from rollart.perf.shapes import ModelShape, gpt_shape, model_shape
from rollart.perf.train_layers import CAST_BYTES, distinct_ranks
from rollart.perf.train_plan import Framework, Recompute, TrainingPlan
from rollart.perf.training import hardware_flops

GPT = gpt_shape(layers=4, hidden=1024, heads=16, vocab=8192)
MOE = model_shape("Qwen3-30B-A3B")
SCORES = Framework(attention="scores", dropout=True, grad_bytes=4)
FLASH = Framework(attention="flash2", grad_bytes=4)
PLAN = TrainingPlan(devices=4, micro_batch=2, global_batch=8, sequence=512, tp=4)
SBH = 2 * 512 * 1024
SIZES = {"b": 2, "s": 512, "l": 4, "h": 1024, "a": 16, "v": 8192}


def trace_of(shape: ModelShape, plan: TrainingPlan, framework: Framework = SCORES) -> Trace:
    return derived(analytic_trace(shape, plan, framework), plan, framework)


def total(trace: Trace, count: Callable[[Op], float]) -> float:
    names = (trace.embedding, *trace.layers, trace.head)
    return sum(count(op) for name in names for op in both(trace.parts[name]))


def both(part: Part) -> tuple[Op, ...]:
    return (*part.forward, *part.backward)


def product_flops(op: Op) -> float:
    return op.flops if op.kind != "pass" else 0.0


def payload(axis: str) -> Callable[[Op], float]:
    return lambda op: op.payload_bytes if op.axis == axis else 0.0


@pytest.mark.parametrize(("recompute", "factor"), [("full", 96), ("none", 72)])
def test_flops_are_those_of_the_papers(recompute: Recompute, factor: int) -> None:
    plan = replace(PLAN, recompute=recompute)
    b, s, n, h, v = (SIZES[key] for key in "bslhv")
    inside = factor * b * s * n * h**2 * (1 + s / (6 * h))
    head = 6 * b * s * h * v
    assert total(trace_of(GPT, plan), product_flops) * plan.tp == pytest.approx(inside + head, rel=1e-9)
    if recompute == "full":  # the printed form: 96 B s l h^2 (1 + s/6h + V/16lh)
        printed = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
        assert inside + head == pytest.approx(printed, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]), spread=st.booleans(), fused=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]), dtype=st.sampled_from(["bf16", "fp8"]),
    shards=st.integers(0, 3), dp=st.sampled_from([1, 3]),
)  # fmt: skip
def test_no_transformation_loses_or_adds_a_product(
    tp: int, cp: int, spread: bool, fused: bool, recompute: Recompute, dtype: str, shards: int, dp: int
) -> None:
    plan = replace(
        PLAN, devices=tp * cp * dp, tp=tp, cp=cp, dp=dp, global_batch=2 * dp, shards=shards, dtype=dtype,
        recompute=recompute, sequence_parallel=spread,
    )  # fmt: skip
    framework = replace(SCORES, fused=fused)
    trace = trace_of(GPT, plan, framework)
    assert trace.plan == plan
    assert total(trace, product_flops) * tp * cp * dp == pytest.approx(hardware_flops(GPT, plan), rel=1e-9)
    for part in trace.parts.values():
        for ops in (part.forward, part.backward, part.optimizer):
            assert [op.id for op in ops] == list(range(len(ops)))
            assert all(len(set(op.deps)) == len(op.deps) for op in ops)
        assert part.saved_bytes >= 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kept_activations_of_a_layer_are_the_papers(tp: int) -> None:
    plan = replace(PLAN, devices=tp, tp=tp)
    scores = 5 * SIZES["a"] * SIZES["s"] / (SIZES["h"] * tp)

    def kept(plan: TrainingPlan) -> float:
        trace = trace_of(GPT, plan)
        return trace.parts[trace.layers[0]].saved_bytes

    assert kept(plan) == pytest.approx(SBH * (10 + 24 / tp + scores))
    assert kept(replace(plan, sequence_parallel=True)) == pytest.approx(SBH * (34 / tp + scores))
    assert kept(replace(plan, recompute="selective", sequence_parallel=True)) == pytest.approx(SBH * 34 / tp)
    assert kept(replace(plan, recompute="full")) == pytest.approx(2 * SBH)
    halved = replace(plan, devices=2 * tp, cp=2)
    assert kept(halved) == pytest.approx(kept(plan) / 2)


@pytest.mark.parametrize("framework", [SCORES, FLASH, replace(FLASH, fused=True)])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["llama3-8b", "Qwen3-30B-A3B", "mixtral-8x7b"])
def test_kept_activations_of_public_models_are_those_of_the_closed_form(
    framework: Framework, recompute: Recompute, name: str
) -> None:
    shape = model_shape(name)
    plan = replace(PLAN, tp=2, devices=2, sequence=1024, recompute=recompute, sequence_parallel=True)
    trace = trace_of(shape, plan, framework)
    mean = sum(trace.parts[layer].saved_bytes for layer in trace.layers) / shape.layers
    assert mean == pytest.approx(layer_activation_bytes(shape, plan, framework), rel=0.01)


def test_a_layer_has_four_tensor_parallel_reductions_and_six_when_it_is_computed_again() -> None:
    counts: dict[Recompute, int] = {"none": 4, "selective": 4, "full": 6}
    for recompute, count in counts.items():
        trace = trace_of(GPT, replace(PLAN, recompute=recompute))
        reductions = [op for op in both(trace.parts[trace.layers[0]]) if op.axis == "tp"]
        assert [op.payload_bytes for op in reductions] == [2 * SBH] * count
        assert {op.collective for op in reductions} == {"all_reduce"}


def test_sequence_parallelism_moves_the_same_bytes_and_gathers_block_inputs_once_more() -> None:
    trace = trace_of(GPT, replace(PLAN, sequence_parallel=True))
    layer = trace.parts[trace.layers[0]]
    forward = [op.collective for op in layer.forward if op.axis == "tp"]
    assert forward == ["all_gather", "reduce_scatter"] * 2
    backward = sorted(op.collective for op in layer.backward if op.axis == "tp")
    assert backward == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    assert {op.payload_bytes for op in both(layer) if op.axis == "tp"} == {2 * SBH}
    assert layer.boundary_bytes == 2 * SBH / 4
    passes = [op.moved_bytes for op in layer.forward if op.name == "derived.norm"]
    plain = [op.moved_bytes for op in trace_of(GPT, PLAN).parts[trace.layers[0]].forward if op.name == "derived.norm"]
    assert passes == [moved / 4 for moved in plain]


def test_weight_gradients_wait_for_the_gather_of_what_they_multiply() -> None:
    layer = trace_of(GPT, replace(PLAN, sequence_parallel=True)).parts["attention+dense"]
    again = {op.id for op in layer.backward if op.collective == "all_gather" and not op.deps}
    waiting = [op for op in layer.backward if op.weight_gradient and again.intersection(op.deps)]
    # of the two products that are split by columns, and the last one of the layer behind the gather of its gradient
    assert (len(waiting), len(again)) == (2, 2)


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
def test_data_parallel_bytes_are_weights_and_gradients_by_the_stage_of_sharding(shards: int) -> None:
    plan = replace(PLAN, devices=32, dp=8, global_batch=64, shards=shards)
    trace = trace_of(GPT, plan, FLASH)
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]

    def moved(*passes: tuple[Op, ...]) -> dict[str, float]:
        ops = [op for one in passes for op in one if op.axis == "dp"]
        return {
            what: sum(op.payload_bytes for op in ops if op.collective == what) for what in {o.collective for o in ops}
        }

    count = rank_parameters(GPT, plan)[0]
    gathered, reduced = {"all_gather": 2 * count}, {"reduce_scatter" if shards else "all_reduce": 4 * count}
    assert moved(*(part.forward for part in parts)) == (gathered if shards else {})
    assert moved(*(part.backward for part in parts)) == reduced | (gathered if shards == 3 else {})


@pytest.mark.parametrize(("shards", "width", "bytes_each"), [(0, 4, 0), (1, 4, 0), (2, 4, 18), (3, 4, 18), (3, 2, 8)])
def test_sharded_gradients_pass_through_a_buffer_of_all_of_them(shards: int, width: int, bytes_each: int) -> None:
    """Copied in 2 bytes, cast if they are reduced in 4, and divided in place."""
    plan = replace(PLAN, devices=32, dp=8, global_batch=64, shards=shards)
    rules = replace(FLASH, grad_bytes=width)
    trace = derived(analytic_trace(GPT, plan, rules), plan, rules)
    moved = 0.0
    for name in (trace.embedding, *trace.layers, trace.head):
        ops = trace.parts[name].backward
        buffers = [op for op in ops if op.name == "derived.gradient_buffer"]
        moved += sum(op.moved_bytes for op in buffers)
        reduced = [op for op in ops if op.axis == "dp" and op.collective == "reduce_scatter"]
        assert not buffers or [op.deps for op in reduced] == [(op.id,) for op in buffers]
        assert all(op.weight_gradient and op.deps for op in buffers)
    assert moved == pytest.approx(bytes_each * rank_parameters(GPT, plan)[0])


def test_gradients_are_reduced_in_buckets_as_they_become_complete() -> None:
    plan = replace(PLAN, devices=32, dp=8, global_batch=64)
    whole = trace_of(GPT, plan, FLASH)
    size = next(op.payload_bytes for op in whole.parts["attention+dense"].backward if op.axis == "dp")
    trace = derived(analytic_trace(GPT, plan, FLASH), plan, FLASH, bucket_bytes=size / 2)
    pieces = [op for op in trace.parts["attention+dense"].backward if op.axis == "dp"]
    assert [op.payload_bytes for op in pieces] == [size / 2] * 2
    assert pieces[0].id < max(op.id for op in trace.parts["attention+dense"].backward if op.weight_gradient)
    assert total(trace, payload("dp")) == pytest.approx(total(whole, payload("dp")))


def test_updates_are_of_a_rank_s_share() -> None:
    plan = replace(PLAN, devices=32, dp=8, global_batch=64)

    def moved(plan: TrainingPlan) -> float:
        trace = trace_of(GPT, plan, FLASH)
        return sum(op.moved_bytes for name in (*trace.layers, trace.head) for op in trace.parts[name].optimizer)

    assert moved(plan) == pytest.approx(FLASH.optimizer_bytes * rank_parameters(GPT, plan)[0])
    assert moved(replace(plan, shards=1)) == pytest.approx(moved(plan) / 8)


@pytest.mark.parametrize("framework", [SCORES, FLASH])
def test_context_parallel_ranks_exchange_keys_and_values_three_times(framework: Framework) -> None:
    shape = model_shape("llama3-8b")
    plan = replace(PLAN, devices=8, tp=2, cp=4, sequence=4096)
    trace = trace_of(shape, plan, framework)
    exchanged = [op.payload_bytes for op in both(trace.parts[trace.layers[0]]) if op.axis == "cp"]
    # products of scores know nothing of heads that share keys, the projections before them do
    narrow = 2 * plan.micro_batch * 4096 * 2 * shape.kv_heads * shape.head_dim / plan.tp
    assert exchanged == [pytest.approx(narrow)] * 3
    whole = trace_of(shape, replace(plan, devices=2, cp=1), framework)
    assert total(trace, payload("tp")) == pytest.approx(total(whole, payload("tp")) / 4)


def test_experts_are_spread_and_tokens_sent_to_each_rank_that_needs_them() -> None:
    plan = TrainingPlan(
        devices=8, micro_batch=1, global_batch=4, sequence=4096, tp=2, dp=4, ep=8, sequence_parallel=True
    )
    trace = trace_of(MOE, plan, FLASH)
    layer = trace.parts[trace.layers[0]]
    one = 4096 / 2 * 2 * MOE.hidden * distinct_ranks(8, MOE.top_k)
    assert [op.payload_bytes for op in both(layer) if op.axis == "ep"] == [pytest.approx(one)] * 4
    products = [op for op in layer.forward if op.kind == "gemm" and op.shape[3] > 1]
    assert {op.shape[3] for op in products} == {MOE.experts // 8}
    assert {op.shape[0] for op in products} == {4096 // 2 * MOE.top_k * 8 // MOE.experts}
    flops = total(trace, lambda op: op.flops if op.kind == "gemm" else 0.0)
    alone = trace_of(MOE, replace(plan, ep=1), FLASH)
    assert flops == pytest.approx(total(alone, lambda op: op.flops if op.kind == "gemm" else 0.0))
    dense, expert = rank_parameters(MOE, plan)
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    assert sum(part.parameters for part in parts) == pytest.approx(dense, rel=0.01)
    assert sum(part.expert_parameters for part in parts) == pytest.approx(expert)


def test_expert_gradients_are_reduced_over_their_own_replicas() -> None:
    plan = TrainingPlan(
        devices=16, micro_batch=1, global_batch=16, sequence=4096, tp=1, dp=16, ep=8, shards=3, sequence_parallel=True
    )
    ops = [op for op in both(trace_of(MOE, plan, FLASH).parts["attention+moe"]) if op.axis == "dp"]
    groups = {op.name.endswith(".experts"): members(op, plan) for op in ops}
    assert groups == {False: (16, 1), True: (2, 8)}
    alone = [op.name for op in both(trace_of(MOE, replace(plan, ep=16), FLASH).parts["attention+moe"])]
    assert not any(name.endswith(".experts") for name in alone)  # one replica reduces nothing


def test_low_precision_narrows_linear_layers_and_casts_each_operand_once() -> None:
    shape = model_shape("llama3-8b")
    trace = trace_of(shape, replace(PLAN, dtype="fp8"), FLASH)
    layer = trace.parts[trace.layers[0]]
    assert {op.dtype for op in both(layer) if op.kind == "gemm"} == {"fp8"}
    assert {op.dtype for op in both(trace.parts[trace.head]) if op.kind == "gemm"} == {"bf16"}
    tokens, h, ffn = 2 * 512, shape.hidden, shape.ffn
    inputs = 2 * h + (shape.heads * shape.head_dim + ffn) / 4
    gradients = 2 * h + ((shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * ffn) / 4
    cast = sum(op.moved_bytes for op in both(layer) if op.name == "derived.cast")
    assert cast == pytest.approx(CAST_BYTES["fp8"] * tokens * (inputs + gradients))
    moe = trace_of(MOE, replace(PLAN, tp=1, devices=8, dp=8, ep=8, dtype="fp8"), FLASH).parts["attention+moe"]
    assert {op.dtype for op in moe.forward if op.kind == "gemm" and MOE.experts in op.shape[:3]} == {"bf16"}


def test_a_share_of_the_layers_is_computed_again() -> None:
    trace = trace_of(GPT, replace(PLAN, recompute="full", recompute_share=0.5))
    assert trace.layers == ("attention+dense", "attention+dense+recomputed") * 2
    again = trace.parts["attention+dense+recomputed"]
    assert sum(op.recomputed for op in again.backward) == len(again.forward)
    # nothing of the backward starts before the layer is computed again
    assert all(op.deps for op in again.backward if not op.recomputed)


def test_weight_gradients_are_found_where_capture_did_not_mark_them() -> None:
    trace = analytic_trace(MOE, replace(PLAN, tp=1, devices=1), FLASH)
    bare = {
        name: replace(part, backward=tuple(replace(op, weight_gradient=False) for op in part.backward))
        for name, part in trace.parts.items()
    }
    assert marked(replace(trace, parts=bare), FLASH).parts == trace.parts


def test_frozen_weights_leave_two_thirds_of_the_products_and_reduce_nothing() -> None:
    plan = replace(PLAN, devices=32, dp=8, global_batch=64, lora=True)
    trace = trace_of(GPT, plan, FLASH)
    trained = trace_of(GPT, replace(plan, lora=False), FLASH)

    def products(op: Op) -> float:
        return op.flops if op.kind == "gemm" else 0.0

    assert total(trace, products) == pytest.approx(total(trained, products) * 2 / 3)
    assert total(trace, payload("dp")) == 0
    assert not any(part.optimizer for part in trace.parts.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sequence": 1024}, "sequence 512"),
        ({"cp": 3, "devices": 12}, "nearest that does: 513"),
        ({"ep": 2}, "no experts"),
        ({"ep": 3}, "nearest that does: 2"),
        ({"dtype": "fp32"}, "capture the model in fp32"),
    ],
)
def test_what_only_another_capture_can_give_is_refused(change: dict[str, Any], said: str) -> None:
    trace = analytic_trace(GPT, PLAN, FLASH)
    with pytest.raises(ConfigError, match=said):
        derived(trace, replace(PLAN, **change), FLASH)


def test_layers_of_hybrids_and_windowed_models_are_kinds_of_blocks() -> None:
    gpt_oss = replace(GPT, windowed_layers=2, window=128)
    assert layer_kinds(gpt_oss) == ("attention+dense", "windowed attention+dense") * 2
    hybrid = replace(GPT, layers=6, attention_layers=1, dense_layers=2, mamba_layers=3, mamba_heads=8, mamba_head_dim=64,
                     mamba_state=16, mamba_groups=1)  # fmt: skip
    kinds = layer_kinds(hybrid)
    assert (kinds.count("attention"), kinds.count("dense"), kinds.count("mamba")) == (1, 2, 3)
    assert total(trace_of(hybrid, PLAN, FLASH), product_flops) > 0
    with pytest.raises(ConfigError, match="capture the model itself"):
        layer_kinds(replace(hybrid, mamba_layers=2))
