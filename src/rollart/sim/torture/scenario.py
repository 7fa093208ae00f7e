"""A scenario: everything that decides one tortured run, as a value that can be written down and run again.

Invariants: a scenario is a function of its seed; it has two tasks or more, 64 trajectories or more of 2 to 4 turns, 5 steps,
and three faults that no run can avoid, beside others that it may. Configurations are drawn at their edges.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollart.core.seeds import rng
from rollart.sim.torture.faults import KINDS, Fault

STEPS = 5
LEAST_TRAJECTORIES = 64
LEAST_FAULTS = 3
BATCHES = ((14, 2), (16, 2), (15, 3), (16, 4), (20, 4))
"""(trajectories, group size): five of them make at least 64 trajectories."""
SURE_FAULTS = (
    "env_hangs", "env_raises", "env_refuses", "env_slow", "env_dead", "engine_raises", "answer_lost", "answer_late",
    "answer_twice", "answer_deaf", "answer_partial", "engine_slow",
)  # fmt: skip
"""Those that hit calls of which every run has dozens."""
SURE_BEFORE = 50
"""Sure faults hit one of as many first calls."""
OTHER_FAULTS = {
    **dict.fromkeys(SURE_FAULTS, 2),
    "prefetch_fails": 2, "prefetch_hangs": 1, "apply_fails": 2, "apply_hangs": 1, "apply_flipped": 2,
    "scorer_raises": 2, "scorer_slow": 2, "scorer_nan": 2, "scorer_dead": 2,
    "trainer_dies": 8, "trainer_hangs": 1, "trainer_lost": 4,
    "engine_lost": 6, "engines_lost": 3, "host_lost": 5, "hosts_lost": 3, "start_fails": 6, "start_hangs": 2,
    "checkpoint_full": 4, "checkpoint_torn": 3, "driver_killed": 7, "run_cancelled": 5,
}  # fmt: skip
"""Kind -> how often it is drawn among the rest."""
FAILED_STARTS_AFTER = ("engine_lost", "engines_lost", "host_lost", "hosts_lost", "trainer_lost", "trainer_dies")
"""Losses after which a worker is started, which may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    name: str
    ratio: float
    instances: int
    held_out: int
    scored: bool
    least_turns: int
    most_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    tasks: tuple[TaskPlan, ...]
    config: Mapping[str, Mapping[str, Any]]
    """Sections of the run's configuration."""
    rates: Mapping[str, float]
    """Seconds of the world's calls: means for environments and scorers, exact for the rest."""
    rebuilds: bool
    """Engines keep live requests over an apply."""
    bytes_die: bool
    """A version that no engine has fetched is gone with its trainer."""
    faults: tuple[Fault, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> Scenario:
    """The scenario that `as_json` wrote."""
    return Scenario(
        **{
            **data,
            "tasks": tuple(TaskPlan(**task) for task in data["tasks"]),
            "faults": tuple(Fault(**fault) for fault in data["faults"]),
        }
    )


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = rng(seed, "torture")
    tasks = _tasks(chance)
    config = _config(chance)
    rates = _rates(chance)
    _bearable(config["deadlines"], rates)
    return Scenario(
        seed=seed, tasks=tasks, config=config, rates=rates, rebuilds=chance.random() < 0.7,
        bytes_die=chance.random() < 0.6, faults=_faults(chance, any(task.scored for task in tasks)),
    )  # fmt: skip


def _tasks(chance: random.Random) -> tuple[TaskPlan, ...]:
    many = 3 if chance.random() < 0.15 else 2
    return tuple(
        TaskPlan(
            name="abc"[index],
            ratio=chance.choice((1.0, 1.0, 2.0, 3.0, 0.5)),
            instances=chance.choice((3, 5, 8, 200, 200)),  # the short ones wrap into further epochs
            held_out=chance.choice((0, 2)),
            scored=chance.random() < 0.35,
            least_turns=2,
            most_turns=chance.choice((2, 2, 3, 4)),
        )
        for index in range(many)
    )


def _config(chance: random.Random) -> dict[str, dict[str, Any]]:
    batch, group_size = chance.choice(BATCHES)
    groups = batch // group_size
    bound = chance.choice((0, 0, 1, 1, 1, 2, 2, 3))
    splits = [n for n in (1, 1, 2) if groups % n == 0]
    evaluated = chance.random() < 0.35
    config = _edges(chance, batch, group_size, bound, splits, evaluated)
    policy = config["failure"]["on_failure"]
    if "fail" in (policy["kind"], policy.get("then")):  # then chance alone must not end the run
        config["deadlines"].update(env_open_s=30.0, env_step_s=30.0, turn_s=120.0, score_s=10.0, trajectory_s=300.0)
    return config


def _edges(
    chance: random.Random, batch: int, group_size: int, bound: int, splits: list[int], evaluated: bool
) -> dict[str, dict[str, Any]]:
    return {
        "schedule": {
            "steps": STEPS, "batch": batch, "group_size": group_size, "steps_per_batch": chance.choice(splits),
            "max_staleness": bound, "sync_order": "paper" if bound and chance.random() < 0.4 else "early",
            "redundancy": chance.choice((0, 0, 0, 1, 2)), "redundant_groups": chance.choice((0, 0, 0, 1, 3)),
            "mix_window": chance.choice((1, 3, 10)),
        },
        "engine": {"kind": "native", "count": chance.choice((1, 1, 2, 2, 3))},
        "envs": {"hosts": chance.choice((1, 2, 2))},
        "deadlines": {
            "env_open_s": chance.choice((3.0, 8.0, 30.0)), "env_step_s": chance.choice((2.0, 5.0, 30.0)),
            "turn_s": chance.choice((6.0, 15.0, 120.0)), "score_s": chance.choice((2.0, 10.0)),
            "trajectory_s": chance.choice((40.0, 90.0, 300.0)), "batch_s": 900.0, "weights_s": chance.choice((8.0, 30.0)),
            "pinned_s": chance.choice((1.0, 10.0, 60.0)), "train_s": chance.choice((30.0, 120.0)), "start_s": 20.0,
        },
        "failure": {
            "on_failure": _policy(chance), "min_group_size": chance.choice((2, group_size)),
            "give_up_after": chance.choice((32, 64)), "give_up_s": chance.choice((60.0, 240.0)),
        },
        "checkpoint": {"every": chance.choice((1, 1, 2, 3)), "keep": chance.choice((1, 2))},
        "eval": {
            "episodes": chance.choice((2, 3)) if evaluated else 0, "every": chance.choice((0, 1, 2)),
            "concurrency": chance.choice((1, 3, 128)), "greedy": chance.random() < 0.3,
        },
    }  # fmt: skip


def _bearable(deadlines: dict[str, float], rates: Mapping[str, float]) -> None:
    """Deadlines that some calls miss, and not most of them: a run that only fails tests nothing else."""
    deadlines["env_open_s"] = max(deadlines["env_open_s"], 5 * rates["env"])
    deadlines["env_step_s"] = max(deadlines["env_step_s"], 5 * rates["env"])
    longest_s = rates["token"] * rates["tokens"] * rates["slowest_engine"]
    deadlines["turn_s"] = max(deadlines["turn_s"], 1.02 * longest_s)


def _policy(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(("retry", "retry", "retry", "retry", "replace", "drop", "drop"))
    if kind != "retry":
        return {"kind": kind}
    return {
        "kind": kind, "max_retries": chance.choice((0, 1, 3)), "backoff_s": chance.choice((0.0, 0.1, 2.0)),
        "then": chance.choice(("replace", "drop", "drop", "replace", "replace", "fail")),
    }  # fmt: skip


def _rates(chance: random.Random) -> dict[str, float]:
    return {
        "token": chance.choice((0.02, 0.1, 0.2)), "tokens": chance.choice((4, 8, 16)), "prefill": 0.001,
        "prefetch": chance.choice((0.0, 0.5, 3.0)), "apply": chance.choice((0.0, 0.3, 2.0)),
        "slowest_engine": chance.choice((1.0, 1.0, 4.0)), "env": chance.choice((0.0, 0.2, 0.5, 1.0)),
        "score": chance.choice((0.0, 0.3)), "begin": chance.choice((0.0, 0.2)),
        "accumulate": chance.choice((0.0, 1.0, 4.0)), "finish": chance.choice((0.1, 1.0)),
        "publish": chance.choice((0.0, 0.5, 3.0)), "save": chance.choice((0.0, 0.3, 2.0)),
        "load": chance.choice((0.0, 1.0)), "start": chance.choice((0.0, 2.0, 6.0)), "close": chance.choice((0.0, 0.2)),
    }  # fmt: skip


# --- faults --------------------------------------------------------------------------------------------------------------


def _faults(chance: random.Random, scored: bool) -> tuple[Fault, ...]:
    sure = [_sure(chance) for _ in range(LEAST_FAULTS)]
    names = [name for name in OTHER_FAULTS if scored or KINDS[name].hook != "scorer"]
    drawn = chance.choices(names, [OTHER_FAULTS[name] for name in names], k=chance.randint(1, 5))
    others = [_other(name, chance) for name in drawn]
    for fault in [one for one in others if one.kind in FAILED_STARTS_AFTER and chance.random() < 0.2]:
        role = "env" if "host" in fault.kind else "train" if "trainer" in fault.kind else "mixed"
        kind = chance.choice(("start_fails", "start_hangs"))
        others.append(Fault(kind=kind, call=role, nth=chance.randint(1, 3)))
    return tuple(sure + others)


def _sure(chance: random.Random) -> Fault:
    kind = chance.choice(SURE_FAULTS)
    call = chance.choice(("open", "reset", "step", "step")) if KINDS[kind].hook == "env" else "generate"
    return Fault(kind=kind, call=call, nth=chance.randrange(SURE_BEFORE), seconds=_seconds(kind, chance))


def _other(kind: str, chance: random.Random) -> Fault:
    call = chance.choice(KINDS[kind].calls)
    nth = {
        "env": 80, "engine": 160 if call == "generate" else 8, "scorer": 30, "trainer": 5, "start": 4, "save": 5,
        "event": 3 if call else 1400,
    }[KINDS[kind].hook]  # fmt: skip
    return Fault(kind=kind, call=call, nth=chance.randrange(nth), seconds=_seconds(kind, chance))


def _seconds(kind: str, chance: random.Random) -> float:
    if kind in ("env_slow", "scorer_slow"):
        return chance.choice((1.0, 4.0, 20.0, 100.0))
    if KINDS[kind].hook == "event":
        return chance.choice((0.0, 0.0, 0.0, 0.2, 1.0, 3.0))
    return 0.0
