"""A run on measured laws: the same control code, deterministic, and slower where there is more to do or less to do it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from measured_laws import a_run, some_laws
from rollart.config.schema import RunConfig
from rollart.control import run as control
from rollart.core.errors import ConfigError
from rollart.observe.outlook import Outlook, outlook
from rollart.perf.measured import Calibrated
from rollart.sim import loop
from rollart.sim.laws import Constant
from rollart.sim.replay import build_replay, trimmed

Events = list[Mapping[str, Any]]


def events_of(config: RunConfig, laws: Calibrated, **options: Any) -> Events:
    events: Events = []
    loop.run(control.run(config, build_replay(config, laws, **options).world((events.append,))))
    return events


def figures(config: RunConfig, laws: Calibrated, **options: Any) -> Outlook:
    found = outlook(events_of(config, laws, **options))
    assert found is not None
    return found


def test_a_replay_ends_as_a_run_does_and_is_the_same_again() -> None:
    first = events_of(a_run(), some_laws())
    assert first[-1]["data"]["status"] == "done"
    assert sum(event["kind"] == "step_finished" for event in first) == 6
    assert json.dumps(first) == json.dumps(events_of(a_run(), some_laws()))


def test_slower_workers_and_fewer_cores_make_longer_steps() -> None:
    config = a_run(schedule={"steps": 16})
    usual, slow, one = (
        figures(config, laws).step_s.median for laws in (some_laws(), some_laws(slower=2.0), some_laws(cores=1))
    )
    assert slow > 1.3 * usual
    assert one > 1.1 * usual


def test_no_step_is_shorter_than_what_its_work_takes() -> None:
    """On one core the step takes at least all core seconds of a step; the trainer's alone are a bound on any number."""
    events = events_of(a_run(), some_laws(cores=8))
    for event in events:
        if event["kind"] == "step_finished":
            metrics = event["data"]["metrics"]
            law = some_laws().trainer
            least_s = law.step_s + law.pass_s * metrics["micro_batches"] + law.token_s * metrics["computed_tokens"]
            assert event["data"]["seconds"] >= least_s * (1 - 1e-6)


def test_what_environments_wait_is_the_measured_or_the_given_law() -> None:
    slow = replace(some_laws().tasks["lake"], step_latency_s=(0.5,))
    measured = events_of(a_run(), replace(some_laws(), tasks={"lake": slow}))
    given = events_of(a_run(), some_laws(), latency_s={"lake": Constant(value=0.25)})
    for events, least_s in ((measured, 0.5), (given, 0.25)):
        waits = [event["data"]["seconds"] for event in events if event["kind"] == "env_stepped"]
        assert least_s <= min(waits) < least_s + 0.1


def test_staleness_stays_within_its_bound_and_0_takes_turns() -> None:
    sync = figures(a_run(schedule={"max_staleness": 0}), some_laws())
    overlapped = figures(a_run(schedule={"max_staleness": 1}), some_laws())
    assert sync.staleness_max == 0
    assert overlapped.staleness_max == 1
    assert overlapped.step_s.median < sync.step_s.median


def test_the_order_of_the_record_is_followed_where_asked() -> None:
    task = some_laws().tasks["lake"]
    longer = replace(task, played=tuple(sorted(task.played, key=lambda one: len(one.sampled))))
    events = events_of(a_run(), replace(some_laws(), tasks={"lake": longer}), follow=True)
    turns = [event["data"]["turns"] for event in events if event["kind"] == "traj_finished"]
    assert sum(turns[:16]) < sum(turns[-16:])


def test_trajectories_have_the_tokens_of_those_that_were_played() -> None:
    contexts = {
        event["data"]["context"] for event in events_of(a_run(), some_laws()) if event["kind"] == "traj_finished"
    }
    assert contexts <= {one.prompt + sum(one.sampled) + sum(one.observed) for one in some_laws().tasks["lake"].played}


def test_trimming_leaves_the_steps_alone() -> None:
    config = trimmed(a_run(eval={"every": 2, "episodes": 8}, checkpoint={"every": 3}))
    assert (config.eval.episodes, config.eval.every, config.checkpoint.every, config.warm_start.steps) == (0, 0, 0, 0)
    assert config.schedule == a_run().schedule


def test_what_the_laws_do_not_know_is_refused_before_the_first_event() -> None:
    other = RunConfig.model_validate({**a_run().model_dump(), "tasks": {"maze": a_run().model_dump()["tasks"]["lake"]}})
    with pytest.raises(ConfigError, match=r"tasks\.maze was not measured \(measured: lake\)"):
        build_replay(other, some_laws())
    with pytest.raises(ConfigError, match="no task of the run"):
        build_replay(a_run(), some_laws(), latency_s={"sea": Constant(value=1.0)})


def test_the_basis_says_what_the_figures_rest_on() -> None:
    told = "\n".join(build_replay(a_run(), some_laws()).basis)
    host = "us a call, and 1 more such where it has waited"
    for part in ("measured of run made", "2 cores (a processor)", "python 3.11", "lake from 8 that were played", host):
        assert part in told
