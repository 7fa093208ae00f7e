"""The figures of a run from its log: known answers, sums, what they are counted over, real and simulated alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import synthetic

from rollart.core.events import Recorder
from rollart.observe.outlook import Outlook, outlook, quantile
from rollart.observe.step_tally import TRAINER, TRAJECTORY
from rollart.observe.summary import summarise

Event = Mapping[str, Any]


class Log:
    """A run of one trajectory per group and step, written by hand."""

    def __init__(self, *, enforce: str = "admission_and_release") -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.record = Recorder((lambda event: self.events.append(dict(event)),), lambda: self.now)
        self.record(
            "run_started", recipe="r", steps=3, batch=1, group_size=1, max_staleness=1, sync_order="early",
            mix={"a": 1.0}, success_at={"a": 1.0}, enforce=enforce,
        )  # fmt: skip
        self.record("engine_joined", engine="e-0", pool="fast", version=0)
        self.record("engine_joined", engine="e-1", pool="slow", version=0)

    def step(
        self, n: int, *, turn_s: float = 6.0, waited_s: float = 10.0, train_s: float = 4.0, publish_s: float = 1.0,
        suspended_s: float = 0.0, version: int | None = None, fallback: bool = False,
    ) -> None:  # fmt: skip
        """10 s of rollout (1 reset, the turn, 1 env step, 1 reward, the rest waiting), then training and publishing."""
        group, start = f"train/a/0/{n}", self.now
        traj, more = f"{group}/0", {"fallback": True} if fallback else {}
        self.record("group_opened", group=group, task="a", members=1, room=1)
        self.now = start + 2.0
        self.record("turn_routed", traj=traj, attempt=0, turn=0, part=0, engine="e-0", load=0, sticky=False, **more)
        self.now += turn_s
        self.record(
            "turn_done", traj=traj, attempt=0, turn=0, part=0, engine="e-0", seconds=turn_s, sampled=40, spans=[],
            finish="stop", prefilled=90, rebuilt=10,
        )  # fmt: skip
        self.now = start + 10.0
        oldest = n if version is None else version
        self.record(
            "traj_finished", traj=traj, attempt=0, group=group, task="a", purpose="train", status="done", cause="stop",
            reward=1.0, turns=1, bad_actions=0, sampled=40, context=140, oldest_version=oldest, newest_version=n, spans=1,
            metrics={}, seconds={"open": 1.0, "generate": turn_s + 0.5, "step": 1.0, "score": 1.0, "total": 10.0},
        )  # fmt: skip
        self.record("group_completed", group=group, task="a", members=1, reward_mean=1.0, oldest_version=oldest)
        self.record(
            "batch_released", step=n, version=n, groups=[group], trajectories=1, tokens=40, staleness_mean=0,
            staleness_max=0, waited_s=waited_s, quota={},
        )  # fmt: skip
        self.now += suspended_s
        self.record("step_started", step=n, version=n)
        self.now += train_s
        self.now += publish_s
        self.record("published", step=n, version=n + 1, seconds=publish_s, bytes=1, buckets=1, digest="")
        self.record("step_finished", step=n, version=n, seconds=train_s, trained_tokens=40, metrics={})
        self.books(trained=40 * (n + 1), stale=10 * n)

    def books(self, *, trained: int, stale: int) -> None:
        self.record(
            "ledger", sampled=2 * trained, trained=trained, dropped={"stale": stale} if stale else {}, buffered=0, in_flight=0,
            eval=0, engines={},
        )  # fmt: skip

    def result(self) -> Outlook:
        found = outlook(self.events)
        assert found is not None
        return found


def three_steps(**more: Any) -> Log:
    log = Log(**more)
    log.step(0, turn_s=1.0)  # filling: not counted
    log.step(1)
    log.step(2, turn_s=4.0, fallback=True, version=1)
    return log


def test_a_run_by_hand_gives_the_figures_that_one_counts_by_hand() -> None:
    found = three_steps().result()
    assert (found.steps, found.window_s, found.trajectories) == (2, 30.0, 2)
    assert (found.step_s.median, found.step_s.mean, found.step_s.p10, found.step_s.p90) == (15.0, 15.0, 15.0, 15.0)
    assert found.trajectories_per_s == pytest.approx(2 / 30)
    assert found.tokens_per_s == pytest.approx(280 / 30)
    assert found.sampled_tokens_per_s == pytest.approx(80 / 30)
    assert found.trajectory == pytest.approx(
        {"generation": 0.5, "reset": 0.1, "env_step": 0.1, "reward": 0.1, "weights": 0.0, "waiting": 0.2}
    )
    assert found.trajectory_s == pytest.approx(10.0)
    assert found.trainer == pytest.approx({"training": 8 / 30, "weights": 2 / 30, "waiting": 20 / 30, "other": 0.0})
    assert found.pools["fast"].utilisation == pytest.approx(10 / 30)
    assert found.pools["fast"].turns == 2
    assert found.pools["slow"].utilisation == 0.0
    assert (found.staleness_mean, found.staleness_max, found.staleness_bound) == (0.5, 1, 1)
    assert found.rebuilt == pytest.approx(0.1)
    assert found.fallback == 0.5
    assert found.cost is None


def test_waste_is_that_of_the_counted_steps_and_not_of_the_runs_end() -> None:
    log = three_steps()
    log.books(trained=120, stale=300)  # what is dropped when a run ends
    found = log.result()
    assert found.waste == pytest.approx({"stale": 20 / 100})
    assert found.wasted == pytest.approx(0.2)


def test_a_run_of_one_step_is_counted_whole() -> None:
    log = Log()
    log.step(0)
    found = log.result()
    assert (found.steps, found.window_s) == (1, 15.0)
    assert outlook(Log().events) is None


def test_turns_that_stand_still_for_new_weights_are_told_apart() -> None:
    log = Log()
    log.step(0)
    log.record("applied", engine="e-0", version=1, seconds=3.0, exposed_s=2.0, live=1, digest="", matches=True)
    log.step(1)
    found = log.result()
    assert found.trajectory["weights"] == pytest.approx(0.2)
    assert found.trajectory["generation"] == pytest.approx(0.4)


def test_under_paper_the_trainer_stands_by_until_the_version_is_served() -> None:
    log = Log()
    log.step(0)
    log.step(1, suspended_s=5.0)
    assert log.result().trainer["weights"] == pytest.approx(6 / 20)


def test_a_bound_that_is_checked_at_admission_only_does_not_hold() -> None:
    assert three_steps().result().bound_holds
    assert not three_steps(enforce="admission").result().bound_holds
    assert not summarise(three_steps(enforce="admission").events)["staleness"]["holds"]


def test_cost_is_that_of_all_devices_and_of_the_reward_service() -> None:
    log = Log()
    log.record(
        "simulated", basis=["tables"], notes=["a note"], costs={"fast": 24.0, "slow": 0.0}, devices={"fast": 8, "slow": 1},
        trains="fast",
    )  # fmt: skip
    log.step(0)
    log.step(1)
    log.record("rewards_used", calls=4, timeouts=0, busy_s=8.0, queue_s=0.0, cold_s=0.0, cost=15.0)
    found = log.result()
    assert found.costs == pytest.approx({"fast": 24 * 15 * 1000 / 3600, "rewards": 0.5 * 15 * 1000 / 3600})
    assert (found.basis, found.notes, found.trains) == (("tables",), ("a note",), "fast")
    assert found.as_json()["figures"] == "simulated"
    assert summarise(log.events)["basis"] == ["tables"]


def test_a_whole_run_agrees_with_its_summary() -> None:
    run = synthetic(engines=2)
    found, summary = outlook(run.events), summarise(run.events, run.header)
    assert found is not None
    assert found.steps == summary["steps"] - 1
    assert found.staleness_max == summary["staleness"]["max"]
    assert found.trajectories_per_s == pytest.approx(summary["throughput"]["trajectories_per_s"], rel=0.15)
    assert found.as_json()["figures"] == "measured"
    json.dumps(found.as_json(), allow_nan=False)


steps = st.tuples(*(st.floats(0.0, 20.0) for _ in range(4)))


@given(st.lists(steps, min_size=1, max_size=6))
def test_splits_add_up_and_shares_are_shares(drawn: list[tuple[float, float, float, float]]) -> None:
    log = Log()
    for n, (turn_s, waited_s, train_s, publish_s) in enumerate(drawn):
        log.step(n, turn_s=min(turn_s, 8.0), waited_s=min(waited_s, 10.0), train_s=train_s, publish_s=publish_s)
    found = log.result()
    assert set(found.trajectory) == set(TRAJECTORY)
    assert set(found.trainer) == set(TRAINER)
    for shares in (found.trajectory, found.trainer):
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(0 <= share <= 1 for share in shares.values())
    assert all(0 <= pool.utilisation <= 1 for pool in found.pools.values())
    assert found.step_s.p10 <= found.step_s.median <= found.step_s.p90
    assert found.window_s == pytest.approx(found.step_s.mean * found.steps)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_rise_and_stay_between_the_extremes(numbers: list[float], share: float) -> None:
    ordered = sorted(numbers)
    shares: Iterable[float] = sorted([0.0, share, 1.0])
    found = [quantile(ordered, one) for one in shares]
    assert found[0] == ordered[0]
    assert found[-1] == ordered[-1]
    assert list(accumulate(found, max)) == pytest.approx(found)
