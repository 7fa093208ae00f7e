"""Overlap slowdown: the law, its levels, and what the fit learns."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.perf.overlap import (
    LEAST_SLOWDOWN,
    Kernel,
    OverlapModel,
    Step,
    as_table,
    model_from,
    overlapped,
    packaged,
    slowdown,
)
from rollart.perf.overlap_fit import PRIOR_ROWS, Measured, fit, fit_held_sms

MODEL = OverlapModel(
    held_sms=8.0,
    names={"norm": Step(edges_s=(), values=(2.0,))},
    full_names={"norm<float>": Step(edges_s=(10e-6,), values=(0.5, 4.0)), "fast": Step(edges_s=(), values=(-0.4,))},
)


def kernel(name: str = "norm", full_name: str = "", solo_s: float = 20e-6, sms: int = 108) -> Kernel:
    return Kernel(name=name, full_name=full_name, solo_s=solo_s, sms=sms)


def test_levels_go_from_nothing_to_the_kernels_own() -> None:
    one = kernel(full_name="norm<float>")
    assert overlapped(one, 0.5, MODEL, 0).seconds == 20e-6
    assert overlapped(one, 0.5, MODEL, 1).seconds == pytest.approx(20e-6 * (1 + 0.5 * 0.08))
    assert overlapped(one, 0.5, MODEL, 2).seconds == pytest.approx(20e-6 * 3)
    assert overlapped(one, 0.5, MODEL).basis == "kernel full name"


def test_the_nearest_known_name_decides() -> None:
    assert slowdown(kernel(full_name="norm<half>"), MODEL) == (2.0, "kernel name")
    of_unknown, basis = slowdown(kernel("gemm"), MODEL)
    assert of_unknown == pytest.approx(0.08)
    assert basis == "physical"
    assert slowdown(kernel(full_name="norm<float>", solo_s=9e-6), MODEL)[0] == 0.5
    assert slowdown(kernel(full_name="fast"), MODEL)[0] == LEAST_SLOWDOWN


@settings(max_examples=40)
@given(
    st.sampled_from(["norm", "norm<float>", "fast", "other"]),
    st.floats(0, 1),
    st.floats(0, 1e-2),
    st.sampled_from([0, 1, 2]),
)
def test_no_overlap_no_change_and_more_overlap_more_of_it(name: str, ratio: float, solo_s: float, level: int) -> None:
    one = kernel(name, name, solo_s)
    assert overlapped(one, 0.0, MODEL, level).seconds == solo_s  # type: ignore[arg-type]
    found = overlapped(one, ratio, MODEL, level)  # type: ignore[arg-type]
    assert found.seconds >= solo_s * (1 + LEAST_SLOWDOWN) * (1 - 1e-12)
    assert found.seconds == pytest.approx(solo_s * (1 + found.slowdown * ratio))


def test_a_device_with_fewer_sms_lends_a_larger_part() -> None:
    few, many = (slowdown(kernel("gemm", sms=sms), MODEL)[0] for sms in (40, 132))
    assert few == pytest.approx(0.25)
    assert many < few
    with pytest.raises(ConfigError, match="8 SMs cannot lend 8"):
        slowdown(kernel("gemm", sms=8), MODEL)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_ratios_outside_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="overlap ratio"):
        overlapped(kernel(), ratio, MODEL)


@pytest.mark.parametrize("solo_s", [-1e-6, float("inf")])
def test_times_that_are_none_are_refused(solo_s: float) -> None:
    with pytest.raises(ConfigError, match="time alone"):
        overlapped(kernel(solo_s=solo_s), 0.5, MODEL)


def rows(name: str, full_name: str, solo_us: float, factor: float, count: int, ratio: float = 1.0) -> list[Measured]:
    return [
        Measured(
            kernel=kernel(name, full_name, (solo_us + 0.01 * index) * 1e-6),
            overlap_ratio=ratio,
            seconds=(solo_us + 0.01 * index) * 1e-6 * (1 + (factor - 1) * ratio),
        )
        for index in range(count)
    ]


def test_level_one_has_one_vote_a_name_and_two_for_nothing() -> None:
    """Votes 0, 0 (prior), 0.08, 0.2, 9: the middle one is 0.08 = 8 of 100 other SMs, whatever runs how often."""
    measured = [*rows("a", "", 10, 1.08, 1), *rows("b", "", 500, 1.2, 50), *rows("c", "", 10, 10.0, 3)]
    assert fit_held_sms(measured) == pytest.approx(8.0)


def test_level_two_shrinks_a_kernel_towards_its_name() -> None:
    measured = [*rows("a", "a<x>", 10, 3.0, 1), *rows("a", "a<y>", 10, 2.0, 9), *rows("b", "", 10, 1.0, 5)]
    model = fit(measured)
    name = model.names["a"].values[0]
    physical = slowdown(kernel("nobody"), model)[0]
    assert name == pytest.approx((10 * 1.0 + PRIOR_ROWS * physical) / (10 + PRIOR_ROWS))
    assert model.full_names["a<x>"].values[0] == pytest.approx((2.0 + PRIOR_ROWS * name) / (1 + PRIOR_ROWS))
    assert model.full_names["a<y>"].values[0] == pytest.approx(1.0, rel=0.02)
    assert "" not in model.full_names


def test_a_kernel_at_two_sizes_gets_a_step_between_them() -> None:
    model = fit([*rows("a", "a", 10, 1.0, 6), *rows("a", "a", 90, 5.0, 6)])
    step = model.full_names["a"]
    assert len(step.edges_s) == 1
    assert 11e-6 < step.edges_s[0] < 89e-6
    assert step.values[0] < 0.7
    assert step.values[1] > 3.0


def test_hardly_overlapped_rows_do_not_teach_level_two() -> None:
    noisy = rows("a", "a", 10, 40.0, 20, ratio=0.01)
    model = fit([*noisy, *rows("b", "b", 10, 1.5, 5)])
    assert "a" not in model.names
    assert "b" in model.names


def test_a_fit_without_overlap_or_across_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no row is overlapped"):
        fit(rows("a", "", 10, 1.0, 3, ratio=0.0))
    mixed = [*rows("a", "", 10, 1.1, 1), Measured(kernel=kernel("b", sms=132), overlap_ratio=1.0, seconds=2e-5)]
    with pytest.raises(ConfigError, match="one device at a time"):
        fit(mixed)


def test_a_model_survives_its_table() -> None:
    back = model_from(json.loads(json.dumps(as_table(MODEL))))
    assert back.held_sms == MODEL.held_sms
    assert slowdown(kernel(full_name="norm<float>"), back) == slowdown(kernel(full_name="norm<float>"), MODEL)
    with pytest.raises(ConfigError, match="default_level"):
        model_from({**as_table(MODEL), "default_level": 3})
    with pytest.raises(ConfigError, match="one value more"):
        model_from({**as_table(MODEL), "names": {"x": {"edges_us": [1.0], "slowdown": [0.1]}}})


def test_the_packaged_model_knows_what_suffers_and_what_does_not() -> None:
    model = packaged()
    assert 0 < model.held_sms < 20
    layer_norm_backward = kernel("GammaBetaBackwardCUDAKernel_32x32", solo_s=98e-6)
    assert overlapped(layer_norm_backward, 1.0).slowdown > 2
    gemm = kernel("ampere_sgemm_64x32_sliced1x4_nt", solo_s=690e-6)
    assert abs(overlapped(gemm, 1.0).slowdown) < 0.06
    assert overlapped(kernel("a kernel of another model"), 1.0).basis == "physical"
