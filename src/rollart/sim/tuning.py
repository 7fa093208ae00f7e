"""What the laws of a recorded run leave open of its step time: how quick cores are while all of them are busy.

Laws are CPU seconds, and CPU seconds do not tell what it costs that processes share caches and are handed from core to core,
nor how much of that is in them already. So the run is replayed on its own laws, and the speed of busy cores is set so that the
mean step comes out as it was measured. Invariant: only that one number is set, within bounds, and only where the step time
depends on it; whoever compares a replay with its own record must not use this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollart.config.derive import changed
from rollart.config.schema import RunConfig
from rollart.control import run as control
from rollart.perf.measured import Calibrated
from rollart.sim import loop
from rollart.sim.replay import build_replay

STEPS = 24
"""That a replay has for this: more would change its mean by about a hundredth."""
WARM_STEPS = 2
"""Left out of the mean, as of the measured one."""
SLOWEST, QUICKEST = 0.7, 1.3
ENOUGH = 0.005
"""A relative error below which nothing is set."""
LEAST_SLOPE = 0.2
"""Of the step time with the speed, as logarithms: below, a run waits for something else than cores."""


def tuned(config: RunConfig, laws: Calibrated) -> Calibrated:
    """The laws with the speed of busy cores (`together`) at which `config`, the run that they are of, has its measured step."""
    if laws.step_s <= 0:
        return laws
    wrong = math.log(_step_s(config, laws) / laws.step_s)
    if abs(wrong) < ENOUGH:
        return laws
    first = math.log(laws.together)
    guess = _within(first + wrong)
    if guess == first:
        return laws
    better = math.log(_step_s(config, replace(laws, together=math.exp(guess))) / laws.step_s)
    slope = (wrong - better) / (guess - first)
    if slope < LEAST_SLOPE:
        return laws
    return replace(laws, together=float(f"{math.exp(_within(first + wrong / slope)):.4g}"))


def _within(log_speed: float) -> float:
    return min(max(log_speed, math.log(SLOWEST)), math.log(QUICKEST))


def _step_s(config: RunConfig, laws: Calibrated) -> float:
    """Mean step of a replay in its full course: without the first steps, and without the last ones of a longer run."""
    schedule = config.schedule
    steps = min(schedule.steps, STEPS + schedule.max_staleness + 1)
    ends_s: list[float] = []

    def seen(event: Mapping[str, Any]) -> None:
        if event["kind"] == "step_finished":
            ends_s.append(event["t"])

    short = changed(config, schedule=changed(schedule, steps=steps))
    loop.run(control.run(short, build_replay(short, laws).world((seen,))))
    counted = ends_s[WARM_STEPS - 1 : STEPS]
    return (counted[-1] - counted[0]) / (len(counted) - 1)
