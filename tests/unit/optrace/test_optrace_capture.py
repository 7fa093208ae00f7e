"""Traces of real models: against closed forms, against themselves built in full, and against other ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollart.core.errors import ConfigError
from rollart.optrace.capture import capture
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.parts import thinner
from rollart.optrace.sources import resolve
from rollart.perf.shapes import gpt_shape
from rollart.perf.train_plan import DEFAULT_FRAMEWORK, FUSED_ADAM_BYTES, Framework, TrainingPlan, framework

GPT = "gpt:layers=4,hidden=256,heads=4,vocab=512"
SCORES = framework("megatron-lm")


def plan(**changes: object) -> TrainingPlan:
    values: dict[str, object] = {"micro_batch": 2, "sequence": 128, "global_batch": 2, **changes}
    degrees = [int(str(values.get(axis, 1))) for axis in ("tp", "pp", "cp", "dp")]
    values["devices"] = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    return TrainingPlan(**values)  # type: ignore[arg-type]


@cache
def traced(word: str, asked: TrainingPlan, rank: int = 0, layers: int | None = None, how: Framework = SCORES) -> Trace:
    return capture(resolve(word, max_layers=layers), asked, rank=rank, framework=how)


def all_ops(trace: Trace, *passes: str) -> list[Op]:
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    return [op for part in parts for name in passes for op in getattr(part, name)]


def flops(ops: Sequence[Op]) -> float:
    return sum(op.flops for op in ops)


def talk(part: Part, name: str) -> list[tuple[str, float]]:
    return [(op.collective, op.payload_bytes) for op in getattr(part, name) if op.stream == "comm"]


@pytest.mark.parametrize("tp", [1, 2])
def test_flops_of_scores_match_the_closed_form(tp: int) -> None:
    """72 B L s h^2 (1 + s / 6h + V / 12hL): arXiv 2104.04473, equation 3 without recomputation."""
    trace = traced(GPT, plan(tp=tp))
    batch, length, hidden, layers, vocab = 2, 128, 256, 4, 512
    closed = 72 * batch * layers * length * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * hidden * layers))
    assert flops(all_ops(trace, "forward", "backward")) * tp == pytest.approx(closed, rel=0.01)


def test_flops_of_fused_attention_are_those_of_the_shape() -> None:
    trace = traced("llama3-8b", plan(), how=DEFAULT_FRAMEWORK)
    shape = resolve("llama3-8b").shape
    assert shape is not None
    forward = flops(all_ops(trace, "forward"))
    assert forward == pytest.approx(2 * 128 * shape.flops_per_token(128 / 2), rel=0.001)
    attention = [op for op in trace.parts[trace.layers[0]].backward if op.kind == "attention_backward"]
    assert [op.shape for op in attention] == [(128, 128, 2 * 32, 2 * 128)]


@pytest.mark.parametrize("tp", [1, 2])
def test_kept_activations_match_the_closed_form(tp: int) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)) a layer: arXiv 2205.05198, equation 2."""
    trace = traced(GPT, plan(tp=tp))
    closed = 128 * 2 * 256 * (10 + 24 / tp + 5 * 4 * 128 / (256 * tp))
    part = trace.parts[trace.layers[-1]]
    assert part.saved_bytes == pytest.approx(closed, rel=0.02)
    assert part.boundary_bytes == 2 * 128 * 256 * 2
    inside = sum(op.saved_bytes for op in part.forward)
    assert inside == pytest.approx(part.saved_bytes - part.boundary_bytes)


def test_parameters_are_those_of_the_shape() -> None:
    shape = gpt_shape(layers=4, hidden=256, heads=4, vocab=512)
    trace = traced(GPT, plan(tp=2))
    held = sum(trace.parts[name].parameters for name in (trace.embedding, *trace.layers, trace.head))
    whole = shape.parameters + 128 * 256  # positions for the sequence
    biases = 4 * (3 + 1 + 4 + 1 + 4) * 256 + 2 * 256
    assert whole / 2 < held < whole / 2 + 128 * 256 / 2 + biases


@pytest.mark.parametrize(("family", "tp"), [(GPT, 2), ("llama3-8b", 4)])
def test_tensor_parallel_layers_reduce_twice_each_way(family: str, tp: int) -> None:
    trace = traced(family, plan(tp=tp))
    part = trace.parts[trace.layers[0]]
    each = ("all_reduce", part.boundary_bytes)
    assert talk(part, "forward") == talk(part, "backward") == [each, each]
    assert {op.axis for op in part.forward if op.stream == "comm"} == {"tp"}
    assert len([op for op in trace.step if op.collective == "all_reduce"]) == 1


def test_sequence_parallel_layers_gather_and_scatter_as_much() -> None:
    plain = traced("llama3-8b", plan(tp=4))
    trace = traced("llama3-8b", plan(tp=4, sequence_parallel=True))
    part, whole = trace.parts[trace.layers[0]], plain.parts[plain.layers[0]].boundary_bytes
    assert part.boundary_bytes == whole / 4
    assert talk(part, "forward") == [("all_gather", whole), ("reduce_scatter", whole)] * 2
    assert sorted(talk(part, "backward")) == sorted(talk(part, "forward"))
    assert flops(all_ops(trace, "forward")) == flops(all_ops(plain, "forward"))


