"""Operators of a training step: never below the roofline, and slower where the shape is bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.perf.devices import Device, device
from rollart.perf.operators import (
    OperatorLaw,
    flash_attention_s,
    gemm_s,
    score_attention_s,
    stream_s,
    wave_fraction,
)

A100 = device("A100 SXM 80GB")
H100 = device("H100 SXM")
LAW = OperatorLaw()
sizes = st.integers(1, 1 << 14)


def twice(chip: Device) -> Device:
    return replace(
        chip,
        flops={dtype: 2 * rate for dtype, rate in chip.flops.items()},
        memory_bytes_per_s=2 * chip.memory_bytes_per_s,
    )


@settings(max_examples=80, deadline=None)
@given(sizes, sizes, sizes, st.sampled_from(["bf16", "fp8", "fp4"]))
def test_a_product_is_never_faster_than_the_roofline(rows: int, columns: int, inner: int, dtype: str) -> None:
    took = gemm_s(rows, columns, inner, device=H100, law=LAW, dtype=dtype)
    assert took >= 2.0 * rows * columns * inner / H100.peak_flops(dtype)
    assert took >= 2.0 * rows * columns / H100.memory_bytes_per_s


@settings(max_examples=80, deadline=None)
@given(sizes, sizes, sizes)
def test_a_device_twice_as_fast_is_never_slower(rows: int, columns: int, inner: int) -> None:
    assert gemm_s(rows, columns, inner, device=twice(A100), law=LAW) <= gemm_s(
        rows, columns, inner, device=A100, law=LAW
    )


@settings(max_examples=80, deadline=None)
@given(sizes, sizes, st.integers(1, 64))
def test_waves_are_used_at_most_fully(rows: int, columns: int, batch: int) -> None:
    assert 0 < wave_fraction(rows, columns, batch, 108) <= 1


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    full = wave_fraction(256 * 108, 128, 1, 108)
    assert full == 1.0
    assert wave_fraction(256 * 108 + 256, 128, 1, 108) < 0.9
    assert wave_fraction(5, 7, 1, 0) == 1.0


def test_narrow_products_and_small_hidden_sizes_run_further_from_the_peak() -> None:
    def reached(hidden: int) -> float:
        flops = 2.0 * 8192 * hidden * 4 * hidden
        return flops / gemm_s(8192, 4 * hidden, hidden, device=A100, law=LAW) / A100.peak_flops("bf16")

    assert reached(512) < reached(1024) < reached(4096) < reached(12288) < 1


def test_a_chip_without_fp8_units_multiplies_in_16_bit() -> None:
    assert gemm_s(4096, 4096, 4096, device=A100, law=LAW, dtype="fp8") == gemm_s(4096, 4096, 4096, device=A100, law=LAW)


def test_fp4_is_at_most_twice_fp8() -> None:
    chip = device("GB300")
    slow, fast = (
        gemm_s(
            8192, 8192, 8192, device=chip, law=replace(LAW, gemm_fraction_fp4=0.5, gemm_fraction_fp8=0.5), dtype=dtype
        )
        for dtype in ("fp8", "fp4")
    )
    assert slow / 2 <= fast < slow


def test_nothing_to_multiply_takes_no_time() -> None:
    assert gemm_s(0, 128, 128, device=A100, law=LAW) == 0.0


def test_backward_of_attention_takes_longer_and_scores_in_memory_cost_more() -> None:
    forward, backward = (
        flash_attention_s(4096, 4096, 32, 256, device=A100, law=LAW, fraction=0.6, backward=back)
        for back in (False, True)
    )
    assert 2.5 < backward / forward < 3.5
    assert score_attention_s(4096, 4096, 32, 128, device=A100, law=LAW) > forward


def test_a_window_of_attention_is_cheaper_than_all_of_it() -> None:
    whole, window = (
        flash_attention_s(8192, keys, 32, 256, device=H100, law=LAW, fraction=0.6) for keys in (8192, 1024)
    )
    assert window < whole / 4


def test_streams_run_at_the_stated_fraction_of_the_bandwidth() -> None:
    assert stream_s(1e9, device=A100, law=LAW) == pytest.approx(1e9 / (A100.memory_bytes_per_s * LAW.memory_fraction))
