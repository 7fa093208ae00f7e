"""The peer as a process that waits between its measurements, and what is measured of both sides in one case of `vs_trl.py`.

Invariant: the sides take turns on the same cores; while one is measured, the other waits for its input or is not there.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers_figures import Bounds, Rate, Step, fastest, least_steps, median_rate, rate
from peers_run import (
    ALPHABET,
    AT_ONCE,
    HERE,
    ONE_CORE_EACH,
    TAKING_TURNS,
    TASKS,
    PeerFailed,
    Ran,
    Say,
    Setting,
    Workers,
    measured,
    pinned,
    run,
    task_config,
    told,
    window_s,
    with_tasks,
)

DONE = "outcome written"
CACHES = ("dynamic", "static")
SWEEP_S = 6.0
"""Of each setting of a sweep, after its warm-up."""
PEER_SWEEP_STEPS, PEER_STEPS = 3, 5
"""The least that the peer makes after its warm-up, in a sweep and in a measurement."""
OVERLAPPED = 0.85
"""Share of the bound that overlapping reaches at least (`async_vs_sync.py`), for how long our steps take."""
ALONE_BOUNDS = 1
"""Up to this max_staleness rollout alone, measured with one batch in flight, is still told as the bound's R."""
BOUNDS_ARE = (
    "rollout and training alone at max_staleness 0, where a batch waits for its last trajectory: no bound for a case in which "
    "more are in flight to wait at once (`bound` is null), and for the others R with a tail that max_staleness 1 hides. "
    "`cores_busy`: the ratio that the CPU time of our arm in this very case would make if it kept all cores busy"
)
LAST = 0.2
"""Share of the wall time, at its end, over which a reward is the mean."""


Rewards = Sequence[tuple[float, float]]
"""(seconds since the training began, mean reward of a batch or group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """One measurement of the peer."""

    rate: Rate
    rewards: Rewards
    tokens: float
    cpu_s: float
    versions: Mapping[str, str]


class Peer:
    """The peer's process on the cores of the setting; `measure` blocks until it is done."""

    def __init__(self, process: subprocess.Popen[str], setting: Setting, output: Path) -> None:
        self._process = process
        self._setting = setting
        self._output = output

    def measure(
        self, task: str, settings: Sequence[Mapping[str, Any]], *, seed: int = 0, seconds: float | None = None,
        least: int = PEER_STEPS,
    ) -> list[Theirs]:  # fmt: skip
        """One measurement per setting. Raises PeerFailed."""
        path = self._setting.scratch / "job.json"
        outcome = self._setting.scratch / "outcome.json"
        wanted = TASKS[task]
        path.write_text(json.dumps({
            "task": wanted.env.lower(), "model": str(self._setting.model), "alphabet": ALPHABET,
            "seeds": problems(task), "turns": wanted.turns, "turn_tokens": wanted.turn_tokens,
            "latency_s": wanted.kwargs.get("latency_s", 0.0), "spread_s": wanted.kwargs.get("spread_s", 0.0),
            "lr": self._setting.lr, "beta2": self._setting.beta2, "seed": seed, "warm_up": self._setting.warm_up,
            "seconds": self._setting.seconds if seconds is None else seconds, "least": least,
            "settings": list(settings),
            "outcome": str(outcome),
        }), encoding="utf-8")  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.strip() == DONE:
                return _read(json.loads(outcome.read_text(encoding="utf-8")), self._setting.warm_up)
        raise PeerFailed(f"{task}: the peer ended with {self._process.wait()}{told(self._output)}")


def _read(outcome: Mapping[str, Any], warm_up: int) -> list[Theirs]:
    found = []
    for index, times in enumerate(outcome["steps"]):
        steps, began_s = [Step(*one) for one in times], outcome["began"][index]
        ended = [step.finished_s - began_s for step in steps]
        found.append(
            Theirs(
                rate=rate(steps, warm_up), tokens=statistics.mean(outcome["tokens"]),
                rewards=list(zip(ended, outcome["rewards"][index], strict=False)), cpu_s=outcome["cpu_s"],
                versions=outcome["versions"],
            )
        )  # fmt: skip
    return found


def problems(task: str) -> list[int]:
    """Seeds of the problems that our side trains on."""
    from rollart.config.schema import TaskConfig
    from rollart.runtime.envs.tasks import instances

    return list(instances(task, TaskConfig.model_validate(task_config(TASKS[task]))).train)


