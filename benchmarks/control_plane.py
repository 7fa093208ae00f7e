"""Cost of the control process: turn decisions a second and lag of its loop with 10,000 live trajectories, against the same
control code with 100; engines, environments and trainer are fakes that answer at once over the same exchange as real ones.

    python benchmarks/control_plane.py --json FILE

A decision is one turn: routed, sent, answered, counted in the ledger, recorded, and its environment stepped; opening,
grouping, release, training and publishing of what the turns add up to are in its cost. Measured in a window after all
trajectories live; CPU time of the process over the decisions in it, wall time for the rate, and the lateness of a timer
that is due every 5 ms for the lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rollart
from rollart.config.schema import RunConfig
from rollart.control.exchange import Exchange
from rollart.control.garbage import spare_the_loop
from rollart.control.run import run
from rollart.control.weights import VersionBook
from rollart.core.resources import Change, Degrees, EngineInfo, Lease, Limits
from rollart.core.seeds import seed_of
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Fingerprint,
    Generation,
    Live,
    Manifest,
    Observation,
    Purpose,
    RequestId,
    Role,
    Sample,
    Span,
    TaskInstance,
    TaskSpec,
    Tokens,
    Trajectory,
    TrajId,
    TurnFn,
    TurnRequest,
    Version,
)
from rollart.ports import Port, World

LIVE, FEW = 10_000, 100
GROUP_SIZE = 8
FEWEST_TURNS, MOST_TURNS = 5, 35
"""Of a group's trajectories: groups must not end together, or all batches would be opened and trained as one."""
TURN_TOKENS = 8
ENGINES = 4
TICK_S = 0.005
"""Period of the timer whose lateness is the lag."""
WARM_UP_TURNS = 25
"""Turns per live trajectory before the window opens: batches are trained and trajectories are out of step by then."""
TARGETS = {"decisions_per_s": 4000.0, "p99_lag_ms": 25.0, "cost_ratio": 1.5}

PROMPT = Observation(tokens=Tokens(n_tokens=32))
STEPPED = Observation(tokens=Tokens(n_tokens=16), reward=0.0)
FINGERPRINT = Fingerprint(digest="fake")


# --- fakes that answer in the next turn of the loop -----------------------------------------------------------------------


class FakeEngine:
    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._version = info.version
        self._sampled: dict[Purpose, int] = {}
        self._inbox: list[tuple[RequestId, Generation]] = []
        self._exchange: Exchange[RequestId, Generation] = Exchange(lambda request, answer: None)

    async def generate(self, request: TurnRequest) -> Generation:
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._poll)
        tokens = Tokens(n_tokens=TURN_TOKENS, spans=(Span(version=self._version, n_tokens=TURN_TOKENS),))
        self._inbox.append((request.id, Generation(tokens=tokens, finish="length")))
        self._sampled[request.purpose] = self._sampled.get(request.purpose, 0) + TURN_TOKENS
        return await self._exchange.ask(request.id)

    def _poll(self) -> None:
        answers, self._inbox = self._inbox, []
        self._exchange.answer(answers)

    def book(self) -> EngineBook:
        waiting = (*self._inbox, *self._exchange.pending.items())
        return EngineBook(
            sampled=dict(self._sampled),
            live={rid: Live(n_tokens=TURN_TOKENS, oldest_version=g.tokens.spans[0].version) for rid, g in waiting},
        )

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """All of them are answered already."""

    def forget(self, traj: TrajId, attempt: int) -> None:
        """Nothing is cached."""

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        return None

    async def apply(
        self, version: Version, *, kept: Literal["rebuild", "abort"], pinned_deadline_s: float
    ) -> Applied | Failure:
        self._version = version
        return Applied(fingerprint=FINGERPRINT)

    async def limit(self, limits: Limits) -> None:
        """Nothing to limit."""

    async def sleep(self) -> None:
        """Nothing to free."""

    async def wake(self, degrees: Degrees | None = None) -> None:
        """Never asleep."""


class Call(NamedTuple):
    session: str
    seq: int


