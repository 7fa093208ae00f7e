"""`schedule.enforce=admission`: the bound is checked when a group begins, so it does not hold when batches take what ended
first."""

from __future__ import annotations

from rollart.sim.engine import EngineModel
from rollart.sim.envs import Call, EnvModel
from rollart.sim.trainer import TrainerModel
from rollart.sim.world import SimCluster
from simruns import SimRun, a_config, a_task, check, simulate


def slow_every_fifth(traj: str, attempt: int, call: Call, turn: int) -> float:
    return 20.0 if call == "step" and int(traj.split("/")[3]) % 5 == 0 else 0.5


def simulated(enforce: str) -> SimRun:
    tasks = [a_task()]
    config = a_config(tasks, schedule={"steps": 12, "max_staleness": 1, "enforce": enforce})
    cluster = SimCluster(
        engine=EngineModel(token_s=0.05), env=EnvModel(latency_s=slow_every_fifth), trainer=TrainerModel(finish_s=1.0)
    )
    return simulate(config, tasks, cluster)


def test_the_bound_holds_with_release_and_not_without() -> None:
    both, admission = simulated("admission_and_release"), simulated("admission")
    check(both)
    check(admission)
    assert max(row["staleness_max"] for row in both.of("batch_released")) <= 1
    assert max(row["staleness_max"] for row in admission.of("batch_released")) > 1
    assert admission.of("group_dropped", reason="stale") == []


def test_admission_bounds_what_is_open_all_the_same() -> None:
    sim = simulated("admission")
    open_groups, most = 0, 0
    for row in sim.rows:
        match row["kind"]:
            case "group_opened":
                open_groups += 1
            case "published" if row["version"] > 0:
                open_groups -= 4
            case _:
                pass
        most = max(most, open_groups)
    assert most <= 8
