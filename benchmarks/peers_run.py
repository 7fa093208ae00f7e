"""One run of ours for a measurement: `rollart train` on a local Ray, on some cores only, watched from outside by its log.

Invariant: what is read is the run's own event log and the CPU time of its processes; the run does not know that it is
measured, and nothing of it is left when it has been.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from peers_figures import Event, Rate, Step, least_steps, rate, sampled_over_trained, steps_of, warm_up_steps
from peers_tasks import LAKE_TURN_TOKENS, LAKE_TURNS, TURN_TOKENS
from rollart.runtime.follow import COMMAND, Following, family

HERE = Path(__file__).resolve().parent
BATCH, GROUP = 64, 8
ALPHABET = "".join(map(chr, range(32, 127))) + "\n" + "".join(map(chr, range(0x100, 0x100 + 415)))
"""511 characters, so that with the padding the vocabulary has 512 ids, as the model of 0.92 M parameters is measured with."""
MODEL = {
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 344,
    "max_positions": 512,
    "tie_embeddings": False,
}
INSTANCES = 256
LOOK_S = 0.25
"""Between two looks at a run: the watcher must not be what costs CPU time."""
START_S = 600.0
"""Until the warm-up is over, on a machine that is shared by many."""
END_S = 120.0
LEAST_STEPS = 3
"""After the warm-up, however short the time is; a measurement has `least_steps` of its max_staleness."""
OURS_AROUND_S = 24.0
"""Assumed for start, warm-up and end of one run, when the time that a benchmark takes is worked out beforehand."""
STARTS, NO_RAY = 4, "Ray did not start"
"""How often a run is begun that ends with these words before its first event."""
TAIL_CHARS = 3000
WANTED = tuple(
    f'"kind":"{kind}"'.encode() for kind in ("batch_released", "step_finished", "traj_finished", "group_completed", "published")
)  # fmt: skip
ROLES = {"EngineActor": "engines", "TrainerActor": "trainer", "EnvHostActor": "env hosts"}

Say = Callable[[str], None]


class PeerFailed(Exception):
    """A side did not do its work; the message says what, and how its output ends."""


class _NoRay(PeerFailed):
    """Nothing was measured: the machine was too busy for Ray's processes to find each other in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of `peers_tasks` as a run trains it."""

    env: str
    turns: int
    turn_tokens: int
    step_s: float
    """Of our asynchronous arm on two cores, as measured; from it times are worked out beforehand, and nothing else: a run
    that is slower goes on until it has its steps."""
    staleness: int = 1
    """max_staleness of our asynchronous arm."""
    kwargs: Mapping[str, float] = field(default_factory=dict)