class FakeEnv:
    def __init__(self) -> None:
        self._inbox: list[tuple[Call, Observation]] = []
        self._exchange: Exchange[Call, Observation] = Exchange(lambda call, observation: None)

    async def open(
        self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float
    ) -> FakeSession | Failure:
        session = FakeSession(
            self, f"{traj}#{attempt}", seed_of(0, "turns", instance.task, instance.epoch, instance.index)
        )
        await self.ask(Call(session.name, 0), PROMPT)
        return session

    async def ask(self, call: Call, answer: Observation) -> Observation:
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._poll)
        self._inbox.append((call, answer))
        return await self._exchange.ask(call)

    def _poll(self) -> None:
        answers, self._inbox = self._inbox, []
        self._exchange.answer(answers)


class FakeSession:
    host = "host-0"

    def __init__(self, env: FakeEnv, name: str, draw: int) -> None:
        self.name = name
        self._env = env
        self._seq = 0
        self._turns = FEWEST_TURNS + draw % (MOST_TURNS - FEWEST_TURNS + 1)
        self._last = Observation(tokens=Tokens(n_tokens=0), terminated=True, reward=float(draw >> 32 & 1))

    async def reset(self, *, deadline_s: float) -> Observation | Failure:
        return await self._next(PROMPT)

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation | Failure:
        return await self._next(STEPPED if self._seq < self._turns else self._last)

    async def _next(self, answer: Observation) -> Observation:
        self._seq += 1
        return await self._env.ask(Call(self.name, self._seq), answer)

    async def run(self, turn: TurnFn) -> Trajectory | Failure:
        raise NotImplementedError("driven by reset and step")

    async def close(self) -> None:
        """Nothing is open."""


class FakeTrainer:
    async def begin(self, step: int, *, total_weight: float | None) -> None:
        """Nothing to forget."""

    async def accumulate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return {}

    async def finish(self) -> Mapping[str, float]:
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-3, "weights_changed": 1.0}

    async def logprobs(self, samples: Sequence[Sample]) -> object:
        return None

    async def publish(self, version: Version) -> Manifest:
        return Manifest(version=version, shards={"w": 1}, buckets=1, fingerprint=FINGERPRINT)

    async def resize(self, leases: Sequence[str]) -> None:
        """One rank that does nothing."""

    async def checkpoint(self, path: str, mode: Literal["save", "load"]) -> None:
        """Nothing to keep."""


class FakeCluster:
    def __init__(self) -> None:
        self._leases = 0

    async def acquire(self, role: Role, pool: str, degrees: Degrees, *, deadline_s: float) -> Lease | Failure:
        self._leases += 1
        return Lease(id=f"lease-{self._leases}", role=role, pool=pool, devices=("none",))

    async def release(self, lease: str) -> None:
        """Nothing is held."""

    async def start(self, lease: Lease) -> Port | Failure:
        if lease.role == "train":
            return FakeTrainer()
        if lease.role == "env":
            return FakeEnv()
        info = EngineInfo(
            id=lease.id, lease=lease.id, pool=lease.pool, role=lease.role, kv_tokens=1 << 30, version=-1,
            fingerprint="bitwise",
        )  # fmt: skip
        return FakeEngine(info)

    async def changes(self) -> AsyncIterator[Change]:
        await asyncio.Event().wait()
        yield Change(kind="lost", subject="nothing", role="env")


# --- the measurement ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """The run's event sink: how many turns are done and how many trajectories live."""

    turns: int = 0
    live: int = 0
    steps: int = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "turn_done":
            self.turns += 1
        elif kind == "traj_started":
            self.live += 1
        elif kind == "traj_finished":
            self.live -= 1
        elif kind == "step_finished":
            self.steps += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    decisions: int
    wall_s: float
    cpu_s: float
    lags_s: list[float] = field(repr=False)
    cpu_lags_s: list[float] = field(repr=False)
    """The same lateness in CPU time of this process: what the lag would be if nobody else used the machine."""
    live: list[int] = field(repr=False)
    steps: int

    @property
    def cost_s(self) -> float:
        return self.cpu_s / self.decisions

    @property
    def rate(self) -> float:
        return self.decisions / self.wall_s