@contextmanager
def peer(python: Path, setting: Setting) -> Iterator[Peer]:
    """The peer's process, ended for sure."""
    output = setting.scratch / "peer.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            pinned([str(python), str(HERE / "vs_trl_peer.py")], setting.cores), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=file, env=_peer_env(), text=True, cwd=setting.scratch,
        )  # fmt: skip
    try:
        yield Peer(process, setting, output)
    finally:
        process.kill()
        process.wait()


def _peer_env() -> dict[str, str]:
    """The tasks and their session are ours on both sides."""
    env = with_tasks()
    return {
        **env, "PYTHONPATH": f"{env['PYTHONPATH']}:{HERE.parent / 'src'}", "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


# --- one case ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Case:
    """All that was measured of one task."""

    task: str
    ours: list[Ran] = field(default_factory=list)
    theirs: list[Theirs] = field(default_factory=list)
    sync: list[Ran] = field(default_factory=list)
    """Of the first pairs."""
    alone: Bounds | None = None
    workers: Workers = ONE_CORE_EACH
    sync_workers: Workers = TAKING_TURNS[0]
    seconds: float = 0.0
    """Of each measurement of a pair."""
    cores: int = 1
    peer_setting: Mapping[str, Any] = field(default_factory=dict)
    sweeps: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured of each case."""

    python: Path
    """Of the peer's environment."""
    pairs: int
    sync_pairs: int
    """Pairs of these, the first ones, with the third arm."""
    sweep: bool
    """Sweep the workers of our asynchronous arm too; those of the synchronous one always are."""
    peer_threads: Sequence[int]
    """torch threads that the peer is swept over, each with every cache."""


def measure(task: str, plan: Plan, setting: Setting, say: Say) -> Case:
    """Sweeps, each part alone, then interleaved pairs. Raises PeerFailed."""
    case, staleness = Case(task=task, cores=len(setting.cores)), TASKS[task].staleness
    with peer(plan.python, setting) as theirs:
        case.peer_setting, case.sweeps["theirs"] = swept_peer(theirs, task, plan.peer_threads)
        say(f"{task}: the peer is fastest with {case.peer_setting}: {case.sweeps['theirs']}")
        if plan.sweep:
            case.workers, case.sweeps["ours"] = swept_workers(task, AT_ONCE, setting, staleness=staleness)
            say(f"{task}: ours is fastest with {case.workers.name}: {case.sweeps['ours']}")
        if plan.sync_pairs:
            case.sync_workers, case.sweeps["sync"] = swept_workers(task, TAKING_TURNS, setting, staleness=0)
            say(f"{task}: synchronous with {case.sync_workers.name}: {case.sweeps['sync']}")
        case.alone = alone(task, setting)
        case.seconds = seconds_of(setting.seconds, staleness, case.alone)
        for pair in range(plan.pairs):
            for arm in turns(pair, with_sync=pair < plan.sync_pairs):
                if arm == "ours":
                    ran = measured(task, case.workers, setting, staleness=staleness, seed=pair, seconds=case.seconds)
                    case.ours.append(ran)
                elif arm == "theirs":
                    case.theirs += theirs.measure(task, [case.peer_setting], seed=pair, seconds=case.seconds)
                else:
                    case.sync.append(taking_turns(task, case.sync_workers, setting, seed=pair))
            one, other = case.ours[-1].rate, case.theirs[-1].rate
            say(
                f"{task} pair {pair}: {one.per_s:.1f} to {other.per_s:.1f} trajectories/s, {one.per_s / other.per_s:.3f}"
            )
    return case


def turns(pair: int, *, with_sync: bool) -> tuple[str, ...]:
    """The arms of a pair in their order: what is first in one is last in the next, and the peer's measurement is always the
    one next to each of ours."""
    order = ("ours", "theirs", "sync") if with_sync else ("ours", "theirs")
    return order[:: -1 if pair % 2 else 1]


def seconds_of(asked_s: float, max_staleness: int, alone: Bounds) -> float:
    """Seconds of each measurement of a pair, the same for both sides: as asked for, or as long as our steps will take by
    what each part takes alone."""
    return max(asked_s, least_steps(max_staleness) * max(alone.rollout_s, alone.train_s) / OVERLAPPED)


def swept_peer(theirs: Peer, task: str, threads: Sequence[int]) -> tuple[Mapping[str, Any], dict[str, float]]:
    """The setting in which the peer trains most, and what each trained a second."""
    settings = [{"threads": number, "cache": cache} for number in threads for cache in CACHES]
    swept = theirs.measure(task, settings, seconds=SWEEP_S, least=PEER_SWEEP_STEPS)
    rates = {_name(one): found.rate for one, found in zip(settings, swept, strict=True)}
    best = fastest(rates)
    return next(one for one in settings if _name(one) == best), _told(rates)


def _name(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def alone(task: str, setting: Setting) -> Bounds:
    """Rollout and training by themselves, each on one core while the other waits: at max_staleness 0."""
    found = taking_turns(task, ONE_CORE_EACH, setting).rate
    return Bounds(found.rollout_s, found.train_s)


def taking_turns(task: str, workers: Workers, setting: Setting, *, seed: int = 0) -> Ran:
    """A synchronous measurement: nothing is sampled ahead, so its window need not be that of the asynchronous arm."""
    return measured(task, workers, setting, staleness=0, seed=seed, seconds=window_s(task, 0))


def swept_workers(
    task: str, candidates: Sequence[Workers], setting: Setting, *, staleness: int
) -> tuple[Workers, dict[str, float]]:
    """The fastest of some worker settings, and what each trained a second."""
    found = {
        one.name: run(task, one, setting, staleness=staleness, seconds=SWEEP_S).rate for one in candidates
    }  # fmt: skip
    best = fastest(found)
    return next(one for one in candidates if one.name == best), _told(found)


def _told(rates: Mapping[str, Rate]) -> dict[str, float]:
    return {name: round(one.per_s, 3) for name, one in rates.items()}


def figures(case: Case) -> dict[str, Any]:
    """The sides of a case as the JSON has them."""
    assert case.alone is not None
    ours, theirs = median_rate([one.rate for one in case.ours]), median_rate([one.rate for one in case.theirs])
    staleness, busy = TASKS[case.task].staleness, statistics.median(one.cpu.busy_of(case.cores) for one in case.ours)
    bounds = {**case.alone.row(theirs.step_s), "cores_busy": round(theirs.step_s / (ours.step_s * busy), 4)}
    sync: dict[str, Any] = {}
    if case.sync:
        ratios = [one.rate.per_s / other.rate.per_s for one, other in zip(case.sync, case.theirs, strict=False)]
        sync = {
            **median_rate([one.rate for one in case.sync]).row(), "workers": dataclasses.asdict(case.sync_workers),
            "ratio_median": round(statistics.median(ratios), 4),
        }  # fmt: skip
    return {
        "ours": {
            **ours.row(), "workers": dataclasses.asdict(case.workers), "max_staleness": staleness,
            "tokens_per_trajectory": round(statistics.mean(one.tokens for one in case.ours), 2),
            "overhead_of_cpu": round(statistics.median(one.cpu.overhead for one in case.ours), 4),
            "busy_of_cores": round(busy, 4),
            "sampled_over_trained": round(statistics.median(one.sampled_over_trained for one in case.ours), 4),
            "sampled_over_trained_of": [round(one.sampled_over_trained, 4) for one in case.ours],
        },
        "theirs": {
            **theirs.row(), **case.peer_setting,
            "tokens_per_trajectory": round(statistics.mean(one.tokens for one in case.theirs), 2),
        },
        "sync": sync, "bound": bounds["one_core_each"] if staleness <= ALONE_BOUNDS else None, "bounds": bounds,
        "bounds_are": BOUNDS_ARE, "window_s": round(case.seconds, 2), "sweeps": case.sweeps,
        "peer_versions": case.theirs[-1].versions,
    }  # fmt: skip


# --- reward after equal wall time ----------------------------------------------------------------------------------------


def over_time(rewards: Rewards, wall_s: float, parts: int = 10) -> list[float | None]:
    """Mean of the rewards in each of equal parts of `wall_s`; None where no batch ended."""
    found: list[list[float]] = [[] for _ in range(parts)]
    for at_s, reward in rewards:
        if at_s <= wall_s:
            found[min(parts - 1, int(at_s / wall_s * parts))].append(reward)
    return [round(statistics.mean(part), 4) if part else None for part in found]


def last_reward(rewards: Rewards, wall_s: float) -> float:
    """Mean of the rewards in the last part of `wall_s`. Raises PeerFailed when there is none."""
    late = [reward for at_s, reward in rewards if (1 - LAST) * wall_s <= at_s <= wall_s]
    if not late:
        raise PeerFailed(f"no batch ended in the last {LAST:.0%} of {wall_s:g} s; learn for longer")
    return statistics.mean(late)
