"""Fused passes: fewer bytes, the same results for everybody outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.optrace.fusion import accumulating, fuse, fused
from rollart.optrace.ops import Op, Part, Trace
from rollart.perf.train_plan import TrainingPlan

MIB = float(1 << 20)


def reads(number: int, *deps: int, inputs: float = 1.0, saved: float = 0.0, name: str = "aten.mul") -> Op:
    """A pass that reads `inputs` MiB and writes one."""
    return Op(
        id=number, name=name, kind="pass", deps=deps, shape=(1, 1 << 19), moved_bytes=(inputs + 1) * MIB,
        written_bytes=MIB, saved_bytes=saved * MIB,
    )  # fmt: skip


def multiplies(number: int, *deps: int) -> Op:
    return Op(id=number, name="aten.mm", kind="gemm", deps=deps, shape=(512, 1024, 64, 1), flops=1e9, written_bytes=MIB)


def test_a_chain_reads_its_input_once_and_writes_its_result_once() -> None:
    (one,) = fuse([reads(0), reads(1, 0), reads(2, 1, name="aten.add")])
    assert (one.moved_bytes, one.written_bytes) == (2 * MIB, MIB)
    assert (one.name, one.deps) == ("fused.mul+add", ())


def test_members_that_read_the_same_result_read_it_once() -> None:
    ops = fuse([multiplies(0), reads(1, 0), reads(2, 0, 1, inputs=2)])
    assert [op.moved_bytes for op in ops[1:]] == [2 * MIB]


def test_a_kernel_runs_where_its_last_member_does_and_passes_a_product_between() -> None:
    ops = fuse(
        [multiplies(0), reads(1, 0, name="aten.silu"), multiplies(2), reads(3, 1, 2, inputs=2), multiplies(4, 3)]
    )
    assert [op.kind for op in ops] == ["gemm", "gemm", "pass", "gemm"]
    assert ops[2].deps == (0, 1)
    assert ops[2].moved_bytes == 3 * MIB


def test_what_a_product_reads_in_between_keeps_passes_apart() -> None:
    ops = [reads(0), multiplies(1, 0), reads(2, 0, 1, inputs=2)]
    assert fuse(ops) == tuple(ops)


def test_kept_results_inside_a_kernel_are_made_again_from_what_it_reads() -> None:
    ops = fuse([multiplies(0), reads(1, 0, saved=1.0), reads(2, 1, saved=1.0), multiplies(3, 2)])
    assert [op.saved_bytes for op in ops] == [MIB, MIB, 0.0]  # the input instead of the middle, and the result
    residual = fuse([multiplies(0), reads(1, 0, inputs=2), reads(2, 1, saved=2.0), reads(3, 2, saved=1.0), multiplies(4, 3),
                     reads(5, 1, 4, inputs=2)])  # fmt: skip
    assert [op.saved_bytes for op in residual] == [0.0, 2 * MIB, 0.0, 0.0]


def test_weight_gradients_recomputed_and_gathering_passes_stay_apart() -> None:
    chain = [reads(0), reads(1, 0), reads(2, 1)]
    changes: tuple[dict[str, Any], ...] = (
        {"weight_gradient": True},
        {"recomputed": True},
        {"name": "aten.index_select"},
    )
    for change in changes:
        ops = [chain[0], replace(chain[1], **change), chain[2]]
        assert len(fuse(ops)) == 3


def test_the_input_of_a_part_is_kept_where_its_first_kernel_needs_it_again() -> None:
    forward = (reads(0, saved=2.0), reads(1, 0, saved=1.0), multiplies(2, 1))
    part = Part(name="layer", forward=forward, backward=(), saved_bytes=3 * MIB, boundary_bytes=MIB)
    plan = TrainingPlan(devices=1, micro_batch=1, global_batch=1, sequence=512)
    trace = Trace(
        model="one", plan=plan, parts={"layer": part, "embedding": part, "head": part}, layers=("layer",)
    )  # fmt: skip
    assert fused(trace).parts["layer"].saved_bytes == 2 * MIB  # the input and the result, not what was between
    before = replace(part, saved_bytes=4 * MIB)  # the input was kept already
    assert fused(replace(trace, parts={**trace.parts, "layer": before})).parts["layer"].saved_bytes == 2 * MIB


def test_gradients_are_added_up_by_the_product_that_makes_them() -> None:
    gradient = replace(multiplies(1, 0), weight_gradient=True, moved_bytes=5 * MIB)
    adds = replace(reads(2, 1, inputs=2, name="aten.add_"), weight_gradient=True)
    product, other = accumulating([multiplies(0), gradient, adds, reads(3, 2)])[1:]
    assert (product.moved_bytes, other.deps) == (6 * MIB, (1,))
    shared = [multiplies(0), gradient, adds, reads(3, 1)]
    assert len(accumulating(shared)) == 4


@st.composite
def any_pass(draw: st.DrawFn) -> list[Op]:
    ops: list[Op] = []
    for number in range(draw(st.integers(1, 14))):
        deps = draw(st.sets(st.integers(max(0, number - 4), max(0, number - 1)), max_size=2)) if number else set()
        if draw(st.booleans()):
            ops.append(reads(number, *sorted(deps), inputs=max(1, len(deps)), saved=draw(st.sampled_from([0.0, 1.0]))))
        else:
            ops.append(multiplies(number, *sorted(deps)))
    return ops


@settings(max_examples=80, deadline=None)
@given(any_pass())
def test_fusion_moves_no_more_and_leaves_products_in_order(ops: list[Op]) -> None:
    made = fuse(ops)
    assert [op.id for op in made] == list(range(len(made)))
    assert sum(op.moved_bytes for op in made) <= sum(op.moved_bytes for op in ops)
    assert all(op.moved_bytes > 0 or op.flops > 0 for op in made)
    assert sum(op.kind == "gemm" for op in made) == sum(op.kind == "gemm" for op in ops)
    # every product still waits for those it waited for, and for what a merged kernel before it reads besides
    assert all(now >= before for now, before in zip(_products(made), _products(ops), strict=True))


def _products(ops: list[Op] | tuple[Op, ...]) -> list[frozenset[int]]:
    """For each product, in order, which earlier products it waits for."""
    behind: list[frozenset[int]] = []
    found: list[frozenset[int]] = []
    for op in ops:
        waits = frozenset[int]().union(*(behind[dep] for dep in op.deps))
        if op.kind == "gemm":
            found.append(waits)
            waits |= {len(found) - 1}
        behind.append(waits)
    return found