def a_run(live: int) -> tuple[RunConfig, tuple[TaskSpec, ...]]:
    """About `live` trajectories at any time: eleven batches may be open, one of them is full when it is trained."""
    batch = live // 10 // GROUP_SIZE * GROUP_SIZE or GROUP_SIZE
    tasks = tuple(
        TaskSpec(
            name=name,
            ratio=ratio,
            train=range(1 << 16),
            max_turns=MOST_TURNS,
            max_tokens=TURN_TOKENS,
            max_context=1 << 20,
        )
        for name, ratio in (("a", 1.0), ("b", 2.0))
    )
    config = RunConfig.model_validate(
        {
            "tasks": {spec.name: {"env": {"kind": "max_digit"}, "ratio": spec.ratio} for spec in tasks},
            "schedule": {
                "steps": 1_000_000, "batch": batch, "group_size": GROUP_SIZE, "max_staleness": live // batch,
            },
            "engine": {"kind": "native", "count": ENGINES},
            "envs": {"sessions_per_host": 2 * LIVE},
            "eval": {"episodes": 0},
        }
    )  # fmt: skip
    return config, tasks


async def measured(live: int, decisions: int) -> Window:
    """Run with `live` trajectories and look at `decisions` of their turns."""
    counts, lags, cpu_lags, lives = Counts(), list[float](), list[float](), list[int]()
    config, tasks = a_run(live)
    world = World(name="fake", cluster=FakeCluster(), store=VersionBook(), tasks=tasks, sinks=(counts,))
    running = asyncio.create_task(run(config, world))
    while counts.turns < WARM_UP_TURNS * live and not running.done():  # noqa: ASYNC110 - a poll costs the run nothing
        await asyncio.sleep(TICK_S)
    first, steps, wall, cpu = counts.turns, counts.steps, time.perf_counter(), time.process_time()
    while counts.turns < first + decisions and not running.done():
        due, cpu_due = time.perf_counter() + TICK_S, time.process_time() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, time.perf_counter() - due))
        cpu_lags.append(max(0.0, time.process_time() - cpu_due))
        lives.append(counts.live)
    window = Window(
        decisions=counts.turns - first, wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu,
        lags_s=lags, cpu_lags_s=cpu_lags, live=lives, steps=counts.steps - steps,
    )  # fmt: skip
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()
    return window


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def cases(few: Window, many: Window) -> list[dict[str, Any]]:
    def case(name: str, value: float, unit: str, target: float | None = None, at_most: bool = True) -> dict[str, Any]:
        met = None if target is None else (value <= target if at_most else value >= target)
        return {"case": name, "value": round(value, 4), "unit": unit, "target": target, "met": met}

    return [
        case("turn decisions at 10,000 live", many.rate, "1/s", TARGETS["decisions_per_s"], at_most=False),
        case("P99 loop lag at 10,000 live", 1e3 * p99(many.lags_s), "ms", TARGETS["p99_lag_ms"]),
        case("cost per decision, 10,000 live over 100 live", many.cost_s / few.cost_s, "ratio", TARGETS["cost_ratio"]),
        case("CPU per decision at 10,000 live", 1e6 * many.cost_s, "us"),
        case("CPU per decision at 100 live", 1e6 * few.cost_s, "us"),
        case("turn decisions at 100 live", few.rate, "1/s"),
        case("P99 loop lag at 10,000 live, in CPU time", 1e3 * p99(many.cpu_lags_s), "ms"),
        case("longest loop lag at 10,000 live", 1e3 * max(many.lags_s), "ms"),
        case("longest loop lag at 10,000 live, in CPU time", 1e3 * max(many.cpu_lags_s), "ms"),
        case("live trajectories, mean, of 10,000", statistics.mean(many.live), "trajectories"),
        case("live trajectories, mean, of 100", statistics.mean(few.live), "trajectories"),
        case("batches trained in the window at 10,000 live", many.steps, "batches"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--decisions", type=int, default=100_000, help="turns in each window (default: %(default)s)")
    options = parser.parse_args()
    spare_the_loop()
    few = asyncio.run(measured(FEW, options.decisions))
    many = asyncio.run(measured(LIVE, options.decisions))
    figures = cases(few, many)
    report = {
        "name": "control_plane",
        "cases": figures,
        "versions": {"python": platform.python_version(), "rollart": rollart.__version__},
    }
    for case in figures:
        target = "" if case["target"] is None else f"  target {case['target']:g}  {'met' if case['met'] else 'MISSED'}"
        print(f"{case['case']:48} {case['value']:12.2f} {case['unit']}{target}")  # noqa: T201
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
