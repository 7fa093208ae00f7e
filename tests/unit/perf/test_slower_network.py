"""Collectives over a network slower than the one that a chip's table names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollart.perf.collective_table import LINE_SHARE, collective_estimate, felt_network, packaged
from rollart.perf.collectives import Request
from rollart.perf.links import BYTES_PER_GB, fabric

A100 = fabric("A100")
GIB = 1024.0**3
LOGGED = "A100-SXM4-40GB"


def seconds(gigabytes: float, ranks: int = 128, payload_bytes: float = GIB, device: str = LOGGED) -> float:
    links = replace(A100, inter_bytes_per_s=gigabytes * BYTES_PER_GB)
    asked = Request(op="all_reduce", ranks=ranks, payload_bytes=payload_bytes, fabric=links, nodes=ranks // 8)
    return collective_estimate(asked, device).seconds


def test_a_slow_network_is_used_to_its_line_and_no_further() -> None:
    """What holds 25 GB/s cards to two thirds is no share of the cards: 1.6 GB/s ones are nearly full."""
    for gigabytes in (12.5 / 8, 3.0):
        least = 2 * 127 / 128 * GIB / (8 * gigabytes * BYTES_PER_GB)
        assert LINE_SHARE - 0.06 < least / seconds(gigabytes) < 1.0
    assert 2 * 127 / 128 * GIB / (8 * 25.0 * BYTES_PER_GB) / seconds(25.0) == pytest.approx(0.63, abs=0.03)


def test_a_slower_network_is_never_faster_and_there_is_no_jump() -> None:
    rates = [1.0, 2.0, 5.0, 10.0, 15.0, 16.9, 17.0, 20.0, 24.99, 25.0, 26.0, 50.0]
    for payload_bytes in (1e4, 1e6, 1e8):
        for device in (LOGGED, ""):
            times = [seconds(rate, payload_bytes=payload_bytes, device=device) for rate in rates]
            assert times == sorted(times, reverse=True)
            assert seconds(24.999999, payload_bytes=payload_bytes, device=device) == pytest.approx(times[9], rel=1e-6)


def test_what_stays_in_a_domain_and_the_network_of_the_table_are_as_they_were() -> None:
    slow = replace(A100, inter_bytes_per_s=1.0 * BYTES_PER_GB)
    inside = Request(op="all_reduce", ranks=8, payload_bytes=GIB, fabric=slow, nodes=1)
    between = Request(op="all_reduce", ranks=16, payload_bytes=GIB, fabric=A100, nodes=2)
    as_listed = replace(inside, fabric=A100)
    assert collective_estimate(inside) == collective_estimate(as_listed)
    assert felt_network(A100, packaged().constants) == A100
    assert collective_estimate(between, LOGGED).basis == "measured"
    slow_between = replace(between, fabric=slow)
    assert collective_estimate(slow_between, LOGGED).basis == "carried"
