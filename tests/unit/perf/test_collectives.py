"""Closed forms of collectives, curves carried to other sizes and ranks, and the fit of both."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.collective_fit import (
    START,
    LatencyBandwidth,
    Timed,
    curves_of,
    fit,
    fit_constants,
    fit_latency_bandwidth,
    relative_middle,
)
from rollart.perf.collective_table import (
    CollectiveModel,
    collective_estimate,
    curve_entry,
    estimate,
    model_from,
    packaged,
    place_of,
)
from rollart.perf.collectives import (
    OPS,
    PROTOCOLS,
    Request,
    analytic_seconds,
    analytic_ways,
    columns,
    fastest_way,
    transfer_of,
)
from rollart.perf.links import fabric, shared_finish

CONSTANTS = {name: value for name, (value, _) in START.items()}
H100, A100, L40S = fabric("H100 SXM"), fabric("A100 SXM"), fabric("L40S", "PCIe")
MIB = 1 << 20


def ask(
    op: str = "all_reduce", ranks: int = 8, size: float = 16 * MIB, where: str = "H100", nodes: int | None = None
) -> Request:
    return Request(op=op, ranks=ranks, payload_bytes=size, fabric=fabric(where), nodes=nodes)


def seconds(request: Request) -> float:
    return float(analytic_seconds(columns([request]), CONSTANTS)[0])


# ---- closed forms


def test_ring_simple_by_hand() -> None:
    """Reduce-scatter of 1 GB among 4 A100: 3/4 GB at 0.77 x 300 GB/s, 1/4 GB copied at 1.9 x 300, 3 hops, one base."""
    names, ways = analytic_ways(columns([ask("reduce_scatter", 4, 1e9, "A100")]), CONSTANTS)
    wire_s = 0.75e9 / (300e9 * CONSTANTS["wire_simple"]) + 0.25e9 / (300e9 * CONSTANTS["own_copy"])
    latency_s = (CONSTANTS["base_simple_us"] + 3 * CONSTANTS["hop_simple_us"]) * 1e-6
    assert ways[names.index("ring/simple"), 0] == pytest.approx(wire_s + latency_s, rel=1e-12)


def test_small_messages_take_ll_and_large_ones_simple_or_the_switch() -> None:
    assert fastest_way(ask(size=1024), CONSTANTS) == "ring/ll"
    assert fastest_way(ask("all_gather", size=1 << 30), CONSTANTS) == "ring/simple"
    assert fastest_way(ask(size=1 << 30), CONSTANTS) == "nvls/simple"
    assert fastest_way(ask(size=1 << 30, where="A100"), CONSTANTS) == "ring/simple"
    assert fastest_way(ask(ranks=128, size=1024, where="A100", nodes=16), CONSTANTS) == "tree/ll"
    assert all("ll128" not in fastest_way(ask(size=2.0**power, where="L40S"), CONSTANTS) for power in range(9, 30))


def test_a_tree_grows_with_the_log_of_the_nodes() -> None:
    at = [seconds(ask(ranks=8 * nodes, size=1024, where="A100", nodes=nodes)) for nodes in (2, 4, 8, 16)]
    steps = np.diff(at)
    assert np.allclose(steps, 2 * CONSTANTS["network_tree_ll_us"] * 1e-6, rtol=0.05)


def test_between_nodes_the_network_cards_of_a_domain_bound_the_ring() -> None:
    """busbw of a large all-reduce over two nodes of 8 A100: at most 8 x 25 GB/s."""
    large = ask(ranks=16, size=4e9, where="A100", nodes=2)
    bus = 2 * 15 / 16 * 4e9 / seconds(large)
    assert 0.5 * 200e9 < bus < 200e9
    assert seconds(large) > seconds(ask(ranks=8, size=4e9, where="A100"))


SIZES = st.floats(1, 2**34)
PLACES = st.tuples(st.sampled_from([2, 4, 8, 16, 64, 512]), st.sampled_from(["A100", "H100", "GB200", "L40S", "Foo"]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OPS), PLACES, SIZES, st.floats(1, 8))
def test_more_bytes_never_take_less_time_and_no_link_is_overfilled(
    op: str, place: tuple[int, str], size: float, factor: float
) -> None:
    ranks, where = place
    request = ask(op, ranks, size, where)
    time_s = seconds(request)
    assert seconds(replace(request, payload_bytes=size * factor)) >= time_s
    rated = max(request.fabric.intra_bytes_per_s, request.fabric.nvls_bytes_per_s)
    assert float(columns([request]).wire_bytes[0]) / time_s <= rated


@settings(max_examples=40, deadline=None)
@given(PLACES, SIZES)
def test_a_rings_all_reduce_is_no_faster_than_its_halves(place: tuple[int, str], size: float) -> None:
    ranks, where = place
    rows = columns([ask(op, ranks, size, where) for op in ("all_reduce", "all_gather", "reduce_scatter")])
    names, ways = analytic_ways(rows, CONSTANTS)
    for protocol in PROTOCOLS:
        ring = ways[names.index(f"ring/{protocol}")]
        assert not np.isfinite(ring[0]) or ring[0] >= max(ring[1], ring[2])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(OPS), PLACES, SIZES)
def test_twice_the_bandwidth_never_slows(op: str, place: tuple[int, str], size: float) -> None:
    request = ask(op, place[0], size, place[1])
    faster = replace(
        request.fabric,
        intra_bytes_per_s=2 * request.fabric.intra_bytes_per_s,
        inter_bytes_per_s=2 * request.fabric.inter_bytes_per_s,
        nvls_bytes_per_s=2 * request.fabric.nvls_bytes_per_s,
    )
    assert seconds(replace(request, fabric=faster)) <= seconds(request)


def test_one_rank_needs_no_time_and_senseless_requests_are_refused() -> None:
    assert seconds(ask(ranks=1)) == 0.0
    with pytest.raises(ConfigError, match="unknown collective 'gossip'"):
        seconds(ask("gossip"))
    with pytest.raises(ConfigError, match="0 ranks"):
        seconds(ask(ranks=0))
    with pytest.raises(ConfigError, match="nan bytes"):
        seconds(ask(size=float("nan")))


def test_a_collective_alone_on_its_links_takes_its_own_time_and_two_take_longer() -> None:
    request = ask(size=1 << 30)
    alone_s = seconds(request)
    first, second = (transfer_of(name, request, alone_s, ("nvlink",), CONSTANTS) for name in ("a", "b"))
    capacity = {"nvlink": request.fabric.nvls_bytes_per_s}
    assert shared_finish([first], capacity)["a"] == pytest.approx(alone_s)
    both = shared_finish([first, second], capacity)
    assert 1.2 * alone_s < both["a"] <= 2 * alone_s
    empty = transfer_of("e", ask(size=0.0), seconds(ask(size=0.0)), ("nvlink",), CONSTANTS)
    assert shared_finish([empty], capacity)["e"] == pytest.approx(seconds(ask(size=0.0)))


# ---- curves


def _timed(
    ratio: float, ranks: int, sizes: range = range(10, 30), op: str = "all_gather", bump: float = 0.0
) -> list[Timed]:
    """Rows of A100 that take `ratio` times the analytic time, and `bump` more per octave."""
    requests = [ask(op, ranks, 2.0**power, "A100") for power in sizes]
    return [
        Timed(
            request=request,
            device="A100 SXM",
            library="nccl",
            seconds=seconds(request) * ratio * (1 + bump * log2(request.payload_bytes)),
            source="made",
        )
        for request in requests
    ]


def _model(*groups: list[Timed]) -> CollectiveModel:
    rows = [row for group in groups for row in group]
    return CollectiveModel(constants=CONSTANTS, curves=curves_of(rows, CONSTANTS))


def test_a_known_curve_is_reproduced_and_interpolated() -> None:
    rows = _timed(1.4, 4, bump=0.05)
    model = _model(rows)
    for row in rows:
        found = estimate(model, row.request, "A100 SXM")
        assert found.seconds == pytest.approx(row.seconds, rel=0.011)  # knots on a straight line are left out
    assert estimate(model, rows[0].request, "A100 SXM").basis == "measured"
    between = estimate(model, ask("all_gather", 4, 3.0 * MIB, "A100"), "A100 SXM")
    assert between.basis == "interpolated"
    low, high = rows[11].seconds, rows[12].seconds
    assert low < between.seconds < high


def test_other_ranks_are_carried_and_other_chips_are_not_certain() -> None:
    model = _model(_timed(1.5, 2), _timed(1.5, 8))
    carried = estimate(model, ask("all_gather", 4, 64 * MIB, "A100"), "A100 SXM")
    assert carried.basis == "carried"
    assert carried.seconds == pytest.approx(1.5 * seconds(ask("all_gather", 4, 64 * MIB, "A100")), rel=0.1)
    far = estimate(model, ask("all_gather", 4, 64 * MIB, "H100"))
    assert far.basis == "analytic"
    assert far.seconds == pytest.approx(seconds(ask("all_gather", 4, 64 * MIB, "H100")), rel=0.05)
    assert far.log_std > carried.log_std > 0


def test_a_trend_in_ranks_is_carried_on() -> None:
    model = _model(_timed(1.2, 2), _timed(1.6, 4))
    request = ask("all_gather", 8, 64 * MIB, "A100")
    assert estimate(model, request, "A100 SXM").seconds > 1.6 * seconds(request)


def test_curves_of_one_node_say_nothing_of_the_network() -> None:
    model = _model(_timed(3.0, 8))
    request = ask("all_gather", 16, 64 * MIB, "A100", nodes=2)
    found = estimate(model, request, "A100 SXM")
    assert found.basis == "analytic"
    assert found.seconds == pytest.approx(seconds(request))


def test_constants_alone_are_the_analytic_model() -> None:
    found = estimate(CollectiveModel(constants=CONSTANTS), ask())
    assert found.basis == "analytic"
    assert found.seconds == pytest.approx(seconds(ask()))
    assert estimate(_model(_timed(2.0, 8)), ask(ranks=1)).seconds == 0.0


def test_a_curve_survives_the_table() -> None:
    model = _model(_timed(1.3, 4, bump=0.03))
    table = {
        "constants": {name: {"value": value} for name, value in CONSTANTS.items()},
        "curves": json.loads(json.dumps([curve_entry(curve) for curve in model.curves])),
    }
    back = model_from(table)
    assert back.curves[0].place == model.curves[0].place
    assert back.curves[0].seconds == pytest.approx(model.curves[0].seconds, rel=1e-3)


# ---- fit


def test_the_fit_finds_constants_back() -> None:
    truth = {**CONSTANTS, "wire_simple": 0.6, "hop_ll_us": 1.0}
    requests = [
        ask(op, ranks, 2.0**power, "A100")
        for op in ("all_gather", "all_reduce")
        for ranks in (2, 8)
        for power in range(9, 30, 2)
    ]
    times = analytic_seconds(columns(requests), truth)
    rows = [
        Timed(request=request, device="A100", library="nccl", seconds=float(time))
        for request, time in zip(requests, times, strict=True)
    ]
    fitted = fit_constants(rows)
    error = np.abs(np.log(analytic_seconds(columns(requests), fitted) / times))
    assert error.mean() < 0.02
    assert fitted["wire_simple"] == pytest.approx(0.6, rel=0.05)
    assert fitted["network_tree_ll_us"] == CONSTANTS["network_tree_ll_us"]  # no row tells


def test_the_middle_has_the_least_relative_error() -> None:
    times = np.array([1.0, 1.1, 4.0, 5.0, 9.0])
    best = float(np.exp(relative_middle(np.log(times))))
    errors = [np.abs(guess / times - 1).sum() for guess in times]
    assert best == pytest.approx(times[int(np.argmin(errors))])


def test_the_two_parameter_law_is_found_back_and_stays_positive() -> None:
    law = LatencyBandwidth(latency_s=2e-6, stretch=1.3)
    requests = [ask("all_gather", ranks, 2.0**power) for ranks in (2, 4, 8) for power in (10, 20, 28)]
    rows = [Timed(request=request, device="H100", library="nccl", seconds=law.seconds(request)) for request in requests]
    found = fit_latency_bandwidth(rows)
    assert found.latency_s == pytest.approx(2e-6)
    assert found.stretch == pytest.approx(1.3)
    flat = [replace(row, seconds=1e-5 / (1 + row.request.payload_bytes)) for row in rows]
    bounded = fit_latency_bandwidth(flat)
    assert bounded.latency_s >= 0
    assert bounded.stretch >= 0


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no timed collective"):
        fit([])


# ---- the package's table


def test_the_packaged_table_says_where_everything_is_from() -> None:
    model = packaged()
    assert set(model.constants) == set(CONSTANTS)
    assert len({curve.place for curve in model.curves}) == len(model.curves)
    for curve in model.curves:
        assert curve.source.startswith("https://")
        assert list(curve.payload_bytes) == sorted(curve.payload_bytes)
        assert min(curve.seconds) > 0


def test_public_floors_and_bandwidths_of_single_nodes() -> None:
    """8 GPUs, all-reduce: floors of 15.9 us (H100) and 21.5 us (A100), bus bandwidth of 445 and 222 GB/s at 512 MiB."""
    for where, floor_us, bus in (("H100 SXM", 15.9, 445e9), ("A100 SXM", 21.5, 222e9)):
        small = collective_estimate(Request(op="all_reduce", ranks=8, payload_bytes=2048, fabric=fabric(where)), where)
        large = collective_estimate(
            Request(op="all_reduce", ranks=8, payload_bytes=512 * MIB, fabric=fabric(where)), where
        )
        assert small.seconds * 1e6 == pytest.approx(floor_us, rel=0.05)
        assert 1.75 * 512 * MIB / large.seconds == pytest.approx(bus, rel=0.03)
        assert large.basis in {"measured", "interpolated"}


def test_every_operation_of_any_device_has_a_time() -> None:
    for where in ("H800", "B300", "Foo99", "MI300X"):
        for op in OPS:
            found = collective_estimate(ask(op, 64, 8 * MIB, where, nodes=8))
            assert 1e-6 < found.seconds < 1
            assert found.basis == "analytic"


def test_places_are_told_apart_by_what_was_measured() -> None:
    one = place_of(ask(), "H100 SXM", "nccl")
    assert one != place_of(ask(), "H100 DGX", "nccl")
    assert one != place_of(ask(), "H100 SXM", "nccl under torch")
    assert place_of(ask(ranks=16)).tier == "network"
    assert place_of(Request(op="all_reduce", ranks=2, payload_bytes=1.0, fabric=L40S)).tier == "pcie"
    assert place_of(Request(op="all_reduce", ranks=2, payload_bytes=1.0, fabric=A100)).tier == "nvlink"
    assert H100.generation == "hopper"
