"""What is derived from a captured model against what capture sees where it can do the same by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollart.optrace.capture import capture
from rollart.optrace.ops import Op, Trace
from rollart.optrace.sources import resolve
from rollart.optrace.transforms import derived
from rollart.perf.memory import layer_activation_bytes, rank_parameters
from rollart.perf.train_plan import Framework, TrainingPlan

MODEL = resolve("gpt:layers=2,hidden=256,heads=4,vocab=512")
FLASH = Framework(attention="flash2", grad_bytes=4)
PLAN = TrainingPlan(devices=2, micro_batch=1, global_batch=1, sequence=256, tp=2)
HIDDEN_BYTES = 2 * 256 * 256


def total(trace: Trace, count: Callable[[Op], float]) -> float:
    parts = [trace.parts[name] for name in (trace.embedding, *trace.layers, trace.head)]
    return sum(count(op) for part in parts for op in (*part.forward, *part.backward))


def products(op: Op) -> float:
    return op.flops if op.kind != "pass" else 0.0


def test_derived_sequence_parallelism_is_the_captured_one_but_for_inputs_gathered_again() -> None:
    spread = replace(PLAN, sequence_parallel=True)
    ours = derived(capture(MODEL, PLAN, framework=FLASH), spread, FLASH)
    seen = derived(capture(MODEL, spread, framework=FLASH), spread, FLASH)
    assert total(ours, products) == pytest.approx(total(seen, products))
    for name in dict.fromkeys(seen.layers):
        mine, theirs = ours.parts[name], seen.parts[name]
        assert mine.boundary_bytes == theirs.boundary_bytes
        for again, ops, captured in ((0, mine.forward, theirs.forward), (2, mine.backward, theirs.backward)):
            counts = [sorted(op.collective for op in both if op.axis == "tp") for both in (ops, captured)]
            assert counts[0] == sorted([*counts[1], *["all_gather"] * again])
            assert {op.payload_bytes for op in ops if op.axis == "tp"} == {HIDDEN_BYTES}
    for name in (seen.embedding, seen.head):
        moved = [sum(op.payload_bytes for op in trace.parts[name].forward if op.axis == "tp") for trace in (ours, seen)]
        assert moved[0] == moved[1]


def test_derived_full_sharding_moves_the_bytes_of_the_captured_one() -> None:
    plan = replace(PLAN, devices=4, tp=1, dp=4, global_batch=4, shards=3)
    captured = capture(MODEL, plan, framework=FLASH)
    seen = derived(captured, plan, FLASH)
    assert seen.notes[-1].endswith("captured")
    plain = derived(
        capture(MODEL, replace(plan, devices=1, dp=1, global_batch=1, shards=0), framework=FLASH), plan, FLASH
    )
    assert total(plain, products) == pytest.approx(total(seen, products))
    for name in dict.fromkeys(seen.layers):
        for phase in ("forward", "backward"):
            ops, theirs = getattr(plain.parts[name], phase), getattr(seen.parts[name], phase)
            moved = [sum(op.payload_bytes for op in both if op.axis == "dp") for both in (ops, theirs)]
            assert moved[0] == pytest.approx(moved[1], rel=0.01)
    updates = [
        sum(op.moved_bytes for name in trace.layers for op in trace.parts[name].optimizer) for trace in (plain, seen)
    ]
    # 32-bit shards are not copied back to 16 bits
    assert updates[1] <= updates[0] == pytest.approx(updates[1], rel=0.15)


def test_captured_parameters_and_kept_activations_are_those_of_the_shape() -> None:
    assert MODEL.shape is not None
    captured = capture(MODEL, PLAN, framework=FLASH)
    trace = derived(captured, PLAN, FLASH)
    held = sum(trace.parts[name].parameters for name in (trace.embedding, *trace.layers, trace.head))
    # every rank holds the positions; norms and biases are a percent of so narrow a model
    positions = PLAN.sequence * MODEL.shape.hidden
    assert held == pytest.approx(rank_parameters(MODEL.shape, PLAN)[0] + positions, rel=0.01)
    # a compiler keeps what the closed form counts: inputs and results of kernels, nothing inside them
    fused = replace(FLASH, fused=True)
    layer = derived(captured, PLAN, fused).parts[trace.layers[0]]
    assert layer.saved_bytes == pytest.approx(layer_activation_bytes(MODEL.shape, PLAN, fused), rel=0.03)
