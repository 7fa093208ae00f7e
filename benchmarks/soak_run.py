"""One run under observation: its driver, its log as it grows, and every process that it ever had."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rollart.runtime.follow import COMMAND, Following, family, working_in

LOOK_S = 0.05
END_S = 900.0
"""A run that is told to end writes summary, report and timeline from its log, which may be of many hundred MB."""
GONE_S = 30.0
"""How long after its command a run's processes may still be there."""
TAIL_CHARS = 3000
INTERRUPTED = 130

CONFIG = """
base: smoke
name: {name}
output_dir: .
schedule: {{steps: 1000000, batch: 24, group_size: 4, max_staleness: 1}}
tasks:
  trouble:
    env: {{kind: python, entry: "rollart.runtime.envs.faulty:Faulty", kwargs: {trouble}}}
    size: 1000
    max_turns: 3
    max_tokens: 2
engine: {{count: {workers}}}
envs: {{hosts: {workers}}}
trainer: {{ranks: {ranks}}}
optimizer: {{lr: {lr}}}
checkpoint: {{every: 5}}
baselines: {{episodes: 4}}
warm_start: {{steps: 1}}
eval: {{episodes: 0}}
deadlines: {{env_open_s: 10, env_step_s: {env_step_s}, turn_s: 60, trajectory_s: 120, train_s: 120}}
"""
"""Two tasks of `smoke` and one that makes trouble; more steps than any soak sees."""


class SoakFailed(Exception):
    """The run did what it must not do; the message says what, and how its output ends."""


def _interruptible() -> None:
    """A shell starts background jobs deaf to Ctrl-C, and what they start inherits it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Run:
    """A run in a folder of its own: every process that it starts works there, so what is left of it can be found."""

    def __init__(self, folder: Path, name: str, **values: object) -> None:
        self.folder = folder
        self.name = name
        self.folder.mkdir(parents=True)
        (folder / "soak.yaml").write_text(CONFIG.format(name=name, **values), encoding="utf-8")
        self.path = folder / name / "events.jsonl"
        self.log = Following(self.path)
        self.output = folder / "output.txt"
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._run("train", "soak.yaml", "--profile", "none")

    def resume(self) -> None:
        self._run("resume", self.name)

    def _run(self, *words: str) -> None:
        with self.output.open("ab") as output:
            self.driver = subprocess.Popen(
                [*COMMAND, *words, "--plain"], stdout=output, stderr=subprocess.STDOUT, cwd=self.folder,
                preexec_fn=_interruptible,  # noqa: PLW1509 (this program has no threads)
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self.driver is not None
        return self.driver.pid

    def events(self) -> list[dict[str, Any]]:
        """What is new in the log. Raises SoakFailed when the driver has ended by itself."""
        assert self.driver is not None
        if self.driver.poll() is not None:
            raise SoakFailed(f"the driver ended by itself with exit code {self.driver.returncode}{self.tail()}")
        return self.log.events()

    def wait_for(self, *kinds: str, within_s: float, what: str) -> list[float]:
        """Wait for events of these kinds, one after another; when each was seen. Raises SoakFailed."""
        until, seen = time.monotonic() + within_s, list[float]()
        while True:
            for event in self.events():
                if event["kind"] == kinds[len(seen)]:
                    seen.append(time.monotonic())
                    if len(seen) == len(kinds):
                        return seen
            if time.monotonic() > until:
                raise SoakFailed(f"{what}: no {kinds[len(seen)]} event within {within_s:g} s{self.tail()}")
            time.sleep(LOOK_S)

    def processes(self) -> list[psutil.Process]:
        return family(self.pid)

    def kill_driver(self) -> None:
        assert self.driver is not None
        self.driver.send_signal(signal.SIGKILL)
        self.driver.wait()

    def stop(self) -> list[str]:
        """End the run as a user would with Ctrl-C; command lines of what it left. Raises SoakFailed."""
        assert self.driver is not None
        self.driver.send_signal(signal.SIGINT)
        try:
            code = self.driver.wait(timeout=END_S)
        except subprocess.TimeoutExpired as expired:
            raise SoakFailed(f"the driver did not end within {END_S:g} s of Ctrl-C{self.tail()}") from expired
        if code != INTERRUPTED:
            raise SoakFailed(f"after Ctrl-C the driver ended with exit code {code}, not {INTERRUPTED}{self.tail()}")
        return working_in(self.folder, GONE_S)

    def tail(self) -> str:
        text = self.output.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].rstrip()
        return f"; its output ({self.output}) ends in\n{text}"

    def end(self) -> None:
        """Leave nothing behind, however the soak ended."""
        if self.driver is None:
            return
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.driver.kill()
        self.driver.wait()


@contextmanager
def running(folder: Path, name: str, **values: object) -> Iterator[Run]:
    """A started run; ended for sure."""
    run = Run(folder, name, **values)
    try:
        run.start()
        run.wait_for("step_finished", within_s=180, what="start")
        yield run
    finally:
        run.end()
