"""What laws leave open of a run's step time is set from it, where the step time depends on it, and within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from measured_laws import a_run, some_laws
from rollart.config.schema import RunConfig
from rollart.control import run as control
from rollart.perf.measured import Calibrated
from rollart.sim import loop
from rollart.sim.replay import build_replay
from rollart.sim.tuning import QUICKEST, WARM_STEPS, tuned

BUSY = a_run(schedule={"steps": 12})


def step_s(config: RunConfig, laws: Calibrated) -> float:
    events: list[Mapping[str, Any]] = []
    loop.run(control.run(config, build_replay(config, laws).world((events.append,))))
    ends = [event["t"] for event in events if event["kind"] == "step_finished"][WARM_STEPS - 1 :]
    mean: float = (ends[-1] - ends[0]) / (len(ends) - 1)
    return mean


@pytest.mark.parametrize("true", [0.85, 1.1])
def test_the_speed_that_a_run_had_comes_back(true: float) -> None:
    laws = some_laws(cores=1)
    measured_s = step_s(BUSY, replace(laws, together=true))
    found = tuned(BUSY, replace(laws, step_s=measured_s))
    assert step_s(BUSY, found) == pytest.approx(measured_s, rel=0.02)
    assert found == replace(laws, step_s=measured_s, together=found.together)


def test_nothing_is_set_where_nothing_is_wrong_or_the_run_waits_for_something_else() -> None:
    laws = some_laws()
    right = replace(laws, step_s=step_s(BUSY, laws))
    assert tuned(BUSY, right) == right
    lake = replace(laws.tasks["lake"], step_latency_s=(3.0,))
    waits = a_run(schedule={"steps": 4, "max_staleness": 0})
    slow = replace(laws, tasks={"lake": lake}, step_s=5.0)
    assert tuned(waits, slow) == slow


def test_what_no_speed_explains_is_not_explained_by_one() -> None:
    laws = some_laws(cores=1)
    found = tuned(BUSY, replace(laws, step_s=0.2 * step_s(BUSY, laws)))
    assert found.together in (pytest.approx(QUICKEST, rel=1e-3), 1.0)
