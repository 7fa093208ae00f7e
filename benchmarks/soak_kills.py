"""Phase 1 of the soak: real kills of real processes, role by role, and how long the run takes to recover from each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from rollart.config.load import load_file
from rollart.control.instances import Cursor
from rollart.observe.audit import audit
from rollart.observe.audit_record import Record
from rollart.observe.log import read_events
from rollart.runtime.consumed import account, faults
from rollart.runtime.envs.tasks import task_specs
from rollart.runtime.follow import Following, actors_of
from rollart.runtime.tokenizers import build_tokenizer
from soak_run import Run, SoakFailed, running

Role = Literal["host", "engine", "trainer", "driver"]
ROLES: tuple[Role, ...] = ("host", "engine", "trainer", "driver")
ACTORS: Mapping[Role, str] = {"host": "EnvHostActor", "engine": "EngineActor", "trainer": "TrainerActor"}
RECOVERY: Mapping[Role, tuple[str, str]] = {
    "host": ("host_lost", "host_joined"),
    "engine": ("engine_lost", "engine_joined"),
    "trainer": ("trainer_lost", "trainer_restarted"),
    "driver": ("resumed", "step_finished"),
}
"""Events by which a loss is seen and mended; a driver's is mended when it has trained again."""
RECOVER_S = 180.0
LEAST_S, MOST_S = 0.3, 4.0
"""Between a recovery and the next kill."""
TROUBLE = "{slow: 0.2, slow_s: 0.2, spawns: 0.05}"
"""Slow calls, so that trajectories live when something dies, and child processes, which must die with their host."""

Say = Callable[[str], None]


class Kill(NamedTuple):
    role: Role
    at_s: float
    """Since the first step of the run."""
    told_s: float
    """From the kill to the event that says so; of a driver, from its kill to `resumed`."""
    recovered_s: float
    """From the kill to the recovery, as the log shows it (written every 0.2 s)."""
    trained_s: float
    """From the kill to the end of the next step after the recovery."""


class Survived(NamedTuple):
    kills: list[Kill]
    wrong: list[str]
    steps: int
    groups: int


def roles(n: int, chance: random.Random) -> Iterator[Role]:
    """`n` roles: each once in every four, in random order."""
    for start in range(0, n, len(ROLES)):
        yield from chance.sample(ROLES, len(ROLES))[: n - start]


def survive(folder: Path, n: int, *, seed: int, workers: int, say: Say) -> Survived:
    """Kill `n` processes of one run with `workers` of each role, wait for its recovery from each, look through its log."""
    chance = random.Random(seed)
    with running(folder, "kills", trouble=TROUBLE, workers=workers, ranks=workers, lr=1e-3, env_step_s=10) as run:
        began = time.monotonic()
        kills: list[Kill] = []
        for number, role in enumerate(roles(n, chance), start=1):
            _idle(run, chance.uniform(LEAST_S, MOST_S))
            at_s = time.monotonic() - began
            kills.append(Kill(role, at_s, *_kill(run, role, chance)))
            last = kills[-1]
            say(
                f"kill {number} of {n}: {role}, recovered after {last.recovered_s:.1f} s, trains after {last.trained_s:.1f} s"
            )
        left = run.stop()
        return looked_through(run, kills, left)


def _idle(run: Run, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (rest := until - time.monotonic()) > 0:
        run.events()
        time.sleep(min(rest, 0.1))


def _kill(run: Run, role: Role, chance: random.Random) -> tuple[float, float, float]:
    if role == "driver":
        run.kill_driver()
        killed = time.monotonic()
        run.resume()
    else:
        victims = actors_of(run.processes(), ACTORS[role])
        if not victims:
            raise SoakFailed(f"no process of {ACTORS[role]} was found{run.tail()}")
        victim = chance.choice(sorted(victims, key=lambda process: process.pid))
        victim.kill()
        killed = time.monotonic()
    kinds = RECOVERY[role]
    seen = run.wait_for(
        *kinds,
        *(() if role == "driver" else ("step_finished",)),
        within_s=RECOVER_S,
        what=f"after the kill of a {role}",
    )
    return seen[0] - killed, seen[1] - killed, seen[-1] - killed


def looked_through(run: Run, kills: list[Kill], left: list[str]) -> Survived:
    """Every promise that the log breaks, what was taken back included where the promise is about that."""
    config = load_file(run.path.parent / "config.yaml").config
    specs = {spec.name: spec for spec in task_specs(config, build_tokenizer(config.tokenizer))}

    def order(task: str, epoch: int) -> list[int]:
        cursor = Cursor(specs[task], config.seed, epoch=epoch)
        return [cursor.next().index for _ in specs[task].train]

    log = Following(run.path).events()
    found = account(read_events(run.path)[1])
    wrong = audit(Record(log=log, order=order, min_members=config.failure.min_group_size))
    wrong += faults(found, tuple(specs.values()), config.seed)
    if found.steps != tuple(range(len(found.steps))):
        wrong.append(f"the {len(found.steps)} finished steps are not 0, 1, 2, ..: a step is missing")
    wrong += [f"a process was left: {one}" for one in left]
    return Survived(kills, wrong, len(found.steps), len(found.issued))


def table(kills: list[Kill]) -> list[str]:
    """Markdown: time to recover per role."""
    lines = [
        "| role | kills | recovered, median s | max s | trains again, median s | max s |",
        "|---|---|---|---|---|---|",
    ]
    for role in ROLES:
        ours = [kill for kill in kills if kill.role == role]
        if ours:
            recovered, trained = [kill.recovered_s for kill in ours], [kill.trained_s for kill in ours]
            lines.append(
                f"| {role} | {len(ours)} | {statistics.median(recovered):.1f} | {max(recovered):.1f} "
                f"| {statistics.median(trained):.1f} | {max(trained):.1f} |"
            )
    return lines
