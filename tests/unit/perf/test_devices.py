"""Devices by the names that people write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollart.core.errors import ConfigError
from rollart.perf.devices import GIB, Device, device, known_devices


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100 SXM", "H100 SXM 80GB"),
        ("H100", "H100 SXM 80GB"),
        ("H100 SXM 80GB (GPU type inferred from report)", "H100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("8xH100-80GB", "H100 SXM 80GB"),
        ("h100_sxm5", "H100 SXM 80GB"),
        ("H100SXM5", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("H100 NVL", "H100 NVL 94GB"),
        ("A100-SXM4-80GB", "A100 SXM 80GB"),
        ("A100-SXM4-40GB", "A100 SXM 40GB"),
        ("A100-40GB", "A100 SXM 40GB"),
        ("A100 single node", "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("A10", "A10"),
        ("H20", "H20 SXM 96GB"),
        ("H200 SXM 141GB", "H200 SXM 141GB"),
        ("B200 SXM 180GB", "B200"),
        ("GB200", "GB200"),
        ("GH200 144GB", "GH200 144GB"),
        ("GH200 480GB", "GH200 96GB"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 24GB", "RTX 4090"),
        ("RTX PRO 6000 96GB", "RTX PRO 6000 96GB"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("L40S", "L40S"),
    ],
)
def test_a_written_name_finds_its_device(written: str, name: str) -> None:
    assert device(written).name == name


def test_every_device_of_the_table_is_found_by_its_own_name_and_says_where_it_is_from() -> None:
    for name in known_devices():
        found = device(name)
        assert found.name == name
        assert found.source
        assert found.peak_flops("bf16") <= found.peak_flops("fp8") <= found.peak_flops("fp4")


def test_memory_bandwidth_and_power_in_a_name_replace_those_of_the_table() -> None:
    found = device("H100 SXM 96GB HBM2e 2.4TB/s, 500W limit")
    assert found.memory_bytes == 96 * GIB
    assert found.memory_bytes_per_s == 2.4e12
    assert found.power_w == 500
    assert device("H100 80GB").memory_bytes == device("H100").memory_bytes


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'H1000'.*nearest known: .*H100"):
        device("H1000")


def test_a_device_of_the_user_is_found_by_its_name() -> None:
    mine = replace(device("L4"), name="my card", memory_bytes=48e9)
    assert device("my card", {"my card": mine}) is mine


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_device_with_impossible_numbers_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="memory_bytes_per_s"):
        replace(device("L4"), memory_bytes_per_s=bad)
    with pytest.raises(ConfigError, match=r"flops\[bf16\]"):
        replace(device("L4"), flops={"bf16": bad})


def test_a_dtype_without_units_of_its_own_is_computed_in_the_next_wider_one() -> None:
    a100, h100 = device("A100"), device("H100")
    assert a100.computes("fp8") == "bf16"
    assert h100.computes("fp4") == "fp8"
    assert h100.peak_flops("fp4") == h100.flops["fp8"]
    with pytest.raises(ConfigError, match="unknown dtype 'fp5'"):
        h100.computes("fp5")
    with pytest.raises(ConfigError, match="no rate for fp32"):
        Device(
            name="half only", flops={"bf16": 1e12}, memory_bytes=1e9, memory_bytes_per_s=1e9, link_bytes_per_s=1e9
        ).peak_flops("fp32")
