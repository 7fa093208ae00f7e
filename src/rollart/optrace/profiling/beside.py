"""Kernels while a collective runs beside them: what overlap costs computation.

Owns `profile_overlaps`. Invariant: a kernel is timed alone and beside in the same process on the same operands, and a
reading counts only if collectives were still under way when its last call ended. Why: overlap is the largest cost that a
sum of times alone leaves out, and it is a property of this device with this library.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollart.optrace.measured_ops import kernel_name
from rollart.optrace.ops import Op
from rollart.optrace.profiling.cases import ready
from rollart.optrace.profiling.groups import WIDTH, run_ranks, wait
from rollart.optrace.profiling.operands import Ready
from rollart.perf.device_profile import OverlapTime

PAYLOAD_BYTES = 25 << 20
"""A bucket of gradients as DistributedDataParallel reduces it."""
BATCH_S = 0.05
"""Of kernels in a row: many times the collective's start, so that it is beside all of them."""
COVERED = 2.0
"""Collectives are launched for so many times the kernels' time alone; they slow one another too."""
REPEATS = 3
MOST_COLLECTIVES = 200
SETS = 4
DEADLINE_S = 300.0


def profile_overlaps(
    ops: Sequence[Op], *, ranks: int, backend: str, payload_bytes: float = PAYLOAD_BYTES, threads: int = 1,
    batch_s: float = BATCH_S, deadline_s: float = DEADLINE_S,
) -> tuple[OverlapTime, ...]:  # fmt: skip
    """Times of `ops` alone and beside all-reduces of `payload_bytes` among `ranks` processes; those not covered are left
    out.
    """
    rows = run_ranks(_measured, ranks, backend, threads, deadline_s, tuple(ops), payload_bytes, batch_s)
    return tuple(
        OverlapTime(
            kernel=name, solo_s=solo_s, seconds=seconds, overlap_ratio=1.0, collective="all_reduce",
            payload_bytes=payload_bytes, ranks=ranks,
        )
        for name, solo_s, seconds in rows
    )  # fmt: skip


def _measured(
    rank: int, device: torch.device, ops: Sequence[Op], payload_bytes: float, batch_s: float
) -> list[tuple[str, float, float]]:
    payload = torch.rand(max(1, int(payload_bytes // WIDTH)), device=device)
    reduce_s = statistics.median(_collective_s(payload, device) for _ in range(REPEATS + 1))
    found = []
    for op in ops:
        pool = [ready(op, device, number) for number in range(SETS)]
        once_s = _agreed(_batch_s(pool, SETS, device) / SETS)
        calls = max(SETS, min(1000, math.ceil(batch_s / once_s)))
        solo_s = statistics.median(_batch_s(pool, calls, device) for _ in range(REPEATS)) / calls
        solo_s = _agreed(solo_s)
        many = max(2, min(MOST_COLLECTIVES, math.ceil(COVERED * calls * solo_s / reduce_s)))
        beside = [taken for taken in (_beside_s(pool, calls, many, payload, device) for _ in range(REPEATS)) if taken]
        if beside and rank == 0:
            found.append((kernel_name(op), solo_s, statistics.median(beside) / calls))
    return found


def _agreed(seconds: float) -> float:
    """The mean over the ranks, so that all of them launch as many collectives."""
    shared = torch.tensor([seconds], dtype=torch.float64)
    if dist.get_backend() != "gloo":
        shared = shared.cuda()
    dist.all_reduce(shared)
    return max(1e-7, float(shared.item()) / dist.get_world_size())


def _collective_s(payload: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    wait(device)
    started = time.perf_counter()
    dist.all_reduce(payload)
    wait(device)
    return _agreed(time.perf_counter() - started)


def _batch_s(pool: Sequence[Ready], calls: int, device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    for number in range(calls):
        pool[number % len(pool)].run()
    _ended(device)
    return time.perf_counter() - started


def _beside_s(
    pool: Sequence[Ready], calls: int, many: int, payload: torch.Tensor, device: torch.device
) -> float | None:
    """Seconds of the calls while `many` collectives run; None if the last of them ended first."""
    dist.barrier()
    wait(device)
    works: list[Any] = [dist.all_reduce(payload, async_op=True) for _ in range(many)]
    started = time.perf_counter()
    for number in range(calls):
        pool[number % len(pool)].run()
    _ended(device)
    taken_s = time.perf_counter() - started
    covered = not works[-1].is_completed()
    for work in works:
        work.wait()
    wait(device)
    payload.fill_(0.5)
    return taken_s if covered else None


def _ended(device: torch.device) -> None:
    """Until this stream is done; collectives have a stream of their own and go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
