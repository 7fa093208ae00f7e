"""Many scenarios, over several processes, and what they came to: broken promises and two tables of coverage.

Invariant: what a seed gives does not depend on which process ran it, nor on what ran there before.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from rollart.sim.torture.drive import meets_the_minimum, run
from rollart.sim.torture.faults import KINDS
from rollart.sim.torture.points import await_points
from rollart.sim.torture.scenario import scenario

CHUNK = 25
"""Seeds that a worker takes at once; the cyclic garbage of as many is collected together."""
CANCELLATIONS = ("killed", "cancelled", "timed out")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What some seeds came to."""

    seeds: int = 0
    events: int = 0
    incarnations: int = 0
    faults: int = 0
    cpu_s: float = 0.0
    broken: dict[int, list[str]] = field(default_factory=dict)
    """Seed -> its broken promises."""
    short: dict[int, list[str]] = field(default_factory=dict)
    """Seed that kept all promises -> what it lacked of the least that a scenario must hold."""
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(fault kind, lifecycle state of what it hit) -> how often."""
    awaits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(cancellation kind, await point of control at which a task stood) -> how often."""

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.incarnations += other.incarnations
        self.faults += other.faults
        self.cpu_s += other.cpu_s
        self.broken.update(other.broken)
        self.short.update(other.short)
        self.states.update(other.states)
        self.awaits.update(other.awaits)


def tortured(seeds: Sequence[int]) -> Tally:
    """Run some seeds in this process."""
    tally, began_s = Tally(), time.process_time()
    gc.disable()  # a run makes few cycles, and looking for them is a quarter of its time
    try:
        for seed in seeds:
            outcome = run(scenario(seed))
            tally.seeds += 1
            tally.events += len(outcome.log)
            tally.incarnations += len(outcome.ends)
            tally.faults += len(outcome.fired)
            tally.states.update((kind, state) for kind, states in outcome.fired for state in states)
            tally.awaits.update(outcome.stood)
            lacks = meets_the_minimum(outcome)
            if outcome.broken:
                tally.broken[seed] = list(outcome.broken)
            elif lacks:
                tally.short[seed] = lacks
    finally:
        gc.enable()
        gc.collect()
    tally.cpu_s = time.process_time() - began_s
    return tally


def campaign(
    first: int, seeds: int, *, workers: int, stop: bool = False, progress: Callable[[Tally], None] = lambda tally: None
) -> Tally:
    """Run `seeds` seeds from `first` on. stop: at the first one that breaks a promise."""
    whole = Tally()
    for part in _parts([range(n, min(n + CHUNK, first + seeds)) for n in range(first, first + seeds, CHUNK)], workers):
        whole.add(part)
        progress(whole)
        if stop and whole.broken:
            break
    return whole


def _parts(chunks: Sequence[range], workers: int) -> Iterator[Tally]:
    if workers == 1:
        yield from map(tortured, chunks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        for done in as_completed([pool.submit(tortured, chunk) for chunk in chunks]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def as_json(tally: Tally, *, first: int, seconds: float) -> dict[str, Any]:
    """The two tables beside the figures; cells that were never hit are listed."""
    cells = [(kind, state) for kind, what in KINDS.items() for state in what.hits]
    points = sorted(set(await_points().values()))
    return {
        "first": first,
        "seeds": tally.seeds,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(tally.cpu_s, 1),
        "events": tally.events,
        "incarnations": tally.incarnations,
        "faults_fired": tally.faults,
        "broken": [{"seed": seed, "promises": lines} for seed, lines in sorted(tally.broken.items())],
        "below_the_minimum": [{"seed": seed, "lacks": lines} for seed, lines in sorted(tally.short.items())],
        "fault_by_state": {
            kind: {state: n for (one, state), n in sorted(tally.states.items()) if one == kind} for kind in KINDS
        },
        "cancellation_by_await": {
            how: {point: tally.awaits[how, point] for point in points if tally.awaits[how, point]}
            for how in CANCELLATIONS
        },
        "never_hit": {
            "fault_by_state": [list(cell) for cell in cells if not tally.states[cell]],
            "cancellation_by_await": [
                [how, point] for how in CANCELLATIONS for point in points if not tally.awaits[how, point]
            ],
        },
    }
