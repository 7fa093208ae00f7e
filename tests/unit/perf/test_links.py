"""Reading of interconnects, and fair sharing of links."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.links import Transfer, chip_name, domains, fabric, fair_rates, shared_finish

GB = 1e9


@pytest.mark.parametrize(
    ("written", "chip"),
    [
        ("A100-SXM4-40GB", "A100"),
        ("A100 DGX", "A100"),
        ("GB200 NVL72", "GB200"),
        ("B200 SXM", "B200"),
        ("L40S", "L40S"),
        ("GeForce RTX 4090", "RTX4090"),
        ("NVIDIA H100 (SXM, 80 GB, not an A100)", "H100"),
        ("A1000", None),
        ("Foo", None),
    ],
)
def test_chip_is_found_as_a_whole_word(written: str, chip: str | None) -> None:
    assert chip_name(written) == chip


def test_stated_rates_go_before_the_table() -> None:
    stated = fabric("A100-SXM4-40GB", "NVLink3 500GB/s intra; 100 Gb/s IB per GPU inter")
    assert stated.intra_bytes_per_s == 250 * GB
    assert stated.inter_bytes_per_s == 12.5 * GB
    assert fabric("A100").intra_bytes_per_s == 300 * GB
    assert fabric("A100").provenance == "public table"


def test_a_chip_on_pcie_has_the_rates_of_pcie_and_no_switch() -> None:
    wired = fabric("H100 PCIe", "PCIe 5.0")
    assert wired.kind == "pcie"
    assert wired.intra_bytes_per_s < fabric("H100 SXM").intra_bytes_per_s / 5
    assert wired.nvls_bytes_per_s == 0


def test_unlisted_devices_are_assumed_and_say_so() -> None:
    unknown = fabric("Foo99", "NVLink 800GB/s")
    assert (unknown.chip, unknown.provenance) == ("Foo99", "assumed")
    assert unknown.intra_bytes_per_s == 400 * GB
    assert fabric("Foo99", "PCIe").kind == "pcie"


def test_missing_or_impossible_nodes_become_the_fewest() -> None:
    assert domains(8, fabric("H100")) == 1
    assert domains(16, fabric("H100"), 1) == 2
    assert domains(16, fabric("H100"), 4) == 4
    assert domains(16, fabric("GB200"), 4) == 1  # four trays of one NVLink domain


def test_equal_transfers_halve_a_link_and_a_capped_one_leaves_the_rest() -> None:
    pair = [Transfer(name=name, payload_bytes=10.0, links=("nic",)) for name in "ab"]
    assert fair_rates(pair, {"nic": 8.0}) == {"a": 4.0, "b": 4.0}
    capped = [pair[0], Transfer(name="c", payload_bytes=10.0, links=("nic",), cap_bytes_per_s=1.0)]
    assert fair_rates(capped, {"nic": 8.0}) == {"a": 7.0, "c": 1.0}


def test_a_transfer_over_two_links_is_bound_by_the_crowded_one() -> None:
    transfers = [
        Transfer(name="long", payload_bytes=1.0, links=("a", "b")),
        Transfer(name="on a", payload_bytes=1.0, links=("a",)),
        Transfer(name="on b", payload_bytes=1.0, links=("b",)),
        Transfer(name="also on b", payload_bytes=1.0, links=("b",)),
    ]
    rates = fair_rates(transfers, {"a": 12.0, "b": 6.0})
    assert rates == {"long": 2.0, "on b": 2.0, "also on b": 2.0, "on a": 10.0}


def test_finish_by_hand() -> None:
    """a alone for 1 s at 10, then both at 5: a's other 10 bytes end at 3 s, b's last 10 at 4 s."""
    transfers = [
        Transfer(name="a", payload_bytes=20.0, links=("nic",)),
        Transfer(name="b", payload_bytes=20.0, links=("nic",), start_s=0.5, latency_s=0.5),
    ]
    assert shared_finish(transfers, {"nic": 10.0}) == {"a": pytest.approx(3.0), "b": pytest.approx(4.0)}
    assert shared_finish([], {}) == {}


@st.composite
def _transfers(draw: st.DrawFn) -> list[Transfer]:
    count = draw(st.integers(1, 6))
    return [
        Transfer(
            name=str(index),
            payload_bytes=draw(st.floats(0, 1e6)),
            links=tuple(sorted(draw(st.sets(st.sampled_from("abc"), min_size=1)))),
            start_s=draw(st.floats(0, 100)),
            cap_bytes_per_s=draw(st.sampled_from([inf, 5.0, 50.0])),
        )
        for index in range(count)
    ]


CAPACITY = {"a": 10.0, "b": 33.0, "c": 700.0}


@settings(max_examples=60, deadline=None)
@given(_transfers())
def test_sharing_never_overfills_a_link_and_never_speeds_a_transfer_up(transfers: list[Transfer]) -> None:
    rates = fair_rates(transfers, CAPACITY)
    for link, capacity in CAPACITY.items():
        assert sum(rates[t.name] for t in transfers if link in t.links) <= capacity * (1 + 1e-9)
    ends = shared_finish(transfers, CAPACITY)
    for transfer in transfers:
        alone = shared_finish([transfer], CAPACITY)[transfer.name]
        assert ends[transfer.name] >= alone * (1 - 1e-9)
        # work is conserved: nothing is later than all of the bytes one after the other on the slowest link
        assert ends[transfer.name] <= 100 + sum(t.payload_bytes for t in transfers) / 5.0 + 1e-6


@pytest.mark.parametrize(
    ("transfer", "capacity", "says"),
    [
        (Transfer(name="x", payload_bytes=1.0, links=("nic",)), {}, "capacity None"),
        (Transfer(name="x", payload_bytes=1.0, links=()), {}, "nothing bounds"),
        (Transfer(name="x", payload_bytes=-1.0, links=("nic",)), {"nic": 1.0}, "bytes 0 or more"),
        (Transfer(name="x", payload_bytes=1.0, links=("nic",), latency_s=inf), {"nic": 1.0}, "need numbers"),
        (Transfer(name="x", payload_bytes=1.0, links=("nic",), cap_bytes_per_s=0.0), {"nic": 1.0}, "above 0"),
    ],
)
def test_senseless_transfers_are_refused(transfer: Transfer, capacity: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        shared_finish([transfer], capacity)


def test_two_transfers_of_one_name_are_refused() -> None:
    twin = Transfer(name="x", payload_bytes=1.0, links=("nic",))
    with pytest.raises(ConfigError, match="two transfers"):
        fair_rates([twin, twin], {"nic": 1.0})
