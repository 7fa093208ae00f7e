"""How `benchmarks/fidelity.py` judges a prediction: medians, their interval, what is allowed and what is aimed at."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_modules import loaded

RUNS, FIDELITY = [loaded(name) for name in ("peers_figures", "peers_tasks", "peers_run", "fidelity_runs", "fidelity")][
    3:
]
CASE = SimpleNamespace(name="case")


def a_run(step_s: float) -> dict[str, Any]:
    return {"step_s": step_s, "trajectory": {"generation": step_s / 10}, "staleness_mean": None}


def judged(predicted_s: float, *measured_s: float) -> dict[str, Any]:
    found: dict[str, Any] = FIDELITY.judged(CASE, a_run(predicted_s), [a_run(one) for one in measured_s])
    return found


def test_the_error_is_of_the_median_and_an_outlier_does_not_move_it() -> None:
    found = judged(1.04, 1.0, 1.0, 1.0, 1.0, 9.0)
    assert (found["error"], found["measured_s"]) == (0.04, 1.0)
    assert found["ok"]
    assert found["aim"]


@pytest.mark.parametrize(("predicted_s", "ok", "aim"), [(1.049, True, True), (1.06, True, False), (0.89, False, False)])
def test_steady_runs_allow_a_tenth_and_the_aim_is_half_of_it(predicted_s: float, ok: bool, aim: bool) -> None:
    found = judged(predicted_s, *[1.0] * 5)
    assert (found["ok"], found["aim"], found["allowed"]) == (ok, aim, 0.1)


def test_runs_that_scatter_allow_half_of_their_interval() -> None:
    found = judged(1.15, 0.6, 0.8, 1.0, 1.2, 1.4)
    low, high = found["interval_s"]
    assert found["allowed"] == pytest.approx((high - low) / 2, abs=1e-4)
    assert found["allowed"] > 0.2
    assert found["ok"]
    assert not found["aim"]


@settings(max_examples=6)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7))
def test_an_interval_holds_the_median_and_is_the_same_each_time(values: list[float]) -> None:
    low, high = FIDELITY.interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)
    assert FIDELITY.interval(values) == (low, high)


def test_the_middle_of_many_is_taken_figure_by_figure() -> None:
    made = FIDELITY.middle([a_run(1.0), a_run(3.0), a_run(2.0)])
    assert made == {"step_s": 2.0, "trajectory": {"generation": 0.2}}, "what a run has not is left out"


def test_five_other_configurations_are_predicted_in_every_respect_that_counts() -> None:
    base, cases = RUNS.CALIBRATION, RUNS.PREDICTED
    assert len(cases) == 5
    assert base not in cases
    for name in ("batch", "group", "staleness", "latency_s", "engines"):
        assert any(getattr(case, name) != getattr(base, name) for case in cases), name
    assert sum(not case.latency_s for case in cases) >= 2
