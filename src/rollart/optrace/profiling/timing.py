"""Seconds of calls on a device, as they take inside a step and not in a loop of their own.

Owns how calls are repeated. Invariant: a call finds its operands as a step leaves them: what the operator before has
written was just written, all else was last touched a round of other calls ago; nothing of its results is freed before the
round ends. On a GPU, whose queue a single call cannot fill, a call runs on changing operands that are together larger
than the cache, behind a pause that lets the host run ahead. Why: on one hot buffer a memory-bound kernel runs at the
cache's rate, which no step sees.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rollart.core.errors import ConfigError
from rollart.optrace.ops import Op
from rollart.optrace.profiling.cases import ready
from rollart.optrace.profiling.operands import Ready

CACHES = 2.0
"""Operands in turn are so many times as large as the last level of cache."""
LEAST_SETS, MOST_SETS = 2, 32
LEAST_BATCH_S, LEAST_LAUNCHES, MOST_LAUNCHES = 0.005, 5, 200
"""Of one reading of a GPU's clock, whose events are half a microsecond apart at best."""
WARM_UP = 2
"""Calls (on a CPU: rounds) that are not counted: libraries choose kernels, memory is mapped."""
SLEEP_CYCLES_PER_LAUNCH = 30_000
"""About 15 us at 2 GHz: more than a launch takes the host."""
SPREAD_OF_MAD = 1.4826
SPREAD_OF_MEDIAN = 1.2533
"""Standard deviations of a normal distribution in median absolute deviations, and of a median in those of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Median seconds of a call, the standard deviation of the median's log, and whether the operator itself was called."""

    seconds: float
    log_std: float
    exact: bool = True


Outcome = Reading | str
"""A reading, or why there is none."""


def reading(seconds: Sequence[float], exact: bool = True) -> Reading:
    """Of repeated calls. Raises ConfigError for none."""
    if not seconds:
        raise ConfigError("no repetition was timed; ask for at least one round")
    middle = statistics.median(seconds)
    logs = [math.log(max(one, 1e-9) / max(middle, 1e-9)) for one in seconds]
    spread = SPREAD_OF_MAD * statistics.median(abs(one) for one in logs)
    return Reading(
        seconds=max(middle, 1e-9), log_std=SPREAD_OF_MEDIAN * spread / math.sqrt(len(seconds)), exact=exact
    )  # fmt: skip


@contextmanager
def quiet(threads: int) -> Iterator[None]:
    """So many threads, no autograd, no collection of garbage; all as it was afterwards."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def measure(
    ops: Sequence[Op], *, device: torch.device, rounds: int, cache_bytes: float, room_bytes: float,
    ends_at: float = math.inf, clock: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:  # fmt: skip
    """Times of `ops` in their order. `room_bytes`: memory that operands may take at once; no round begins after `ends_at`.

    What torch refuses (a kernel that the device lacks, memory that it has not) is an outcome, not an error.
    """
    if device.type != "cpu":
        return [
            _on_device(op, device, rounds, cache_bytes) if clock() < ends_at else "out of time" for op in ops
        ]  # fmt: skip
    found: list[Outcome] = []
    while len(found) < len(ops):
        if clock() >= ends_at:
            return [*found, *["out of time"] * (len(ops) - len(found))]
        made, refused = _fitting(ops[len(found) :], device, room_bytes)
        sets = _sets(sum(one.held_bytes for one in made if one), cache_bytes, room_bytes)
        found += _in_rounds(
            ops[len(found) : len(found) + len(made)], made, refused, device, sets, rounds, clock, ends_at
        )
    return found


def _fitting(ops: Sequence[Op], device: torch.device, room_bytes: float) -> tuple[list[Ready | None], dict[int, str]]:
    """First sets of operands of as many of the next operators as fit (at least one), and why some have none."""
    made: list[Ready | None] = []
    refused: dict[int, str] = {}
    held = 0.0
    for at, op in enumerate(ops):
        try:
            one = ready(op, device, 0)
        except (RuntimeError, ConfigError) as error:
            refused[at] = _first_line(error)
            made.append(None)
            continue
        held += one.held_bytes
        if made and held * LEAST_SETS > room_bytes:
            break
        made.append(one)
    return made, refused


def _sets(held_bytes: float, cache_bytes: float, room_bytes: float) -> int:
    wanted = math.ceil(CACHES * cache_bytes / max(held_bytes, 1.0))
    most = int(room_bytes // max(held_bytes, 1.0))
    return max(LEAST_SETS, min(wanted, most, MOST_SETS))


def _in_rounds(
    ops: Sequence[Op], made: Sequence[Ready | None], refused: dict[int, str], device: torch.device, sets: int, rounds: int,
    clock: Callable[[], float], ends_at: float,
) -> list[Outcome]:  # fmt: skip
    """All operators once a round, in their order, on the next of their sets of operands."""
    pools = [
        [] if first is None else [first, *[ready(op, device, number) for number in range(1, sets)]]
        for op, first in zip(ops, made, strict=True)
    ]
    times: list[list[float]] = [[] for _ in ops]
    failed = dict(refused)
    for number in range(rounds + WARM_UP):
        if number > WARM_UP and clock() >= ends_at:
            break
        kept: list[object] = []
        for at, pool in enumerate(pools):
            if at in failed:
                continue
            one = pool[number % sets]
            try:
                if one.first is not None and one.first.is_floating_point():
                    one.first.mul_(1.0)
                started = clock()
                kept.append(one.run())
                ended = clock()
            except RuntimeError as error:
                failed[at] = _first_line(error)
                continue
            if number >= WARM_UP:
                times[at].append(ended - started)
    firsts = [one is not None and one.exact for one in made]
    return [failed[at] if at in failed else reading(times[at], firsts[at]) for at in range(len(ops))]


def _on_device(op: Op, device: torch.device, rounds: int, cache_bytes: float) -> Outcome:
    """Batches of launches between two events of the device."""
    try:
        first = ready(op, device, 0)
        sets = max(LEAST_SETS, min(MOST_SETS, math.ceil(CACHES * cache_bytes / max(first.held_bytes, 1.0))))
        pool = [first, *[ready(op, device, number) for number in range(1, sets)]]
        for number in range(WARM_UP * sets):
            pool[number % sets].run()
        one_s = _batch_s(pool, LEAST_LAUNCHES, device)
        launches = max(LEAST_LAUNCHES, min(MOST_LAUNCHES, math.ceil(LEAST_BATCH_S / max(one_s, 1e-7))))
        return reading([_batch_s(pool, launches, device) for _ in range(rounds)], first.exact)
    except (RuntimeError, ConfigError) as error:
        return _first_line(error)


def _batch_s(pool: Sequence[Ready], launches: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(SLEEP_CYCLES_PER_LAUNCH * launches)  # type: ignore[no-untyped-call]
        begins.record()
        for number in range(launches):
            pool[number % len(pool)].run()
        ends.record()
        ends.synchronize()
        return float(begins.elapsed_time(ends)) * 1e-3 / launches


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
