"""Each piece of advice comes when its figure says so, and not on a healthy run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from synthetic_run import synthetic

from rollart.observe.diagnose import diagnose
from rollart.observe.metric_rows import Row
from rollart.observe.summary import summarise

HEALTHY: dict[str, Any] = {
    "success": {"a": {}, "b": {}},
    "window_s": 100.0,
    "engine_idle_frac": 0.1,
    "staleness": {"mean": 0.5, "max": 1, "bound": 1},
    "tokens": {"sampled": 1000, "trained": 960, "dropped": {"stale": 10}, "buffered": 20, "in_flight": 0, "eval": 10},
    "trajectories_by": {"trained": 100, "dropped": {}, "failed": {}, "eval": 10},
    "waits": {
        "trainer": {"train": 90.0, "publish": 1.0, "wait_for_batch": 9.0, "other": 0.0},
        "engines": {"generate": 89.0, "stopped_by_apply": 1.0, "no_request": 10.0},
        "trajectory": {"a": {"generate": 1.0, "env_step": 0.1}, "b": {"generate": 0.9, "env_step": 0.1}},
    },
}
ROW: Row = {
    "time/all/train_step/sum": 1.0,
    "groups/a/zero_variance/mean": 0.2,
    "success/a/trained/mean": 0.6,
    "success/all/trained/mean": 0.6,
    "rollout/a/bad_actions/mean": 0.1,
    "rollout/a/turns/mean": 5.0,
    "trainer/all/entropy/value": 0.5,
    "trainer/all/mismatch_kl/value": 1e-6,
    "trainer/all/weights_changed/value": 1.0,
}


def rows(**changes: float) -> list[Row]:
    extra = {key.replace("__", "/"): value for key, value in changes.items()}
    return [{"train/step": step + 1, **ROW, **extra} for step in range(12)]


def codes(made: list[Row], summary: dict[str, Any]) -> dict[str, str]:
    return {advice.code: advice.text for advice in diagnose(made, summary)}


def changed(*path: str, value: Any) -> dict[str, Any]:
    summary = copy.deepcopy(HEALTHY)
    node = summary
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return summary


def test_a_healthy_run_gets_no_advice() -> None:
    assert codes(rows(), HEALTHY) == {}


def test_a_starved_trainer_is_named() -> None:
    """Field case 47: the trainer waits."""
    text = codes(rows(), changed("waits", "trainer", "wait_for_batch", value=60.0))["rollout_bound"]
    assert "60 %" in text
    assert "trainer waited for batches" in text


def test_idle_engines_are_named() -> None:
    """Field case 47: engines wait."""
    assert "no request 45 %" in codes(rows(), changed("engine_idle_frac", value=0.45))["trainer_bound"]


def test_taking_turns_is_told_from_either() -> None:
    summary = changed("waits", "trainer", "wait_for_batch", value=50.0)
    summary["engine_idle_frac"] = 0.4
    found = codes(rows(), summary)
    assert "max_staleness above 1" in found["no_overlap"]
    assert not {"rollout_bound", "trainer_bound"} & set(found)


@pytest.mark.parametrize(
    ("success", "said"), [(0.99, "is solved"), (0.01, "hardly ever succeeds"), (0.5, "out of reach")]
)
def test_groups_that_teach_nothing_are_named_with_the_reason(success: float, said: str) -> None:
    """Field case 47: zero-variance groups."""
    made = rows(groups__a__zero_variance__mean=0.8, success__a__trained__mean=success)
    text = codes(made, HEALTHY)["zero_variance"]
    assert "80 % of a's groups" in text
    assert said in text


def test_a_growing_mismatch_is_named() -> None:
    """Field case 47: mismatch between engine and trainer."""
    made = rows()
    for step, row in enumerate(made):
        row["trainer/all/mismatch_kl/value"] = 1e-3 * (1 + step)
    assert "mismatch_kl went from 0.002 to 0.011" in codes(made, HEALTHY)["mismatch_grows"]


def test_rounding_that_grows_is_no_mismatch() -> None:
    made = rows()
    for step, row in enumerate(made):
        row["trainer/all/mismatch_kl/value"] = 1e-8 * (1 + step)
    assert codes(made, HEALTHY) == {}


@pytest.mark.parametrize(
    ("path", "value", "code", "said"),
    [
        (("tokens", "dropped"), {"stale": 400, "redundant": 0}, "stale_drops", "40 % of the sampled"),
        (("tokens", "dropped"), {"redundant": 300}, "waste", "most of them as redundant"),
        (("tokens", "trained"), 900, "ledger_open", "does not close: 1000 tokens were sampled, 940 are"),
        (("trajectories_by", "failed"), {"env/timeout": 9, "env/lost": 1}, "failures", "env/timeout (9 times)"),
        (("waits", "engines", "stopped_by_apply"), 30.0, "exposed_sync", "stood still"),
    ],
)
def test_what_the_summary_gives_away(path: tuple[str, ...], value: Any, code: str, said: str) -> None:
    assert said in codes(rows(), changed(*path, value=value))[code]


def test_one_slow_task_is_named_where_the_trainer_waits() -> None:
    summary = changed("waits", "trajectory", "a", value={"generate": 1.0, "env_step": 5.0})
    assert "slow_task" not in codes(rows(), summary)
    summary["waits"]["trainer"]["wait_for_batch"] = 50.0
    text = codes(rows(), summary)["slow_task"]
    assert "Batches wait for a" in text
    assert "6.0 times" in text
    assert "env step" in text


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("engine__all__apply_mismatch__count", 1, "wrong_weights"),
        ("trainer__all__weights_changed__value", 0.0, "frozen_weights"),
        ("trainer__all__not_finite__count", 2, "not_finite"),
        ("rollout__a__bad_actions__mean", 2.5, "bad_actions"),
    ],
)
def test_what_the_rows_give_away(key: str, value: float, code: str) -> None:
    assert code in codes(rows(**{key: value}), HEALTHY)


def test_a_policy_that_explores_no_more_is_named() -> None:
    made = rows(trainer__all__entropy__value=0.001, success__all__trained__mean=0.2)
    assert "0.001 nats" in codes(made, HEALTHY)["entropy_collapsed"]


def test_the_worst_comes_first() -> None:
    summary = changed("engine_idle_frac", value=0.5)
    found = [advice.severity for advice in diagnose(rows(engine__all__apply_mismatch__count=1), summary)]
    assert found == ["bad", "note"]


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 1.0])
def test_it_takes_any_part_of_a_run(cut: float) -> None:
    run = synthetic()
    events = run.events[: int(cut * len(run.events))]
    made = run.rows()[: int(cut * len(run.rows()))]
    assert isinstance(diagnose(made, summarise(events, run.header)), list)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({}, "(80 %) went to checkpoints, or to standing by"),
        ({"trainer": {"count": 7}}, "(80 %) went to checkpoints and recovery (it was lost 7 times), and engines"),
    ],
)
def test_a_trainer_that_hardly_trains_does_not_bind_the_run(lost: dict[str, Any], said: str) -> None:
    parts = {"train": 5.0, "publish": 5.0, "wait_for_batch": 10.0, "other": 80.0}
    summary = {**changed("waits", "trainer", value=parts), "interruptions": lost, "engine_idle_frac": 0.9}
    found = codes(rows(), summary)
    assert said in found["trainer_away"]
    assert "trainer_bound" not in found
    summary["engine_idle_frac"] = 0.1
    assert codes(rows(), summary) == {}
