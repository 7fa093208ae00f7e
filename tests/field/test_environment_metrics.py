"""Every number that an environment returns, from its `step` to the pages that a user reads."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from rollart.config.schema import CharsTokenizer
from rollart.core.types import TrajId
from rollart.observe.charts import charts_of
from rollart.observe.metric_names import documented
from rollart.observe.metrics import MetricsFold
from rollart.runtime.envs.session import TextSession
from rollart.runtime.envs.text import StepResult, complete
from rollart.runtime.tokenizers import build_tokenizer
from rollart.sim.world import SimCluster
from simruns import a_config, a_task, random_env, simulate


class Shop:
    """Returns numbers of every make, some of them only now and then."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, seed: int) -> str:
        self.turn = 0
        return "buy "

    def step(self, action: str) -> StepResult:
        self.turn += 1
        metrics: dict[str, float] = {"steps": self.turn, "cheap": True, "price/mean": np.float32(0.5)}  # type: ignore[dict-item]
        if self.turn == 1:
            metrics["first only"] = 7
        return StepResult("ok ", reward=1.0, terminated=self.turn == 2, metrics=metrics)


def test_a_session_hands_on_every_number_as_a_float() -> None:
    """Field case 42: from the environment to the observation, whatever kind of number it is."""
    tokenizer = build_tokenizer(CharsTokenizer())
    session = TextSession(complete(Shop(), "Shop"), tokenizer)
    session.reset(0, 0)
    turns = [session.step(np.asarray([1], np.int32)) for _ in range(2)]
    assert dict(turns[0].metrics) == {"steps": 1.0, "cheap": 1.0, "price/mean": 0.5, "first only": 7.0}
    assert all(type(value) is float for turn in turns for value in turn.metrics.values())


def returned(traj: TrajId, attempt: int) -> dict[str, float]:
    """A task has its own numbers beside those that all have; names are as odd as users write them."""
    draw = random.Random(f"{traj}{attempt}")
    own = {"calls/per turn": 3.0} if traj.split("/")[1] == "a" else {"{odd}": draw.random(), "now and then": 1.0}
    return {"score": draw.random(), **own}


def test_every_number_is_a_metric_of_its_task_and_a_curve_in_the_report() -> None:
    """Field case 42: each number that an environment returned is in the log, the metrics and the report, per task and exactly
    the mean over the trajectories that were trained."""
    tasks = [a_task("a"), a_task("b")]
    sim = simulate(a_config(tasks), tasks, SimCluster(env=random_env(metrics=returned)))
    assert sim.error is None
    fold, rows = MetricsFold(), list[Mapping[str, float]]()
    for event in sim.events:
        rows += fold(event)
    steps = [dict(row) for row in rows if "time/all/train_step/sum" in row]
    wanted = {"a": {"score", "calls.per turn"}, "b": {"score", "{odd}", "now and then"}}
    for task, names in wanted.items():
        found = {key.split("/")[2] for row in steps for key in row if key.startswith(f"env/{task}/")}
        assert found == names
    assert all(documented(key) for row in steps for key in row if key.startswith("env/"))
    last = sim.of("batch_released")[-1]
    finished = {(row["traj"]): row for row in sim.of("traj_finished") if row["status"] == "done"}
    trained = [
        row for traj, row in finished.items() if traj.rpartition("/")[0] in last["groups"] and row["task"] == "b"
    ]
    mean = sum(row["metrics"]["{odd}"] for row in trained) / len(trained)
    assert abs(steps[-1]["env/b/{odd}/mean"] - mean) < 1e-9
    charts = {chart["title"]: chart for chart in charts_of(steps, ["a", "b"], {})}
    assert [line["name"] for line in charts["Environment: score"]["lines"]] == ["a", "b"]
    assert [line["name"] for line in charts["Environment: {odd}"]["lines"]] == ["b"]
    assert [line["name"] for line in charts["Environment: calls.per turn"]["lines"]] == ["a"]
