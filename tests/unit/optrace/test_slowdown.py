"""What overlap and shared links cost, from intervals alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hand_made_traces import BLOCKING, PER_S, by_hand, computes, nothing_but, plan_of, talks
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.optrace.assemble import compose_step
from rollart.optrace.measured_ops import kernel_name
from rollart.optrace.ops import Op, Priced
from rollart.optrace.slowdown import Beside, Factors, Interval, basis_ticks, overlapped_ticks, slowed, union
from rollart.perf.device_profile import DeviceProfile, Origin, OverlapTime, overlap_model
from rollart.perf.devices import device
from rollart.perf.links import fabric
from rollart.perf.overlap import packaged

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda at: (at[0], at[0] + at[1])), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(intervals, st.integers(0, 60), st.integers(1, 30))
def test_overlap_counts_every_tick_once(others: list[Interval], begin: int, length: int) -> None:
    merged = union(others)
    ticks = {tick for at in others for tick in range(*at)}
    assert {tick for at in merged for tick in range(*at)} == ticks
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    covered = overlapped_ticks((begin, begin + length), merged, [at[0] for at in merged])
    assert covered == len(ticks & set(range(begin, begin + length)))


def test_a_kernel_with_nothing_beside_it_keeps_its_time_and_one_beside_a_collective_slows_by_its_share() -> None:
    ops = [computes(0, 1.0), computes(1, 1.0), talks(2, 1.0, "dp", "all_reduce")]
    lanes = ["compute", "compute", "dp"]
    placed = [(0, 1000), (1000, 2000), (1500, 3000)]
    solo = [1000, 1000, 1500]
    plan = plan_of(dp=2)
    assert slowed(ops, lanes, solo, placed, Beside(plan=plan, level=0)) == solo
    assert slowed(ops, lanes, solo, placed, Beside(plan=plan, overlap=Factors(compute=0.4, comm=0.0))) == [
        1000,
        1200,
        1500,
    ]
    held = packaged().held_sms
    physical = slowed(ops, lanes, solo, placed, Beside(plan=plan, level=1, sms=132))
    assert physical == [1000, round(1000 * (1 + 0.5 * held / (132 - held))), 1500]
    with pytest.raises(ConfigError, match="0 or more"):
        Factors(compute=-0.1, comm=0.0)


@pytest.mark.parametrize(("tp", "expected_s"), [(1, 0.32), (4, 0.2)])
def test_collectives_that_share_a_link_slow_each_other_and_others_do_not(tp: int, expected_s: float) -> None:
    links = fabric("h100")
    wire_bytes = 0.2 * 0.8 * links.intra_bytes_per_s  # 0.2 s alone at four fifths of the link
    seconds_of = wire_bytes / PER_S
    plan = plan_of(dp=4, cp=2, tp=tp)
    backward = [
        computes(0, 0.1), talks(1, seconds_of / 1.75, "dp", "all_reduce", 0), talks(2, seconds_of, "cp", "all_reduce", 0),
        computes(3, 0.1, 2),
    ]  # fmt: skip
    trace = nothing_but(plan, [computes(0, 0.1)], backward)

    def price(op: Op) -> Priced:
        return replace(by_hand(op), seconds=0.2) if op.stream == "comm" else by_hand(op)

    alone = compose_step(trace, plan, price, framework=BLOCKING, level=0).classes[0].comm_s
    assert alone == {"cp": pytest.approx(0.2), "dp": pytest.approx(0.2)}
    # with tp 1 both stand within a domain of 8 and halve its link; with tp 4 the data-parallel ranks stand in several
    shared = compose_step(trace, plan, price, framework=BLOCKING, level=0, fabric=links).classes[0].comm_s
    assert shared == {"cp": pytest.approx(expected_s, rel=1e-3), "dp": pytest.approx(expected_s, rel=1e-3)}


def test_a_traced_operator_slows_as_the_profile_measured_its_kernel_beside_a_collective() -> None:
    ops = [
        computes(0, 1.0),
        Op(id=1, name="aten.mul.Tensor", kind="pass", moved_bytes=1.0),
        talks(2, 1.0, "dp", "all_reduce"),
    ]
    twice = OverlapTime(
        kernel=kernel_name(ops[0]), solo_s=1e-3, seconds=2e-3, overlap_ratio=1.0, collective="all_reduce", payload_bytes=1e6,
        ranks=2,
    )  # fmt: skip
    origin = Origin(kind="cuda", versions={"torch": "2.13.0"})
    measured = overlap_model(DeviceProfile(device=device("H100"), origin=origin, ops=(), overlaps=(twice,) * 99))
    lanes, solo, placed = ["compute", "compute", "dp"], [1000, 1000, 2000], [(0, 1000), (1000, 2000), (0, 2000)]
    of = Beside(plan=plan_of(dp=2), overlap=measured, sms=132)
    found = slowed(ops, lanes, solo, placed, of)
    assert found[0] == pytest.approx(2000, rel=0.02)
    assert found[1] == slowed(ops, lanes, solo, placed, replace(of, level=1))[1]
    assert basis_ticks(ops, lanes, solo, placed, of) == {"kernel name": 1000, "physical": 1000}
    packed = replace(of, overlap=None)
    assert basis_ticks(ops, lanes, solo, placed, packed) == {"physical": 2000}, "its names are those of CUDA kernels"
    assert basis_ticks(ops, lanes, solo, placed, replace(of, level=0)) == {"none": 2000}
