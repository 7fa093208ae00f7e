"""The summary against what the events say, counted another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import GROUP, GROUPS_PER_BATCH, MAX_STALENESS, SyntheticRun, synthetic

from rollart.core.events import header
from rollart.observe.summary import summarise, write_summary
from rollart.observe.summary_fields import FIELDS

STEPS = 12


def summary_of(run: SyntheticRun) -> dict[str, Any]:
    return summarise(run.events, run.header)


def test_every_field_is_defined_and_every_definition_is_a_field() -> None:
    defined = {name for names in FIELDS for name in names.split(", ")}
    assert set(summary_of(synthetic())) == defined


def test_counts() -> None:
    run = synthetic()
    summary = summary_of(run)
    assert summary["steps"] == STEPS
    assert summary["trajectories"] == STEPS * GROUP * GROUPS_PER_BATCH
    assert summary["status"] == "done"
    assert summary["figures"] == "measured"
    assert summary["wall_s"] == run.events[-1]["t"]
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == MAX_STALENESS
    retried = sum(event["kind"] == "failure_decided" for event in run.events)
    assert summary["trajectories_by"]["failed"] == ({"env/timeout": retried} if retried else {})
    assert summary["mix"]["max_digit"] == {"wanted": 0.5, "trained": 0.5}


def test_every_finished_trajectory_is_counted_once() -> None:
    run = synthetic(steps=30)
    by = summary_of(run)["trajectories_by"]
    ended = [event["data"] for event in run.events if event["kind"] == "traj_finished"]
    training = [data for data in ended if data["purpose"] == "train"]
    assert by["trained"] + sum(by["dropped"].values()) + sum(by["failed"].values()) == len(training)
    assert by["dropped"]
    assert by["eval"] == len(ended) - len(training)


def test_staleness_is_the_mean_over_trained_trajectories() -> None:
    run = synthetic()
    released = [event["data"] for event in run.events if event["kind"] == "batch_released"]
    mean = sum(data["staleness_mean"] * data["trajectories"] for data in released) / sum(
        data["trajectories"] for data in released
    )
    assert summary_of(run)["staleness"]["mean"] == pytest.approx(mean, abs=1e-6)


def test_the_ledger_closes() -> None:
    tokens = summary_of(synthetic())["tokens"]
    places = tokens["trained"] + tokens["buffered"] + tokens["in_flight"] + tokens["eval"]
    assert tokens["sampled"] == places + sum(tokens["dropped"].values()) > 0


def test_idle_shares_are_what_sampling_the_run_gives() -> None:
    """Ask at many moments whether a request is live and whether the trainer works, and count."""
    run = synthetic(engines=2)
    steps = [event for event in run.events if event["kind"] == "step_finished"]
    start = next(event["t"] for event in run.events if event["kind"] == "step_started")
    end = steps[-1]["t"]
    moments = [start + (end - start) * (at + 0.5) / 4000 for at in range(4000)]
    work = [(e["t"] - e["data"]["seconds"], e["t"]) for e in run.events if e["kind"] in ("step_finished", "published")]
    idle = sum(not any(low <= t < high for low, high in work) for t in moments) / len(moments)
    summary = summary_of(run)
    assert summary["trainer_idle_frac"] == pytest.approx(idle, abs=0.01)

    turns: dict[str, list[tuple[float, float]]] = {engine: [] for engine in run.engines}
    routed: dict[tuple[Any, ...], float] = {}
    for event in run.events:
        if event["kind"] in ("turn_routed", "turn_done"):
            key = (event["traj"], event["attempt"], event["turn"])
            if event["kind"] == "turn_routed":
                routed[key] = event["t"]
            elif event["t"] >= start:
                turns[event["engine"]].append((routed.pop(key), event["t"]))
    without = sum(
        not any(low <= t < high for low, high in spans) for spans in turns.values() for t in moments[::10]
    ) / (2 * len(moments[::10]))
    assert summary["engine_idle_frac"] == pytest.approx(without, abs=0.03)


def test_splits_add_up_to_their_whole() -> None:
    summary = summary_of(synthetic(engines=2))
    waits, window = summary["waits"], summary["window_s"]
    assert sum(waits["trainer"].values()) == pytest.approx(window, abs=1e-4)
    assert sum(waits["engines"].values()) == pytest.approx(2 * window, abs=1e-4)
    assert waits["trainer"]["wait_for_batch"] / window == pytest.approx(summary["trainer_idle_frac"], abs=0.02)
    for task in ("frozen_lake", "max_digit"):
        assert set(waits["trajectory"][task]) == {
            "env_open", "wait_for_engine", "generate", "env_step", "score", "other",
        }  # fmt: skip


def test_success_comes_from_baselines_and_evaluations() -> None:
    run = synthetic()
    summary = summary_of(run)
    scored = {
        (e["eval"], e["task"], e["data"]["sampling"]): e["data"]["success"]
        for e in run.events
        if e["kind"] == "eval_scored"
    }
    assert summary["success"]["max_digit"] == {
        "random": 0.1,
        "constant": 0.271,
        "warm": scored["before", "max_digit", "sampled"],
        "after": scored["after", "max_digit", "sampled"],
        "held_back": scored["after", "max_digit", "sampled"],
        "greedy": scored["after", "max_digit", "greedy"],
    }
    assert summary["success"]["frozen_lake"]["held_back"] is None
    assert summary["success_episodes"]["frozen_lake"]["random"] == 256
    assert summary["constant_answer"]["frozen_lake"] == "DDRRDR"


def test_exposed_time_is_the_sum_over_applies() -> None:
    run = synthetic()
    exposed = sum(event["data"]["exposed_s"] for event in run.events if event["kind"] == "applied")
    assert summary_of(run)["sync_exposed_s"] == pytest.approx(exposed) != 0


def test_a_run_that_was_killed_is_unfinished_and_has_no_final_results() -> None:
    run = synthetic(status="killed")
    summary = summarise(run.events[: len(run.events) // 2], run.header)
    assert summary["status"] == "unfinished"
    assert 0 < summary["steps"] < STEPS
    assert summary["success"]["max_digit"]["after"] is None
    assert summary["success"]["max_digit"]["warm"] is not None


def test_an_empty_log_gives_nulls_not_zeros() -> None:
    summary = summarise([])
    assert summary["steps"] == 0
    assert summary["tokens"] is None
    assert summary["engine_idle_frac"] is None
    assert summary["trainer_idle_frac"] is None
    assert summary["staleness"]["mean"] is None


def test_virtual_time_is_called_simulated() -> None:
    virtual = header(run="r", incarnation=1, clock="virtual", world="virtual", git="x")
    assert summarise([], virtual)["figures"] == "simulated"


def test_it_is_written_beside_the_log(tmp_path: Path) -> None:
    run = synthetic()
    path = write_summary(run.write(tmp_path))
    assert json.loads(path.read_text()) == json.loads(json.dumps(summary_of(run)))
