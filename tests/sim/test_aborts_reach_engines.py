"""An attempt that nobody wants any more costs its engine no further token: the abort reaches the generation under way."""

from __future__ import annotations

from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster
from simruns import a_config, a_task, check, simulate

TOKEN_S = 0.1
FEW, MANY = 5, 60
SPARE = 4
"""The member beyond the group's size, which would sample for long."""


def test_a_generation_that_is_not_wanted_any_more_ends_within_a_token() -> None:
    tasks = [a_task("a", max_tokens=MANY)]
    config = a_config(tasks, schedule={"redundancy": 1})
    engine = EngineModel(
        token_s=TOKEN_S, length=lambda request: MANY if request.id.traj.endswith(f"/{SPARE}") else FEW
    )  # fmt: skip
    sim = simulate(config, tasks, SimCluster(engine=engine))
    check(sim)
    asked = {(row["traj"], row["attempt"]): row["t"] for row in sim.of("abort_requested")}
    ended = {(row["traj"], row["attempt"]): row for row in sim.of("traj_finished", status="aborted")}
    assert asked
    assert asked.keys() == ended.keys()
    assert {row["t"] - asked[key] for key, row in ended.items()} == {0.0}
    assert 0 < max(row["sampled"] for row in ended.values()) <= FEW + 1
