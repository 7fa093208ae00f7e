"""Simulations that run at the same time in one process, a thread each, give what each gives by itself."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import a_config, a_task, random_env, simulate

SWITCH_S = 1e-4
"""Between threads: many times in every run."""


def a_log(seed: int) -> bytes:
    tasks = [a_task("a"), a_task("b", ratio=2)]
    config = a_config(tasks, seed=seed, engines=2, schedule={"steps": 3, "redundancy": 1, "max_staleness": 1})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.1), env=random_env(seed),
        trainer=TrainerModel(finish_s=1.0 + seed),
    )  # fmt: skip
    return "\n".join(json.dumps(event) for event in simulate(config, tasks, cluster).events).encode()


def test_each_gives_the_log_that_it_gives_alone() -> None:
    alone = [a_log(seed) for seed in range(3)]
    assert len(set(alone)) == 3
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(a_log, range(3)))
    finally:
        sys.setswitchinterval(usual_s)
    assert together == alone