def test_full_sharding_gathers_twice_and_scatters_once() -> None:
    trace = traced("llama3-8b", plan(dp=2, shards=3, global_batch=4))
    part = trace.parts[trace.layers[0]]
    weights = part.parameters * 2
    assert talk(part, "forward") == [("all_gather", weights)]
    assert talk(part, "backward") == [("all_gather", weights), ("reduce_scatter", weights)]
    assert len(set(trace.layers)) == 1
    assert trace.plan.dp == 2
    whole = traced("llama3-8b", plan()).parts["dense layer"]
    assert part.parameters == whole.parameters
    assert part.saved_bytes == whole.saved_bytes  # gathered weights are freed
    updated = sum(op.moved_bytes for op in part.optimizer)
    assert updated < sum(op.moved_bytes for op in whole.optimizer) / 2


def test_more_shards_are_scaled_from_fewer() -> None:
    few, many = (traced("llama3-8b", plan(dp=dp, shards=3, global_batch=2 * dp)) for dp in (2, 8))
    scaled = thinner(few.parts["dense layer"], 4)
    for name in ("forward", "backward", "optimizer"):
        wanted, got = getattr(many.parts["dense layer"], name), getattr(scaled, name)
        assert [op.name for op in got] == [op.name for op in wanted]
        assert [op.payload_bytes for op in got] == [op.payload_bytes for op in wanted]
        moved = [sum(op.moved_bytes for op in ops) for ops in (got, wanted)]
        assert moved[0] == pytest.approx(moved[1], rel=1e-3)


@pytest.mark.parametrize("asked", [plan(), plan(tp=2, sequence_parallel=True)])
def test_layers_that_are_not_built_are_as_those_that_are(asked: TrainingPlan) -> None:
    assert traced(GPT, asked) == traced(GPT, asked, layers=0)


def test_mixed_layers_are_each_built(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 128, "mlp_only_layers": [0, 1, 2],
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    trace = traced(str(path), plan())
    assert trace == traced(str(path), plan(), layers=0)
    assert trace.layers == ("dense layer",) * 3 + ("moe layer",) * 3
    experts = trace.parts["moe layer"]
    assert experts.expert_parameters == 8 * 3 * 64 * 32
    grouped = [op.shape for op in experts.forward if "_grouped_mm" in op.name]
    assert grouped == [(2 * 128 * 2 // 8, 64, 64, 8), (2 * 128 * 2 // 8, 64, 32, 8)]
    assert any("evenly" in read.assumption for read in trace.reads)


def test_two_members_of_a_class_run_the_same_and_nothing_is_left() -> None:
    asked = plan(tp=4, dp=2, global_batch=2)
    first, other = traced(GPT, asked, rank=0), traced(GPT, asked, rank=7)
    assert first == other
    assert capture(resolve(GPT), plan(), framework=SCORES) == traced(GPT, plan())
    assert not dist.is_initialized()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_operators_depend_on_what_they_read() -> None:
    part = traced("llama3-8b", plan(tp=4)).parts["dense layer"]
    forward = {op.id: op for op in part.forward}
    reduced = next(op for op in part.forward if op.stream == "comm")
    assert [forward[dep].kind for dep in reduced.deps] == ["gemm"]
    assert any(reduced.id in op.deps for op in part.forward)
    deferred = [op for op in part.backward if op.weight_gradient]
    assert len([op for op in deferred if op.kind == "gemm"]) == 7  # one of each weight matrix
    waited = {dep for op in part.backward if not op.weight_gradient for dep in op.deps}
    assert waited.isdisjoint(op.id for op in deferred)


def test_gradients_are_added_when_there_are_more_micro_batches() -> None:
    one, more = traced(GPT, plan()), traced(GPT, plan(global_batch=8))
    added = [op for op in all_ops(more, "backward") if op.name == "aten.add_"]
    assert len(added) >= 4 * 12
    assert not [op for op in all_ops(one, "backward") if op.name == "aten.add_"]
    assert all(op.weight_gradient for op in added)


def test_the_fused_update_moves_less() -> None:
    looped = replace(SCORES, optimizer_bytes=FUSED_ADAM_BYTES + 1)
    fused, plain = traced(GPT, plan()).parts["dense layer"], traced(GPT, plan(), how=looped).parts["dense layer"]
    per_weight = [sum(op.moved_bytes for op in part.optimizer) / part.parameters for part in (fused, plain)]
    assert per_weight[0] == pytest.approx(6 + 4 + 8 + 28 + 6, rel=0.01)  # cast, norm, clip, update, copy
    assert per_weight[1] > per_weight[0] + 30
    bare = capture(resolve(GPT), plan(), framework=SCORES, clip=False)
    assert not bare.step
    assert not bare.reads


def test_key_heads_and_vocabulary_are_fitted_and_noted() -> None:
    trace = traced("gpt:layers=2,hidden=256,heads=8,vocab=501", plan(tp=4))
    assert any("padded to 504" in note for note in trace.notes)
    shared = traced("llama3-8b", plan(tp=16))
    assert any("one of 8 key heads" in note for note in shared.notes)
    assert [op.shape[1] for op in shared.parts["dense layer"].forward if op.kind == "gemm"][:3] == [256, 128, 128]


@pytest.mark.parametrize(
    ("word", "asked", "rank", "said"),
    [
        ("llama3-8b", plan(tp=3), 0, "tp 3 does not divide the 32 heads; the nearest that does is 2"),
        ("llama3-8b", plan(), 1, "rank 1 is not one of 1 devices"),
        ("llama3-8b", plan(tp=4, sequence_parallel=True, sequence=126), 0, "tp 4 does not divide the sequence of 126"),
        ("mixtral-8x7b", plan(dtype="fp32"), 0, "experts in bf16 only, got dtype fp32"),
        ("nowhere_at_all:build", plan(), 0, "nowhere_at_all"),
    ],
)
def test_impossible_plans_are_refused(word: str, asked: TrainingPlan, rank: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        capture(resolve(word), asked, rank=rank)
    assert not dist.is_initialized()
