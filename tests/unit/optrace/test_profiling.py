"""Measuring this machine: that calls do what their records say, and that what cannot be measured is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.core.errors import ClusterError, ConfigError
from rollart.optrace.measured_ops import distinct
from rollart.optrace.ops import Op
from rollart.optrace.profiling import beside, groups
from rollart.optrace.profiling.cases import ready
from rollart.optrace.profiling.device import profile_device, profile_ops, torch_device
from rollart.optrace.profiling.grid import GRIDS, attention_op, gemm_op, operators, pass_op
from rollart.optrace.profiling.passes import PASSES
from rollart.optrace.profiling.timing import Reading, measure, reading
from rollart.perf.collectives import OPS
from rollart.perf.device_profile import DeviceProfile, base_name, read_profile

CPU = torch.device("cpu")
ROOM_BYTES = 64.0 * 2**20
STREAMS = {"_foreach_norm": 1.0, "linalg_vector_norm": 1.0, "_foreach_lerp_": 3.0, "_foreach_addcmul_": 4.0,
           "_foreach_addcdiv_": 4.0, "_fused_adamw_": 7.0}  # fmt: skip


def named(name: str) -> Op:
    return pass_op(name, (24, 40), STREAMS.get(name, 3.0 if name.endswith("backward") else 2.0), dtype="fp32")


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_of_the_table_runs(name: str) -> None:
    one = ready(named(name), CPU, 0)
    with torch.no_grad():
        one.run()
    assert one.exact
    assert one.held_bytes > 0


def test_an_unknown_pass_and_one_of_integers_are_copies_of_as_many_bytes() -> None:
    for op in (named("fancy"), pass_op("derived.fused", (8, 8), 4.0, dtype="fp32"),
               Op(id=0, name="aten.add", kind="pass", shape=(8, 8), dtype="int64", moved_bytes=2048.0)):  # fmt: skip
        one = ready(op, CPU, 0)
        made: Any = one.run()
        assert not one.exact
        assert 2 * made.numel() * made.element_size() == op.moved_bytes


@pytest.mark.parametrize(
    ("name", "shape", "streams", "made"),
    [
        ("mul", (2, 6, 8), 3.0, (2, 6, 8)), ("mul", (2, 6, 8), 2.0 + 1 / 12, (2, 6, 8)), ("div", (2, 6, 8), 1.125, (2, 6, 8)),
        ("mul", (2, 6, 8), 2.125, (2, 6, 8)), ("sum", (2, 6, 8), 1.125, (2, 6)), ("sum", (2, 6, 8), 1 + 1 / 12, (8,)),
        ("mean", (2, 6, 8), 1.01, ()), ("embedding", (2, 6, 8), 2.0, (12, 8)), ("embedding", (50, 8), 0.48, (12, 8)),
        ("embedding_dense_backward", (2, 6, 8), 2.5, (6, 8)), ("embedding_dense_backward", (50, 8), 1.48, (50, 8)),
        ("clone", (2, 3, 4, 5), 2.0, (2, 3, 4, 5)), ("slice_backward", (2, 8), 1.5, (2, 8)), ("cat", (2, 8), 2.0, (2, 8)),
    ],
)  # fmt: skip
def test_bytes_say_what_the_operands_are(
    name: str, shape: tuple[int, ...], streams: float, made: tuple[int, ...]
) -> None:
    one = ready(pass_op(name, shape, streams, dtype="fp32"), CPU, 0)
    found: Any = one.run()
    assert found.shape == made
    assert one.first is None or one.first.mul_(1.0) is one.first


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_products_have_the_shape_asked_for_in_each_layout(number: int, batch: int) -> None:
    lead = (batch,) if batch > 1 else ()
    for op in (gemm_op(6, 10, 4, batch, dtype="fp32"), gemm_op(6, 10, 4, batch, dtype="fp32", weight_gradient=True)):
        made: Any = ready(op, CPU, number).run()
        assert made.shape == (*lead, 6, 10)


def test_attention_runs_forward_and_backward_masked_or_not() -> None:
    with torch.no_grad():
        forward: Any = ready(attention_op(16, 16, 4, 8, dtype="fp32"), CPU, 0).run()
        backward: Any = ready(attention_op(16, 16, 4, 8, dtype="fp32", backward=True), CPU, 0).run()
        one: Any = ready(attention_op(1, 16, 4, 8, dtype="fp32"), CPU, 0).run()
    assert forward[0].shape == (1, 4, 16, 8)
    assert [part.shape for part in backward] == [(1, 4, 16, 8)] * 3
    assert one[0].shape == (1, 4, 1, 8)


def test_communication_and_unknown_dtypes_are_refused() -> None:
    sent = Op(id=0, name="x", kind="collective", stream="comm", collective="all_reduce", axis="tp", payload_bytes=1e3)
    with pytest.raises(ConfigError, match=r"profiling\.groups"):
        ready(sent, CPU, 0)
    odd = Op(id=0, name="aten.mm", kind="gemm", shape=(2, 2, 2, 1), dtype="fp64", flops=16.0)
    with pytest.raises(ConfigError, match="fp64"):
        ready(odd, CPU, 0)


def test_rounds_time_every_operator_and_what_torch_refuses_is_an_outcome() -> None:
    ticks = iter(range(10**6))
    ops = [gemm_op(8, 8, 8, dtype="fp32"), gemm_op(8, 8, 24, dtype="fp4"), pass_op("add", (64, 64), 3.0, dtype="fp32")]
    found = measure(
        ops, device=CPU, rounds=3, cache_bytes=0.0, room_bytes=ROOM_BYTES, clock=lambda: float(next(ticks))
    )  # fmt: skip
    assert [isinstance(one, Reading) for one in found] == [True, False, True]
    assert {one.seconds for one in found if isinstance(one, Reading)} == {1.0}
    assert measure(ops, device=CPU, rounds=3, cache_bytes=0.0, room_bytes=1.0, ends_at=0.0) == ["out of time"] * 3


def test_a_reading_is_the_median_with_the_spread_of_the_median() -> None:
    assert reading([2.0, 2.0, 9.0]) == Reading(seconds=2.0, log_std=0.0)
    assert reading([1.0, 2.0, 4.0]).log_std == pytest.approx(1.4826 * 1.2533 * 0.693147 / 3**0.5, rel=1e-4)
    with pytest.raises(ConfigError, match="round"):
        reading([])


def test_the_grid_begins_coarse_and_has_no_operator_twice() -> None:
    for grid in GRIDS.values():
        ops = operators(grid, "fp32")
        assert len(distinct(ops)) == len(ops)
        first = [op.shape[0] for op in ops[: len(ops) // 3] if op.kind == "gemm" and not op.weight_gradient]
        assert {min(grid.tokens), max(grid.tokens)} <= set(first)


@pytest.fixture(scope="module")
def here() -> DeviceProfile:
    ops = [gemm_op(64, 64, 64, dtype="fp32"), gemm_op(256, 256, 256, dtype="fp32"), gemm_op(8, 8, 8, dtype="fp4"),
           pass_op("fancy", (64, 64), 3.0, dtype="fp32")]  # fmt: skip
    return profile_ops([*ops, *ops], rounds=3)


def test_a_profile_of_this_cpu_holds_what_was_asked_and_says_what_it_lacks(here: DeviceProfile) -> None:
    times = {row.shape: row.seconds for row in here.ops if row.kind == "gemm"}
    assert times[(64, 64, 64, 1)] < times[(256, 256, 256, 1)] < times[(512, 512, 512, 1)]
    assert here.host is not None
    assert here.host.serial
    assert 0.0 < here.host.op_s < here.host.backward_op_s + here.host.recorded_op_s
    assert any("(8, 8, 8, 1) fp4" in note for note in here.notes)
    assert any(note.startswith("fancy: a copy") for note in here.notes)
    assert here.origin.versions["torch"] == torch.__version__
    assert torch.is_grad_enabled()


def test_the_grid_is_cut_short_in_time_and_written(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    found = profile_device(out, device="cpu", minutes=0.02, grid="tiny", ranks=0)
    assert read_profile(out) == found
    assert {row.kind for row in found.ops} >= {"gemm", "pass"}
    assert any("no collectives" in note for note in found.notes)


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minutes is 0"):
        profile_device(tmp_path / "x.json", device="cpu", minutes=0.0)
    with pytest.raises(ConfigError, match="tiny"):
        profile_device(tmp_path / "x.json", device="cpu", grid="huge")
    for name in ("meta", "abacus", "cuda:99"):
        with pytest.raises(ConfigError, match=name):
            torch_device(name)
    with pytest.raises(ConfigError, match="nothing could be measured"):
        profile_ops([gemm_op(8, 8, 8, dtype="fp32")], minutes=0.0)


def test_collectives_between_two_processes_are_measured() -> None:
    asked = [groups.Asked(op=op, payload_bytes=size) for op in OPS for size in (4096.0, 1 << 20)]
    found = groups.profile_collectives(2, asked, rounds=3, deadline_s=120.0)
    assert [(one.op, one.payload_bytes) for one in found] == [(one.op, one.payload_bytes) for one in asked]
    assert all(0.0 < one.seconds < 1.0 and one.log_std >= 0.0 for one in found)


def test_groups_that_cannot_be_are_refused_and_a_failed_process_is_told() -> None:
    with pytest.raises(ConfigError, match="1 rank"):
        groups.profile_collectives(1, groups.standard())
    with pytest.raises(ConfigError, match="mpi"):
        groups.profile_collectives(2, groups.standard(), backend="mpi")
    with pytest.raises(ConfigError, match="all_reduce"):
        groups.Asked(op="reduce", payload_bytes=8.0)


@pytest.mark.long
def test_kernels_beside_a_collective_and_neighbours() -> None:
    ops = [gemm_op(256, 256, 256, dtype="fp32"), pass_op("add", (256, 256), 3.0, dtype="fp32")]
    found = beside.profile_overlaps(ops, ranks=2, backend="gloo", payload_bytes=1 << 20, batch_s=0.01)
    assert {one.kernel for one in found} <= {"gemm", "add"}
    assert all(one.solo_s > 0 and one.seconds > 0 for one in found)
    crowded = profile_ops(ops, rounds=3, neighbours=1)
    assert any("other process" in note for note in crowded.notes)


def _fails(rank: int, device: torch.device) -> None:
    raise RuntimeError(f"no luck on {device}")


def test_a_rank_that_fails_ends_the_call_with_its_error() -> None:
    with pytest.raises(ClusterError, match="no luck on cpu"):
        groups.run_ranks(_fails, 1, "gloo", 1, 60.0)


def test_names_in_the_table_are_base_names() -> None:
    assert all(base_name(f"aten.{name}.Tensor") == name for name in PASSES)
