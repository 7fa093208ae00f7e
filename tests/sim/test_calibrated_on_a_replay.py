"""The whole way round: a run on known laws is recorded as a real one is, calibrated on, and predicted from what was found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured_laws import a_run, some_laws
from rollart.config.schema import RunConfig
from rollart.control import run as control
from rollart.core.errors import ConfigError
from rollart.core.events import Recorder, header
from rollart.core.types import Trajectory
from rollart.observe.measurements import calibrate
from rollart.observe.outlook import outlook
from rollart.perf.measured import Calibrated
from rollart.sim import loop
from rollart.sim.laws import ClippedNormal, Law
from rollart.sim.replay import ReplayCluster, build_replay

STEPS = 40


def recorded(
    folder: Path, config: RunConfig, laws: Calibrated, *, world: str = "local", waits: Mapping[str, Law] | None = None
) -> list[Mapping[str, Any]]:
    """A run's folder as `rollart train` leaves it."""
    events: list[Mapping[str, Any]] = []
    kept: list[Trajectory] = []
    made = build_replay(config, laws, latency_s=waits).world((events.append,), keep=kept.append)
    assert isinstance(made.cluster, ReplayCluster)
    loop.run(control.run(config, replace(made, beside=lambda record: beside(record, made.cluster))))  # type: ignore[arg-type]
    head = header(run="made", incarnation=0, clock="virtual", world=world, git="none")
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (head, *events)))
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (folder / "trajectories.jsonl").write_text("".join(f"{json.dumps(row(one))}\n" for one in kept))
    return events


@asynccontextmanager
async def beside(record: Recorder, cluster: ReplayCluster) -> AsyncIterator[None]:
    """What `runtime.usage` records, of processes that are not there."""

    async def usage() -> None:
        while True:
            traffic, work = cluster.counts()
            used = {"control": cluster.machine.control.used_s, "others": 0.0, "ray": 0.0}
            for process in cluster.machine.workers:
                role = {"engine": "engine", "trainer": "trainer", "host": "env"}[process.name.partition("-")[0]]
                used[role] = used.get(role, 0.0) + process.used_s
            record("usage", cpu_s=used, traffic=traffic, work=work)
            await asyncio.sleep(1.0)

    record("machine", cores=2, cpu="a processor", versions={"python": "3.11"})
    going_on = asyncio.get_running_loop().create_task(usage())
    yield
    going_on.cancel()


def row(one: Trajectory) -> Mapping[str, Any]:
    pieces = one.segments[0].pieces
    return {
        "task": one.instance.task, "purpose": "train", "status": one.status, "segments": 1, "reward": one.reward,
        "loss_mask": [int(piece.sampled) for piece in pieces for _ in range(piece.n_tokens)],
    }  # fmt: skip


def step_s(events: list[Mapping[str, Any]]) -> float:
    found = outlook(events)
    assert found is not None
    return found.step_s.mean


def test_laws_come_back_and_predict_the_run_and_another_one(tmp_path: Path) -> None:
    laws, config = some_laws(), a_run(schedule={"steps": STEPS, "batch": 32})
    events = recorded(tmp_path, config, laws)
    found = calibrate(tmp_path)
    assert found.trainer.token_s + found.trainer.pass_s / 500 == pytest.approx(
        laws.trainer.token_s + laws.trainer.pass_s / 500, rel=0.3
    )
    for other in (config, a_run(schedule={"steps": STEPS, "batch": 16, "max_staleness": 0})):
        true: list[Mapping[str, Any]] = events if other is config else []
        predicted: list[Mapping[str, Any]] = []
        for which, into in ((found, predicted), (laws, true)):
            if not into:
                loop.run(control.run(other, build_replay(other, which).world((into.append,))))
        # a record of one configuration cannot tell what a message costs at either end; another one weighs them otherwise
        assert step_s(predicted) == pytest.approx(step_s(true), rel=0.1 if other is config else 0.15)


def test_the_cost_of_a_call_is_the_same_from_a_record_of_environments_that_wait(tmp_path: Path) -> None:
    laws, config = some_laws(), a_run(schedule={"steps": STEPS, "batch": 32})
    waits = {name: ClippedNormal(law="normal", mean=0.2, sigma=0.05) for name in config.tasks}
    recorded(tmp_path, config, laws, waits=waits)
    found = calibrate(tmp_path)
    assert all(law.step_latency_s for law in found.tasks.values())
    assert found.host.call_s == pytest.approx(laws.host.call_s, rel=0.25)


def test_a_record_that_cannot_tell_is_refused_with_what_to_do(tmp_path: Path) -> None:
    recorded(tmp_path, a_run(schedule={"steps": 3}), some_laws())
    with pytest.raises(ConfigError, match=r"has 3 steps and .* use a run with 6 steps"):
        calibrate(tmp_path)
    recorded(tmp_path, a_run(schedule={"steps": 60, "batch": 8}), some_laws(), world="inline")
    with pytest.raises(ConfigError, match=r"world\.kind=local"):
        calibrate(tmp_path)
    text = (tmp_path / "events.jsonl").read_text().replace('"inline"', '"local"')
    (tmp_path / "events.jsonl").write_text(text.replace("computed_tokens", "padded_tokens"))
    with pytest.raises(ConfigError, match=r"no metric `computed_tokens`.*make a new run"):
        calibrate(tmp_path)
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if '"machine"' not in line]
    for number, line in enumerate(kept[1:], start=1):
        kept[number] = json.dumps({**json.loads(line), "seq": number}) + "\n"
    (tmp_path / "events.jsonl").write_text("".join(kept))
    with pytest.raises(ConfigError, match="no event `machine`"):
        calibrate(tmp_path)
