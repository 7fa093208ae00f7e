"""Makes a scenario that breaks a promise as small as it can be while it still breaks the same one.

Invariant: each step is a scenario that was run and seen to break the promise; it is greedy, so the end is small and not
always the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from rollart.sim.torture.faults import Fault
from rollart.sim.torture.scenario import Scenario

MOST_RUNS = 400
"""Scenarios tried before the smallest so far is good enough."""
Broken = Callable[[Scenario], tuple[str, ...]]

_SIMPLEST: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("eval", "episodes"): (0,),
    ("eval", "every"): (0,),
    ("eval", "greedy"): (False,),
    ("schedule", "redundancy"): (0, 1),
    ("schedule", "redundant_groups"): (0, 1),
    ("schedule", "steps_per_batch"): (1,),
    ("schedule", "sync_order"): ("early",),
    ("schedule", "max_staleness"): (0, 1, 2),
    ("schedule", "steps"): (1, 2, 3, 4),
    ("schedule", "mix_window"): (10,),
    ("engine", "count"): (1, 2),
    ("envs", "hosts"): (1,),
    ("failure", "on_failure"): ({"kind": "drop"},),
    ("checkpoint", "every"): (1,),
}
"""Setting -> simpler values, the simplest first."""
_PLAIN_RATES = {"slowest_engine": 1.0}


def promise_of(line: str) -> str:
    """Which promise a line of an audit is about."""
    return line.split(":", 1)[0]


def shrink(scenario: Scenario, broken: Broken, *, most_runs: int = MOST_RUNS) -> Scenario:
    """The smallest scenario found that breaks the promise that `scenario` breaks first. `broken` runs one."""
    lines = broken(scenario)
    if not lines:
        raise ValueError(f"the scenario of seed {scenario.seed} breaks no promise, so there is nothing to shrink to")
    promise, runs = promise_of(lines[0]), 0
    smaller = True
    while smaller:
        smaller, at = False, 0
        # after a step the rest is tried on what it gave: what did not help before seldom helps now, the next pass sees
        while runs < most_runs and (candidate := next(islice(_simpler(scenario), at, None), None)) is not None:
            runs += 1
            if any(promise_of(line) == promise for line in broken(candidate)):
                scenario, smaller = candidate, True
            else:
                at += 1
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that differ from this one by one thing less."""
    yield from (replace(scenario, faults=faults) for faults in _fewer(scenario.faults))
    for index in range(len(scenario.tasks) if len(scenario.tasks) > 1 else 0):
        yield replace(scenario, tasks=scenario.tasks[:index] + scenario.tasks[index + 1 :])
    for batch in range(2, scenario.config["schedule"]["batch"], 2):
        yield _with(_with(scenario, "schedule", "group_size", 2), "schedule", "batch", batch, least=2)
    for (section, name), values in _SIMPLEST.items():
        now = scenario.config[section][name]
        for value in values:
            if value == now:
                break
            yield _with(scenario, section, name, value)
    for index, task in enumerate(scenario.tasks):
        plain = replace(task, scored=False, most_turns=task.least_turns, held_out=0, ratio=1.0, instances=200)
        if plain != task:
            yield replace(scenario, tasks=(*scenario.tasks[:index], plain, *scenario.tasks[index + 1 :]))
    for name, rate in scenario.rates.items():
        plain_rate = _PLAIN_RATES.get(name, 0.0 if name not in ("token", "tokens") else rate)
        if rate != plain_rate:
            yield replace(scenario, rates={**scenario.rates, name: plain_rate})


def _fewer(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    """None of them, a half, one less; or the same ones earlier."""
    if faults:
        yield ()
    if len(faults) > 3:
        yield faults[: len(faults) // 2]
        yield faults[len(faults) // 2 :]
    for index in range(len(faults)):
        yield faults[:index] + faults[index + 1 :]
    for index, fault in enumerate(faults):
        if fault.nth:
            yield (*faults[:index], replace(fault, nth=fault.nth // 2), *faults[index + 1 :])
        if fault.seconds:
            yield (*faults[:index], replace(fault, seconds=0.0), *faults[index + 1 :])


def _with(scenario: Scenario, section: str, name: str, value: Any, *, least: int = 0) -> Scenario:
    """One setting changed, and those that must follow it."""
    config = {key: dict(values) for key, values in scenario.config.items()}
    config[section][name] = value
    if least:
        config["failure"]["min_group_size"] = least
        config["schedule"]["steps_per_batch"] = 1
    if config["schedule"]["max_staleness"] == 0:
        config["schedule"]["sync_order"] = "early"
    return replace(scenario, config=config)
