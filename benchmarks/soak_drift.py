"""Phase 2 of the soak: a long run among failing environments, and whether it costs more the longer it goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from soak_run import Run, running

TROUBLE = "{raises: 0.02, hangs: 0.002, hang_s: 6, slow: 0.1, slow_s: 0.2, spawns: 0.01}"
ENV_STEP_S = 2
"""Below `hang_s`, so that a call that hangs is given up; its thread comes back later."""
SAMPLE_S = 5.0
YARDSTICK_STEPS, YARDSTICK_BYTES = 50_000, 4 << 20
FIRST = 0.1
"""Share of the run that slopes leave out: caches fill and pools grow."""

Say = Callable[[str], None]


class Reading(NamedTuple):
    """The run at one moment."""

    t_s: float
    rss_mb: float
    """Resident memory of the driver."""
    handles: int
    """Open files and sockets of the driver."""
    cpu_s: float
    """CPU time so far of all processes of the run, dead ones that were waited for included."""
    trajectories: int
    """Ended as done so far."""
    failed: int
    yardstick_s: float = 1.0
    """CPU time of a fixed computation at this moment: what else runs on the machine makes that dearer too."""


class Drift(NamedTuple):
    mb_per_min: float
    handles_per_min: float
    cpu_second_tenth_s: float
    """Per finished trajectory."""
    cpu_last_tenth_s: float
    yardstick_ratio: float
    """What the fixed computation cost in the last tenth over what it cost in the second, by the median."""

    @property
    def cpu_ratio(self) -> float:
        return self.cpu_last_tenth_s / self.cpu_second_tenth_s


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Of the straight line with the least squares. Needs two points of different x."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return float(across / sum((x - mean_x) ** 2 for x in xs))


def drift(readings: Sequence[Reading]) -> Drift:
    """Slopes over all but the first tenth; CPU time per trajectory in the last tenth and in the second one."""
    end = readings[-1].t_s
    settled = [one for one in readings if one.t_s >= FIRST * end]
    return Drift(
        60 * slope((one.t_s, one.rss_mb) for one in settled),
        60 * slope((one.t_s, one.handles) for one in settled),
        _cpu_per_trajectory(readings, 0.1 * end, 0.2 * end),
        _cpu_per_trajectory(readings, 0.9 * end, end),
        _yardstick_s(readings, 0.9 * end, end) / _yardstick_s(readings, 0.1 * end, 0.2 * end),
    )


def _yardstick_s(readings: Sequence[Reading], start_s: float, end_s: float) -> float:
    return median(one.yardstick_s for one in readings if start_s <= one.t_s <= end_s)


def yardstick_s() -> float:
    """CPU time of a fixed piece of interpreted and of compiled work, some 10 ms."""
    began = time.thread_time()
    sum(number * number for number in range(YARDSTICK_STEPS))
    hashlib.blake2b(bytes(YARDSTICK_BYTES)).digest()
    return time.thread_time() - began


def _cpu_per_trajectory(readings: Sequence[Reading], start_s: float, end_s: float) -> float:
    inside = [one for one in readings if start_s <= one.t_s <= end_s]
    first, last = inside[0], inside[-1]
    return (last.cpu_s - first.cpu_s) / (last.trajectories - first.trajectories)


def endure(folder: Path, minutes: float, say: Say) -> tuple[list[Reading], list[str]]:
    """Run for `minutes` after the first step; the readings, and what it left behind.

    The learning rate is 0: a policy that learns changes how long its trajectories are, and so what each one costs.
    """
    with running(folder, "drift", trouble=TROUBLE, workers=2, ranks=1, lr=0, env_step_s=ENV_STEP_S) as run:
        began, readings = time.monotonic(), list[Reading]()
        every_s = min(SAMPLE_S, minutes * 60 / 60)
        done = failed = 0
        run.log.lines()
        while time.monotonic() - began < minutes * 60:
            new_done, new_failed = _ended(run)
            done, failed = done + new_done, failed + new_failed
            readings.append(_read(run, time.monotonic() - began, done, failed))
            if len(readings) % 60 == 0:
                last = readings[-1]
                told = f"{last.rss_mb:.1f} MB, {last.handles} handles, {done} trajectories, {failed} failed"
                say(f"{last.t_s / 60:.1f} min: {told}")
            time.sleep(every_s)
        return readings, run.stop()


def _ended(run: Run) -> tuple[int, int]:
    """New ended attempts, (done, failed). Lines are searched, not parsed: the watcher must not be what costs CPU time."""
    if run.driver is not None and run.driver.poll() is not None:
        run.events()  # raises with what is known
    ended = [line for line in run.log.lines() if b'"kind":"traj_finished"' in line]
    return sum(b'"status":"done"' in line for line in ended), sum(b'"status":"failed"' in line for line in ended)


def _read(run: Run, t_s: float, done: int, failed: int) -> Reading:
    driver = psutil.Process(run.pid)
    cpu_s = 0.0
    for process in [driver, *run.processes()]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # of children that have ended and were waited for; those that live are in the list themselves
        cpu_s += times.user + times.system + times.children_user + times.children_system
    return Reading(t_s, driver.memory_info().rss / 2**20, driver.num_fds(), cpu_s, done, failed, yardstick_s())
