"""What a long run keeps in memory: control and everything that reads its events, over hundreds of steps."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rollart.control.run import run
from rollart.core.errors import failure
from rollart.observe.display import Display
from rollart.observe.metrics import MetricsFold
from rollart.sim.loop import run as run_virtually
from rollart.sim.world import SimCluster, world
from simruns import a_config, a_task, failing, random_env

FIRST, LAST = 50, 200
"""Steps between which memory is compared."""
MOST_BYTES, MOST_OBJECTS = 48_000, 600
"""What may have come between them by chance: what lives at the moment differs. 150 steps have some 1,200 trajectories and
50,000 events, so one small object kept of each trajectory is more."""


class Memory(NamedTuple):
    n_bytes: int
    objects: int


def memory() -> Memory:
    gc.collect()
    return Memory(tracemalloc.get_traced_memory()[0], len(gc.get_objects()))


def growth(sink: Callable[[Mapping[str, Any]], None]) -> Memory:
    """Between the two steps, of a run with two tasks, two engines, environments that fail, and all readers of its events."""
    tasks = [a_task("a", instances=40), a_task("b", ratio=2, instances=40)]
    config = a_config(tasks, engines=2, schedule={"steps": LAST + 2, "batch": 8, "group_size": 4})
    cluster = SimCluster(env=random_env(fault=failing(0.05, failure("env", "raised", "boom"))))
    found: dict[int, Memory] = {}

    def look(event: Mapping[str, Any]) -> None:
        if event["kind"] != "step_finished":
            return
        for trainer in cluster.trainers:  # a simulated trainer remembers all that it was given
            trainer._weights = replace(trainer.weights, batches=())
            trainer._published.clear()
        if event["step"] in (FIRST, LAST):
            found[event["step"]] = memory()

    metrics = MetricsFold()  # not its writer, whose queue is as long as its thread happens to be late

    def fold(event: Mapping[str, Any]) -> None:
        metrics(event)

    with Path(os.devnull).open("w") as nowhere:
        display = Display(nowhere, plain=True)
        tracemalloc.start()
        try:
            run_virtually(run(config, world(tuple(tasks), cluster, sinks=(fold, display, sink, look))))
        finally:
            tracemalloc.stop()
            display.close()
    return Memory(found[LAST].n_bytes - found[FIRST].n_bytes, found[LAST].objects - found[FIRST].objects)


def test_over_200_steps_neither_control_nor_its_readers_keep_more_and_more() -> None:
    """Field case 45: objects and bytes at step 200 against step 50."""
    grown = growth(lambda event: None)
    assert grown.objects < MOST_OBJECTS, grown
    assert grown.n_bytes < MOST_BYTES, grown


def test_a_small_object_kept_of_each_trajectory_would_be_seen() -> None:
    kept: list[list[int]] = []
    grown = growth(lambda event: kept.append([]) if event["kind"] == "traj_finished" else None)
    assert grown.objects > MOST_OBJECTS, grown
    assert grown.n_bytes > MOST_BYTES, grown