LATENCY_S = SPREAD_S = 0.05
"""Of a step of an environment: 50 +- 50 ms."""
TASKS: Mapping[str, Task] = {
    "single": Task(env="Letters", turns=1, turn_tokens=TURN_TOKENS, step_s=0.4),
    "multi": Task(env="Lake", turns=LAKE_TURNS, turn_tokens=LAKE_TURN_TOKENS, step_s=0.72),
    "latency": Task(
        env="Lake", turns=LAKE_TURNS, turn_tokens=LAKE_TURN_TOKENS, step_s=0.77, staleness=3,
        kwargs={"latency_s": LATENCY_S, "spread_s": SPREAD_S},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Who does the work of a run, all on the same cores."""

    engines: int = 1
    engine_threads: int = 1
    trainer_threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.engines} engine x {self.engine_threads} thread, trainer x {self.trainer_threads}"


ONE_CORE_EACH = Workers()
TAKING_TURNS = (
    Workers(engines=1, engine_threads=2, trainer_threads=2),
    Workers(engines=2, engine_threads=1, trainer_threads=2),
    Workers(engines=1, engine_threads=1, trainer_threads=2),
)
"""What a synchronous run is swept over: nothing overlaps, so each part may have all cores."""
AT_ONCE = (ONE_CORE_EACH, Workers(engines=2, trainer_threads=1), Workers(engines=2, trainer_threads=2))
"""What an asynchronous run is swept over: with more threads than cores the system moves work between the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every run of one benchmark has in common."""

    scratch: Path
    model: Path
    """Folder of the initial weights, the same for all sides."""
    cores: Sequence[int]
    seconds: float
    """Measured after the warm-up."""
    warm_up: int = 2
    """Steps; ours are at least `warm_up_steps` of the run's max_staleness."""
    lr: float = 1e-5
    """So small that the policy, and with it the length of what is sampled, stays the same for all that is measured."""
    beta2: float = 0.95


class Cpu(NamedTuple):
    """CPU seconds of a run's processes while it was measured."""

    by_role: Mapping[str, float]
    wall_s: float
    """Between the two looks at the processes."""

    def busy_of(self, cores: int) -> float:
        """Share of the time of so many cores."""
        return sum(self.by_role.values()) / (cores * self.wall_s)

    @property
    def overhead(self) -> float:
        """Share of the driver and of Ray's own processes."""
        return (self.by_role.get("driver", 0.0) + self.by_role.get("ray", 0.0)) / sum(self.by_role.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    rate: Rate
    cpu: Cpu
    steps: Sequence[Step]
    rewards: Sequence[tuple[float, float]]
    """(seconds, mean reward) of each completed group, since the first weights were served."""
    tokens: float
    """Mean sampled tokens of a trained trajectory."""
    sampled_over_trained: float


def window_s(task: str, max_staleness: int) -> float:
    """The least seconds of a measurement, worked out beforehand; taking turns, rollout and training add up."""
    return least_steps(max_staleness) * TASKS[task].step_s * (1 if max_staleness else 2)


def task_config(task: Task) -> dict[str, Any]:
    """One task of a configuration."""
    return {
        "env": {"kind": "python", "entry": f"peers_tasks:{task.env}", "kwargs": dict(task.kwargs)},
        "size": INSTANCES, "max_turns": task.turns, "max_tokens": task.turn_tokens,
    }  # fmt: skip


def config(task: str, workers: Workers, setting: Setting, *, staleness: int, seed: int) -> dict[str, Any]:
    """The configuration of one run; it is ended from outside, so it has more steps than any measurement sees."""
    return {
        "name": "run", "output_dir": ".", "seed": seed,
        "model": {"kind": "pretrained", "path": str(setting.model)},
        "tokenizer": {"kind": "chars", "alphabet": ALPHABET},
        "tasks": {task: task_config(TASKS[task])},
        "schedule": {"steps": 1_000_000, "batch": BATCH, "group_size": GROUP, "max_staleness": staleness},
        "optimizer": {"lr": setting.lr, "beta2": setting.beta2},
        "engine": {"kind": "native", "count": workers.engines, "threads": workers.engine_threads},
        "trainer": {"threads": workers.trainer_threads},
        "baselines": {"episodes": 1}, "warm_start": {"steps": 0}, "eval": {"episodes": 0}, "checkpoint": {"every": 0},
    }  # fmt: skip


def save_weights(folder: Path) -> Path:
    """The initial weights that every side begins with."""
    from rollart.config.schema import CharsTokenizer, ScratchModel
    from rollart.runtime.models import build_model, hf_config
    from rollart.runtime.tokenizers import build_tokenizer

    vocab_size = build_tokenizer(CharsTokenizer(alphabet=ALPHABET)).vocab_size
    build_model(hf_config(ScratchModel(**MODEL), vocab_size), seed=0).save_pretrained(folder)
    return folder


def run(
    task: str, workers: Workers, setting: Setting, *, staleness: int, seed: int = 0, seconds: float | None = None,
    least: int = LEAST_STEPS,
) -> Ran:  # fmt: skip
    """Train for `seconds` and at least so many steps after the warm-up. Raises PeerFailed; a run whose Ray does not come up
    is started again first."""
    wanted_s = setting.seconds if seconds is None else seconds
    for _ in range(STARTS - 1):
        with suppress(_NoRay):
            return _run(task, workers, setting, staleness=staleness, seed=seed, wanted_s=wanted_s, least=least)
    return _run(task, workers, setting, staleness=staleness, seed=seed, wanted_s=wanted_s, least=least)


def measured(
    task: str, workers: Workers, setting: Setting, *, staleness: int, seed: int = 0, seconds: float | None = None
) -> Ran:
    """`run` with the steps that a measurement takes."""
    least = least_steps(staleness)
    return run(task, workers, setting, staleness=staleness, seed=seed, seconds=seconds, least=least)


def _run(
    task: str, workers: Workers, setting: Setting, *, staleness: int, seed: int, wanted_s: float, least: int
) -> Ran:
    warm_up = max(setting.warm_up, warm_up_steps(staleness))
    values = config(task, workers, setting, staleness=staleness, seed=seed)
    with _started(values, setting) as (process, log, tail):
        events: list[Event] = []
        until, before, looked_s = time.monotonic() + START_S, dict[int, tuple[str, float]](), 0.0
        while True:
            events += [json.loads(line) for line in log.lines() if any(kind in line for kind in WANTED)]
            steps = steps_of(events)
            if len(steps) >= warm_up and not before:
                before, looked_s = _cpu_times(process.pid), time.monotonic()
                until = looked_s + START_S + 20 * wanted_s
            if over(steps, warm_up, wanted_s, least):
                break
            if process.poll() is not None or time.monotonic() > until:
                why = "did not come to its steps" if process.returncode is None else f"ended with {process.returncode}"
                output = tail()
                failed = _NoRay if not events and NO_RAY in output else PeerFailed
                raise failed(f"{task}, max_staleness {staleness}, {workers.name}: the run {why}{output}")
            time.sleep(LOOK_S)
        cpu = spent(before, _cpu_times(process.pid), time.monotonic() - looked_s)
    began_s = next(event["t"] for event in events if event["kind"] == "published")
    trained = [event["data"]["trained_tokens"] for event in events if event["kind"] == "step_finished"]
    return Ran(
        rate=rate(steps, warm_up), cpu=cpu, steps=steps, tokens=statistics.mean(trained) / BATCH,
        sampled_over_trained=sampled_over_trained(events, warm_up),
        rewards=[
            (one["t"] - began_s, one["data"]["reward_mean"]) for one in events if one["kind"] == "group_completed"
        ],
    )  # fmt: skip


def over(steps: Sequence[Step], warm_up: int, wanted_s: float, least: int = LEAST_STEPS) -> bool:
    """Whether enough steps were measured, for long enough."""
    if len(steps) < warm_up + least:
        return False
    return steps[-1].finished_s - steps[warm_up - 1].finished_s >= wanted_s


@contextmanager
def _started(values: Mapping[str, Any], setting: Setting) -> Iterator[tuple[subprocess.Popen[bytes], Following, Any]]:
    """A run in a folder of its own, ended as a user ends it."""
    folder = setting.scratch / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            pinned([*COMMAND, "train", "run.yaml", "--profile", "none", "--plain"], setting.cores),
            stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=with_tasks(),
            preexec_fn=_interruptible,  # noqa: PLW1509 (this program has no threads)
        )  # fmt: skip
    try:
        yield process, Following(folder / "run" / "events.jsonl"), lambda: told(output)
    finally:
        left = family(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def _interruptible() -> None:
    """A shell starts background jobs deaf to Ctrl-C, and what they start inherits it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command, and with it all that it starts, on these cores alone."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def with_tasks() -> dict[str, str]:
    """The environment of a process that finds `peers_tasks`."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def told(output: Path) -> str:
    text = output.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].rstrip()
    return f"; its output ({output}) ends in\n{text}"


# --- CPU time ------------------------------------------------------------------------------------------------------------


def role_of(words: str, *, is_driver: bool) -> str:
    """What a process of a run is, by its command line."""
    if is_driver:
        return "driver"
    return next((role for actor, role in ROLES.items() if f"ray::{actor}" in words), "ray")


def _cpu_times(pid: int) -> dict[int, tuple[str, float]]:
    """Process id -> its role and its CPU seconds so far."""
    found: dict[int, tuple[str, float]] = {}
    with suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *family(pid)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                role = role_of(" ".join(process.cmdline()), is_driver=process.pid == pid)
                found[process.pid] = (role, times.user + times.system)
    return found


def spent(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]], wall_s: float) -> Cpu:
    """CPU seconds by role between two looks, `wall_s` apart; a process that came meanwhile counts from its start."""
    total: dict[str, float] = {}
    for pid, (role, seconds) in after.items():
        total[role] = total.get(role, 0.0) + seconds - before.get(pid, ("", 0.0))[1]
    return Cpu(total, wall_s)
