"""Each promise is broken by a doctored log, and by that one only; an honest log breaks none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from rollart.observe.audit import audit
from rollart.observe.audit_record import Record
from rollart.sim.engine import EngineModel
from rollart.sim.world import SimCluster, TrainerModel
from simruns import SimRun, a_config, a_task, random_env, record_of, simulate

Log = list[dict[str, Any]]


def a_run() -> SimRun:
    tasks = [a_task("a", held_out=2), a_task("b", instances=3)]
    config = a_config(tasks, engines=2, schedule={"max_staleness": 1}, eval={"episodes": 2, "every": 1})
    model = EngineModel(token_s=0.1, prefetch_s=0.2, apply_s=0.2)
    cluster = SimCluster(engine=model, env=random_env(), trainer=TrainerModel(finish_s=1.0))
    return simulate(config, tasks, cluster)


RUN = a_run()


def test_an_honest_log_breaks_no_promise() -> None:
    assert audit(record_of(RUN)) == []


def of(log: Log, kind: str, **wanted: object) -> list[dict[str, Any]]:
    return [
        event
        for event in log
        if event["kind"] == kind and all(event.get(k, event["data"].get(k)) == v for k, v in wanted.items())
    ]


def without(log: Log, event: dict[str, Any]) -> None:
    """Take an event out, and close the gap in the numbers, so that nothing but its absence tells."""
    log.remove(event)
    renumber(log)


def twice(log: Log, event: dict[str, Any]) -> None:
    log.insert(log.index(event), copy.deepcopy(event))
    renumber(log)


def renumber(log: Log) -> None:
    for seq, one in enumerate(log, start=1):
        one["seq"] = seq


def _gap(log: Log) -> None:
    log[10]["seq"] += 1


def _time_falls(log: Log) -> None:
    log[-1]["t"] = 0.0


def _no_end(log: Log) -> None:
    without(log, log[-1])


def _never_ended(log: Log) -> None:
    without(log, of(log, "traj_finished", purpose="eval")[0])


def _ended_twice(log: Log) -> None:
    twice(log, of(log, "traj_finished", purpose="eval")[0])


def _failure_with_reward(log: Log) -> None:
    event = of(log, "traj_finished", status="done")[0]
    event["data"].update(status="failed", failure="env lost: gone")


def _reward_not_finite(log: Log) -> None:
    of(log, "traj_finished", status="done")[0]["data"]["reward"] = float("nan")


def _dropped_after_training(log: Log) -> None:
    group = of(log, "batch_released")[0]["data"]["groups"][0]
    event = {"seq": 0, "t": log[-1]["t"], "kind": "group_dropped", "group": group, "task": "a", "data": {"reason": "x"}}
    log.insert(-1, event)
    renumber(log)


def _group_lost(log: Log) -> None:
    groups = of(log, "batch_released")[2]["data"]["groups"]
    groups.pop()


def _trained_twice(log: Log) -> None:
    first, second = of(log, "batch_released")[:2]
    second["data"]["groups"][0] = first["data"]["groups"][0]


def _member_left_out(log: Log) -> None:
    group = of(log, "batch_released")[0]["data"]["groups"][0]
    of(log, "traj_finished", status="done", group=group)[0]["data"].update(status="failed", reward=None, failure="x")


def _turn_lost(log: Log) -> None:
    without(log, of(log, "turn_done")[5])


def _ledger_open(log: Log) -> None:
    of(log, "ledger")[1]["data"]["buffered"] += 1


def _token_lost_at_the_end(log: Log) -> None:
    last = of(log, "ledger")[-1]["data"]
    engine = next(iter(last["engines"]))
    last["engines"][engine] -= 1
    last["sampled"] -= 1
    last["trained"] -= 1


def _mix_changed(log: Log) -> None:
    of(log, "group_opened", task="a")[0]["task"] = "b"


def _too_old(log: Log) -> None:
    groups = of(log, "batch_released")[3]["data"]["groups"]
    for event in of(log, "traj_finished", status="done", purpose="train"):
        if event["group"] in groups:
            event["data"]["oldest_version"] = 0


def _released_at_another_version(log: Log) -> None:
    of(log, "batch_released")[2]["version"] = 1


def _skipped_an_instance(log: Log) -> None:
    event = of(log, "group_opened", task="a")[1]
    old, new = event["group"], "train/a/0/999999"
    for one in log:
        if one.get("group") == old:
            one["group"] = new
        groups = one["data"].get("groups", [])
        if old in groups:
            groups[groups.index(old)] = new


def _version_again(log: Log) -> None:
    of(log, "published")[2]["version"] = 1


def _other_weights_again(log: Log) -> None:
    of(log, "published")[2]["data"]["again"] = 1


def _falls_on_an_engine(log: Log) -> None:
    of(log, "applied")[-1]["version"] = 0


def _wrong_bit(log: Log) -> None:
    of(log, "applied")[2]["data"]["digest"] = "other"


def _joined_again(log: Log) -> None:
    twice(log, of(log, "engine_joined")[0])


def _never_applied(log: Log) -> None:
    of(log, "turn_done")[7]["data"]["spans"][0][0] = 77


def _falls_in_an_attempt(log: Log) -> None:
    turn = next(event for event in reversed(of(log, "turn_done")) if event["turn"] > 0 and event["data"]["sampled"])
    turn["data"]["spans"] = [[4, 1], [0, turn["data"]["sampled"] - 1]]


def _evaluation_mixed(log: Log) -> None:
    of(log, "traj_finished", purpose="eval")[0]["data"]["newest_version"] += 1


def _route_to_the_past(log: Log) -> None:
    for event in of(log, "applied"):
        event["version"] -= 3 if event["version"] > 2 else 0


DOCTORED: dict[Callable[[Log], None], str] = {
    _gap: "record",
    _time_falls: "record",
    _no_end: "ended",
    _never_ended: "attempts",
    _ended_twice: "attempts",
    _failure_with_reward: "rewards",
    _reward_not_finite: "rewards",
    _dropped_after_training: "groups",
    _group_lost: "groups",
    _trained_twice: "groups",
    _member_left_out: "members",
    _turn_lost: "tokens",
    _ledger_open: "ledger",
    _token_lost_at_the_end: "ledger",
    _mix_changed: "mix",
    _too_old: "staleness",
    _released_at_another_version: "staleness",
    _skipped_an_instance: "instances",
    _version_again: "versions",
    _other_weights_again: "versions",
    _falls_on_an_engine: "versions",
    _wrong_bit: "versions",
    _joined_again: "versions",
    _never_applied: "versions",
    _falls_in_an_attempt: "versions",
    _evaluation_mixed: "evaluations",
    _route_to_the_past: "routes",
}


@pytest.mark.parametrize(("doctor", "promise"), DOCTORED.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_doctored_log_breaks_its_promise(doctor: Callable[[Log], None], promise: str) -> None:
    record = record_of(RUN)
    log: Log = copy.deepcopy(list(record.log))  # type: ignore[arg-type]
    doctor(log)
    broken = audit(Record(log=log, order=record.order, learned=record.learned, kept=(), min_members=2))
    assert promise in {line.split(":")[0] for line in broken}


def test_what_the_trainer_learned_is_compared_with_what_was_released() -> None:
    record = record_of(RUN)
    assert record.learned is not None
    for learned in (
        [*record.learned[:1], list(record.learned[1])[:-1], *record.learned[2:]],
        [*record.learned[:1], [*record.learned[1], record.learned[1][0]], *record.learned[2:]],
        [*record.learned[:1], record.learned[2], record.learned[1], *record.learned[3:]],
        record.learned[:-1],
    ):
        broken = audit(Record(log=record.log, learned=learned))
        assert {line.split(":")[0] for line in broken} == {"learned"}


def test_a_resumed_log_says_truly_what_it_takes_back() -> None:
    """`lost` is what stood after `from_seq`, and what follows is numbered from there."""
    log: Log = copy.deepcopy(list(record_of(RUN).log))  # type: ignore[arg-type]
    head = log[:40]
    lost = {"seq": 31, "t": head[29]["t"], "kind": "resumed", "data": {"from_seq": 30, "lost": 9}}
    assert [line for line in audit(Record(log=[*head, lost])) if line.startswith("record")] == [
        "record: event 31 says 9 lost, 10 stood after it"
    ]
    lost["data"]["lost"] = 10
    assert [line for line in audit(Record(log=[*head, lost])) if line.startswith("record")] == []


def test_a_log_without_a_beginning_is_no_run() -> None:
    assert audit(Record(log=[])) == ["record: the run has no run_started"]
