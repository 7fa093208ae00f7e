"""Figures that events carry and that other events of the same log imply: they must agree.

Invariant: nothing here decides whether a run kept its promises (`audit.py` does); a figure that does not add up means that
what reports show is not what happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollart.observe.audit_record import Record, Row
from rollart.sched.staleness import Lineage

CLOSE = 2e-6
"""Times are rounded to microseconds, each of two that are compared."""


def figures(record: Record) -> list[str]:
    """Every figure that does not add up, a line each."""
    return [
        line for check in (_groups, _batches, _steps, _turns, _answers, _attempts, _weights) for line in check(record)
    ]


def _differ(one: float | None, other: float | None, close: float = CLOSE) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > close + 1e-9 * abs(other)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _groups(record: Record) -> Iterator[str]:
    for row in record.of("group_completed"):
        members = record.members.get(row["group"], [])
        oldest = min((one["oldest_version"] for one in members if one["oldest_version"] is not None), default=None)
        rewards = [one["reward"] for one in members]
        if sorted(row["rewards"]) != sorted(rewards) or _differ(row["reward_mean"], _mean(rewards)):
            yield f"figures: {row['group']} has rewards {rewards} and says {row['rewards']}, mean {row['reward_mean']}"
        if row["members"] != len(members) or row["oldest_version"] != oldest:
            says = f"{row['members']}, {row['oldest_version']}"
            yield f"figures: {row['group']} has {len(members)} members, oldest {oldest}, and says {says}"


def _batches(record: Record) -> Iterator[str]:
    lineage, first = Lineage(), True
    for row in record.rows:
        if row["kind"] == "published":
            if "again" in row:
                lineage = lineage.again(row["again"], row["version"])
            elif first and row["version"] > 0:
                lineage = lineage.again(0, row["version"])
            first = False
        elif row["kind"] == "batch_released":
            members = [one for group in row["groups"] for one in record.members.get(group, ())]
            at = lineage.batches(row["version"])
            sampled = [one for one in members if one["oldest_version"] is not None]
            says: dict[str, tuple[float, float]] = {
                "trajectories": (row["trajectories"], len(members)),
                "tokens": (row["tokens"], sum(one["sampled"] for one in members)),
                "staleness_mean": (
                    row["staleness_mean"], _mean([at - lineage.batches(one["oldest_version"]) for one in sampled])
                ),
                "newest_lag_mean": (
                    row["newest_lag_mean"], _mean([at - lineage.batches(one["newest_version"]) for one in sampled])
                ),
            }  # fmt: skip
            for name, (told, is_) in says.items():
                if _differ(told, is_):
                    yield f"figures: step {row['step']} says {name} {told}, it is {is_}"
            if not 0 <= row["waited_s"] <= row["t"] + CLOSE:
                yield f"figures: step {row['step']} waited {row['waited_s']} s for its batch at {row['t']} s"


def _steps(record: Record) -> Iterator[str]:
    tokens = {row["step"]: row["tokens"] for row in record.of("batch_released")}
    started = {row["step"]: row for row in record.of("step_started")}
    published = {row["step"]: row for row in record.of("published")}
    given_back = [row for row in record.of("devices_switched") if row["to"] == "rollout"]
    for row in record.of("step_finished"):
        step = row["step"]
        if row["trained_tokens"] + row.get("masked_tokens", 0) != tokens.get(step):
            yield f"figures: step {step} trained {row['trained_tokens']} tokens of {tokens.get(step)}"
        if step in started and step in published:
            began, offered = started[step]["t"], published[step]["t"] - published[step]["seconds"]
            # devices that are shared go back to the engines between the step and its publish
            back = sum(one["seconds"] for one in given_back if began < one["t"] <= published[step]["t"])
            took = offered - began - back
            if _differ(row["seconds"], took, 2 * CLOSE):
                yield f"figures: step {step} took {row['seconds']} s and says {took:.6f}"


def _turns(record: Record) -> Iterator[str]:
    routed: dict[tuple[Any, ...], Row] = {}
    for row in record.rows:
        if row["kind"] == "turn_routed":
            routed[_turn(row)] = row
        elif row["kind"] == "turn_done":
            begun = routed.get(_turn(row))
            if begun is None or _differ(row["seconds"], row["t"] - begun["t"]):
                yield f"figures: turn {_turn(row)} says {row['seconds']} s, it was routed at {begun and begun['t']}"


def _turn(row: Row) -> tuple[Any, ...]:
    return row["traj"], row["attempt"], row["turn"], row["part"]


def _answers(record: Record) -> Iterator[str]:
    """Environments answer the turns of an attempt one after the other."""
    answered: dict[tuple[str, int], int] = {}
    for row in record.of("env_stepped"):
        key = row["traj"], row["attempt"]
        turn = answered.get(key, 0)
        answered[key] = turn + 1
        if row["turn"] != turn:
            yield f"figures: {key} was answered on turn {turn}, and the log says {row['turn']}"


def _attempts(record: Record) -> Iterator[str]:
    """Of those that ended by themselves."""
    started = {(row["traj"], row["attempt"]): row["t"] for row in record.of("traj_started")}
    scored = {(row["traj"], row["attempt"]): row["reward"] for row in record.of("scored")}
    for row in record.of("traj_finished"):
        key = row["traj"], row["attempt"]
        total = row["seconds"].get("total")
        if total is not None and key in started and _differ(total, row["t"] - started[key]):
            yield f"figures: {key} took {row['t'] - started[key]:.6f} s and says {total}"
        if row["status"] == "done" and row["reward"] != scored.get(key):
            yield f"figures: {key} has reward {row['reward']}, scored was {scored.get(key)}"


def _weights(record: Record) -> Iterator[str]:
    for row in (*record.of("applied"), *record.of("prefetched"), *record.of("published")):
        exposed = row.get("exposed_s", 0.0)
        if not 0 <= row["seconds"] <= row["t"] + CLOSE or exposed > row["seconds"] + CLOSE:
            yield f"figures: {row['kind']} {row['version']} took {row['seconds']} s at {row['t']} s, {exposed} exposed"
