"""Prices of operators: what they rest on, and what no price may be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.optrace.costs import EAGER_PASSES, LAYER_OPERATORS, LEAST_LOG_STD, Pricer, step_log_std
from rollart.optrace.measured_ops import REACH, distinct, work_of
from rollart.optrace.ops import Op, Part
from rollart.optrace.parallel_groups import crosses, send_name
from rollart.perf.device_profile import CollectiveTime, DeviceProfile, HostTimes, OpTime, Origin
from rollart.perf.devices import device
from rollart.perf.links import fabric
from rollart.perf.train_calibration import calibration
from rollart.perf.train_comm import Group, collective_s, group, transfer_s
from rollart.perf.train_plan import Framework, TrainingPlan

H100 = device("H100 SXM")
LINKS = fabric("H100 SXM")
LAW = calibration()[0].law
PLAN = TrainingPlan(devices=64, micro_batch=1, global_batch=64, sequence=4096, tp=4, cp=2, dp=4, pp=2, ep=2)
EAGER = Framework(attention="flash3")


def pricer(**changes: Any) -> Pricer:
    given: dict[str, Any] = {"device": H100, "fabric": LINKS, "law": LAW, "framework": EAGER, "plan": PLAN}
    return Pricer(**(given | changes))


def gemm(rows: int, columns: int, inner: int, **changes: Any) -> Op:
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)
    return Op(
        id=0, name="aten.mm", kind="gemm", shape=(rows, columns, inner, 1), flops=2.0 * rows * columns * inner,
        moved_bytes=moved, **changes,
    )  # fmt: skip


def streamed(moved_bytes: float, name: str = "aten.add") -> Op:
    return Op(id=0, name=name, kind="pass", shape=(max(1, int(moved_bytes // 6)),), moved_bytes=moved_bytes)


def attention(kind: Any = "attention", pairs: float = 0.5) -> Op:
    flops = 2.0 * 4096 * 4096 * 32 * 256 * pairs * (2.5 if kind == "attention_backward" else 1.0)
    return Op(id=0, name="aten.sdpa", kind=kind, shape=(4096, 4096, 32, 256), flops=flops, moved_bytes=1e8)


def communicated(collective: str, axis: Any, payload_bytes: float = 1e7, name: str = "x") -> Op:
    return Op(
        id=0, name=name, kind="collective", stream="comm", collective=collective, axis=axis, payload_bytes=payload_bytes
    )  # fmt: skip


def row(op: Op, seconds: float, log_std: float = 0.01) -> OpTime:
    return OpTime(
        kind=op.kind, name=op.name, dtype=op.dtype, shape=op.shape, flops=op.flops, moved_bytes=op.moved_bytes,
        seconds=seconds, log_std=log_std, layout="tn" if op.weight_gradient else "",
    )  # fmt: skip


def profile(*rows: OpTime, **changes: Any) -> DeviceProfile:
    origin = Origin(kind="cuda", versions={"torch": "2.13.0"})
    given: dict[str, Any] = {"device": H100, "origin": origin, "ops": rows}
    return DeviceProfile(**(given | changes))


def measured_grid(factor: float = 1.5) -> DeviceProfile:
    """A device that is `factor` slower than the law says, whatever the shape."""
    law = pricer()
    ops = [gemm(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096) for k in (1024, 4096)]
    ops += [streamed(2.0**power) for power in (20, 24, 28)]
    return profile(*[row(op, factor * law.price(op).seconds) for op in ops])


def test_a_measured_operator_costs_what_was_measured() -> None:
    op = gemm(2048, 4096, 4096)
    found = pricer(profile=measured_grid(), scale=2.0).price(op)
    assert found.provenance == "measured"
    assert found.seconds == pytest.approx(1.5 * pricer().price(op).seconds)
    assert found.log_std >= LEAST_LOG_STD


def test_between_measured_shapes_the_law_is_corrected_by_what_was_measured() -> None:
    for op in (gemm(3000, 2000, 3000), gemm(8192 * 2, 4096, 4096), streamed(3e7), streamed(2.0**29)):
        found = pricer(profile=measured_grid(), scale=2.0).price(op)
        assert found.provenance == "interpolated"
        assert found.seconds == pytest.approx(1.5 * pricer().price(op).seconds, rel=1e-6)


@given(st.lists(st.floats(0.7, 3.0), min_size=4, max_size=12), st.integers(512, 8192), st.integers(512, 8192))
@settings(max_examples=30)
def test_an_estimate_lies_between_its_neighbours(factors: list[float], rows: int, inner: int) -> None:
    law = pricer()
    ops = [gemm(512 * 2 ** (i % 5), 2048, 512 * 2 ** (i // 3)) for i in range(len(factors))]
    rows_ = {work_of(op).signature: row(op, f * law.price(op).seconds) for op, f in zip(ops, factors, strict=True)}
    asked = gemm(rows, 2048, inner)
    found = pricer(profile=profile(*rows_.values())).price(asked)
    ratio = found.seconds / law.price(asked).seconds
    known = [one.seconds / law.price(op).seconds for op in ops for one in [rows_[work_of(op).signature]]]
    assert found.provenance == "analytic" or min(known) - 1e-9 <= ratio <= max(known) + 1e-9


def test_nothing_is_carried_far_beyond_what_was_measured() -> None:
    by_law = pricer(scale=2.0)
    priced = pricer(profile=measured_grid(), scale=2.0)
    for op in (gemm(int(8192 * REACH) + 1, 4096, 4096), gemm(2048, 256, 4096), streamed(2.0**30), streamed(1e3)):
        found = priced.price(op)
        assert found.provenance == "analytic"
        assert found == by_law.price(op)


def test_a_doubted_row_says_nothing_of_its_neighbours() -> None:
    law = pricer()
    rows = [row(gemm(m, 4096, 4096), law.price(gemm(m, 4096, 4096)).seconds) for m in (1024, 2048, 4096, 8192)]
    slow = row(gemm(1500, 4096, 4096), 10 * law.price(gemm(8192, 4096, 4096)).seconds)
    asked = gemm(1501, 4096, 4096)
    priced = pricer(profile=profile(*rows, slow))
    assert priced.price(asked).seconds == pytest.approx(law.price(asked).seconds, rel=1e-6)
    assert priced.price(gemm(1500, 4096, 4096)).seconds == slow.seconds


def test_the_spread_of_an_estimate_is_what_leaving_rows_out_shows() -> None:
    law = pricer()
    ops = [streamed(2.0**power) for power in range(20, 30)]
    even = pricer(profile=profile(*[row(op, law.price(op).seconds) for op in ops])).price(streamed(1.4e7))
    factors = [1.0 + 0.3 * (i % 2) for i in range(len(ops))]
    uneven_rows = [row(op, f * law.price(op).seconds) for op, f in zip(ops, factors, strict=True)]
    uneven = pricer(profile=profile(*uneven_rows)).price(streamed(1.4e7))
    assert even.log_std == LEAST_LOG_STD
    assert uneven.log_std == pytest.approx(math.log(1.3), rel=0.1)


def test_a_profile_of_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"H100.*A100"):
        pricer(device=device("A100"), profile=measured_grid())


SPEEDS = st.floats(1.0, 4.0)


@given(
    st.sampled_from([gemm(4096, 4096, 4096), gemm(7, 130, 64), streamed(1e3), streamed(1e9), attention(),
                     attention("attention_backward"), communicated("all_reduce", "tp"), communicated("send_recv", "pp")]),
    SPEEDS,
)  # fmt: skip
@settings(max_examples=60)
def test_a_faster_device_makes_no_operator_slower_and_none_is_free(op: Op, speed: float) -> None:
    faster = replace(
        H100, flops={name: speed * rate for name, rate in H100.flops.items()}, name=H100.name,
        memory_bytes_per_s=speed * H100.memory_bytes_per_s, link_bytes_per_s=speed * H100.link_bytes_per_s,
    )  # fmt: skip
    found, now = pricer().price(op), pricer(device=faster).price(op)
    assert 0.0 < now.seconds <= found.seconds * (1 + 1e-12)
    assert found.log_std > 0.0
    assert found.provenance == "analytic" or op.stream == "comm"


def test_no_price_is_below_the_roofline() -> None:
    for op in (
        gemm(4096, 4096, 4096),
        gemm(16, 8192, 8192),
        streamed(1e9),
        attention(),
        attention("attention_backward"),
    ):
        least = max(op.flops / H100.peak_flops("bf16"), op.moved_bytes / H100.memory_bytes_per_s)
        assert pricer().price(op).seconds > least


def test_passes_of_eager_kernels_take_as_long_as_they_were_measured_to() -> None:
    fused = pricer(framework=replace(EAGER, fused=True))
    for name, factor in EAGER_PASSES.items():
        op, plain = streamed(1e9, f"aten.{name}"), streamed(1e9)
        start_s = pricer().price(streamed(1.0)).seconds
        ratio = (pricer().price(op).seconds - start_s) / (pricer().price(plain).seconds - start_s)
        assert ratio == pytest.approx(factor, rel=1e-3)
        assert fused.price(op).seconds == fused.price(plain).seconds
        merged = streamed(1e9, f"fused.{name}+add")
        assert pricer().price(merged).seconds == pricer().price(plain).seconds


def test_attention_follows_its_pairs_and_the_kernel_that_computes_it() -> None:
    causal, whole = pricer().price(attention()).seconds, pricer().price(attention(pairs=1.0)).seconds
    assert whole == pytest.approx(2 * causal, rel=0.01)
    older = pricer(framework=Framework(attention="flash1")).price(attention()).seconds
    assert older > 2 * causal
    assert pricer().price(attention("attention_backward")).seconds > 2.5 * causal


def test_collectives_are_placed_by_the_plan() -> None:
    priced = pricer(scale=1.2)
    for axis, ranks, stride in (("tp", 4, 1), ("cp", 2, 4), ("dp", 8, 4), ("ep", 2, 1)):
        found = priced.price(communicated("all_reduce", axis))
        assert found.seconds == pytest.approx(1.2 * collective_s("all_reduce", 1e7, group(ranks, stride, LINKS), LINKS))
    experts = priced.price(communicated("all_reduce", "dp", name="derived.all_reduce.experts"))
    assert experts.seconds == pytest.approx(1.2 * collective_s("all_reduce", 1e7, group(16, 2, LINKS), LINKS))
    sent = priced.price(communicated("send_recv", "pp"))
    assert sent.seconds == pytest.approx(1.2 * (transfer_s(1e7, stride=32, fabric=LINKS) + LAW.hop_s))
    with pytest.raises(ConfigError, match="tp"):
        pricer(plan=replace(PLAN, tp=1, devices=16)).price(communicated("all_reduce", "tp"))


def test_a_pipeline_transfer_is_priced_by_the_boundary_that_it_crosses() -> None:
    """Stages of 4 devices in nodes of 8: two stages share a node, the next boundary is between nodes."""
    plan = TrainingPlan(devices=16, micro_batch=1, global_batch=64, sequence=4096, tp=4, pp=4)
    priced = pricer(plan=plan)
    inside, between = (
        collective_s("send_recv", 1e7, Group(ranks=2, local=local), LINKS) + LAW.hop_s for local in (2, 1)
    )
    assert inside < between
    for stages, wanted in (((0, 1), inside), ((1, 2), between), ((2, 3), inside), ((3, 0), between)):
        found = priced.price(communicated("send_recv", "pp", name=send_name(*stages)))
        assert found.seconds == pytest.approx(wanted), stages
    assert priced.price(communicated("send_recv", "pp")).seconds == pytest.approx(between)
    one_node = pricer(plan=replace(plan, devices=8, pp=2))
    assert one_node.price(communicated("send_recv", "pp")).seconds == pytest.approx(inside)
    uneven = replace(plan, devices=12, tp=3)  # its third stage stands in both nodes
    assert [crosses(communicated("send_recv", "pp", name=send_name(at, at + 1)), uneven, 8) for at in range(3)] == [
        False, True, True,
    ]  # fmt: skip


def test_a_profiled_collective_goes_before_the_table() -> None:
    points = tuple(
        CollectiveTime(op="all_reduce", library="nccl", ranks=4, domains=1, payload_bytes=size, seconds=t, log_std=0.0)
        for size, t in ((1e6, 1e-4), (1e8, 1e-2))
    )
    priced = pricer(profile=profile(row(gemm(64, 64, 64), 1e-5), collectives=points), scale=3.0)
    exact = priced.price(communicated("all_reduce", "tp", 1e6))
    between = priced.price(communicated("all_reduce", "tp", 1e7))
    beyond = priced.price(communicated("all_reduce", "tp", 1e9))
    assert (exact.seconds, exact.provenance, exact.log_std) == (1e-4, "measured", LEAST_LOG_STD)
    assert between.seconds == pytest.approx(1e-3)
    assert between.provenance == "interpolated"
    assert beyond == pricer(scale=3.0).price(communicated("all_reduce", "tp", 1e9))


def test_how_far_a_law_may_be_off_is_what_held_back_suites_show() -> None:
    assert 0.02 < step_log_std(True) < 0.12 < step_log_std(False) < 0.6
    op = gemm(4096, 4096, 4096)
    assert pricer(scale_known=False).price(op).log_std == step_log_std(False) > pricer().price(op).log_std


def test_the_host_costs_what_the_law_says_or_the_profile_measured() -> None:
    op = gemm(64, 64, 64)
    layer = Part(name="layer", forward=(op, replace(op, id=1)), backward=(op,))
    experts = replace(layer, expert_parameters=1.0)
    law = LAW.host
    assert pricer(scale=2.0).host_s([layer] * 3, "forward") == pytest.approx(2 * 3 * law.layer_s)
    assert pricer().host_s([layer], "backward", recomputed=0.5) == pytest.approx(1.5 * law.layer_s)
    graphs = pricer(framework=replace(EAGER, graphs=True))
    assert graphs.host_s([layer, experts], "forward") == pytest.approx(law.graph_share * law.layer_s + law.moe_layer_s)
    host = HostTimes(op_s=4e-6, recorded_op_s=7e-6, backward_op_s=6e-6)
    by_profile = pricer(profile=profile(row(op, 1e-5), host=host))
    assert by_profile.host_s([layer] * 3, "forward") == pytest.approx(6 * 7e-6)
    serial = pricer(profile=profile(row(op, 1e-5), host=replace(host, serial=True)))
    assert serial.host_s([layer], "backward") == pytest.approx(2e-6)
    assert serial.lack_s(1.0, 0.1) == 0.1
    assert pricer().lack_s(1.0, 1e-9) == pytest.approx(0.0)
    assert pricer().lack_s(1e-9, 1.0) == pytest.approx(1.0)


def test_the_host_of_a_module_of_ones_own_launches_as_many_operators_as_it_has() -> None:
    op = gemm(64, 64, 64)
    layer = Part(name="layer", forward=(op, replace(op, id=1)), backward=(op,))
    many = replace(layer, forward=tuple(replace(op, id=number) for number in range(LAYER_OPERATORS["forward"])))
    counted = pricer(by_operators=True, scale=2.0)
    assert counted.host_s([many], "forward") == pytest.approx(2 * LAW.host.layer_s)
    assert counted.host_s([layer] * 3, "forward", ends=[layer]) == pytest.approx(
        counted.host_s([many], "forward") * 8 / LAYER_OPERATORS["forward"]
    )
    assert counted.host_s([layer], "backward") == pytest.approx(2 * LAW.host.layer_s / LAYER_OPERATORS["backward"])
    assert counted.host_s([layer], "optimizer") == 0.0


def test_what_the_framework_hides_is_told_apart_by_axis() -> None:
    hides = pricer(framework=replace(EAGER, overlap_tp=True, graphs=True))
    shares = {axis: hides.hidden_share(communicated("all_reduce", axis)) for axis in ("tp", "ep", "dp")}
    assert shares == {"tp": LAW.tp_hidden, "ep": LAW.a2a_hidden, "dp": 0.0}
    assert pricer().hidden_share(communicated("all_reduce", "tp")) == 0.0


def test_operators_that_are_alike_are_one() -> None:
    ops = [gemm(8, 8, 8), streamed(100.0), replace(gemm(8, 8, 8), id=3, name="aten.addmm"), streamed(100.0, "aten.mul"),
           gemm(8, 8, 8, weight_gradient=True), communicated("all_reduce", "tp")]  # fmt: skip
    assert distinct(ops) == [ops[0], ops[1], ops[3], ops[4]]
