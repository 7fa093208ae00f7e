"""Microbenchmark of gloo without a model: each operation at the sizes that a prediction asks for, alone and beside products.

Every rank holds nothing but its buffers. Alone: each call starts at a barrier, and takes as long as on the rank that ends last.
Beside: one rank's main thread multiplies matrices until the collective has ended; its bytes are moved by gloo's threads on the
same core, so both take longer, by two factors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FP32_BYTES = 4
BUFFERS = 4
"""Buffers taken in turn, so that a call does not find its operands in the cache of the one before."""
LEAST_CALLS = 5
BESIDE_PRODUCT = 256
"""Side of the matrices multiplied beside a collective: a fraction of a millisecond, the grain of what is read off."""
Call = Callable[[int], Any]


def measured(spec: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Seconds on this rank: `{alone: {op: {bytes: [..]}}, beside: {op: {bytes: [[comm, products], ..]}}, product_s}`.

    `spec`: `sizes` {op: [payload bytes]}, `beside` {op: [payload bytes]}, `seconds` per size.
    """
    _warm()
    alone = {
        op: {str(size): _alone(op, int(size), rank, spec["seconds"]) for size in sizes}
        for op, sizes in spec["sizes"].items()
    }
    product = _product()
    product_s = statistics.median(_timed(product) for _ in range(100))
    beside = {
        op: {str(size): _beside(op, int(size), rank, spec["seconds"], product) for size in sizes}
        for op, sizes in spec["beside"].items()
    }
    return {"alone": alone, "beside": beside, "product_s": product_s}


def _warm() -> None:
    """Connections and threads come into being with the first calls."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1024))
        dist.barrier()


def _call(op: str, payload_bytes: int, rank: int) -> Call:
    """One call of the operation on buffer i; payload as `perf.collectives` counts it: a rank's whole buffer."""
    world = dist.get_world_size()
    elements = max(world, payload_bytes // FP32_BYTES // world * world)
    whole = [torch.ones(elements) for _ in range(BUFFERS)]
    part = [torch.ones(elements // world) for _ in range(BUFFERS)]
    if op == "all_reduce":
        return lambda i: dist.all_reduce(whole[i], async_op=True)
    if op == "all_gather":
        return lambda i: dist.all_gather_into_tensor(whole[i], part[i], async_op=True)
    if op == "reduce_scatter":
        return lambda i: dist.reduce_scatter_tensor(part[i], whole[i], async_op=True)
    if op == "broadcast":
        return lambda i: dist.broadcast(whole[i], src=0, async_op=True)
    if op == "send_recv":
        return lambda i: dist.isend(whole[i], dst=1) if rank == 0 else dist.irecv(whole[i], src=0)
    raise ValueError(
        f"no microbenchmark for {op!r}; known: all_reduce, all_gather, reduce_scatter, broadcast, send_recv"
    )


def _calls(op: str, payload_bytes: int, rank: int, seconds: float) -> tuple[Call, int]:
    """The call, and how many fill `seconds`; rank 0's count, so that all make as many."""
    call = _call(op, payload_bytes, rank)
    call(0).wait()
    dist.barrier()
    once_s = _timed(lambda: call(1).wait())
    count = torch.tensor([max(LEAST_CALLS, int(seconds / once_s))])
    dist.broadcast(count, src=0)
    return call, int(count.item())


def _alone(op: str, payload_bytes: int, rank: int, seconds: float) -> list[float]:
    call, count = _calls(op, payload_bytes, rank, seconds)
    found = []
    for index in range(count):
        dist.barrier()
        found.append(_timed(lambda i=index % BUFFERS: call(i).wait()))  # type: ignore[misc]
    return found


def _beside(
    op: str, payload_bytes: int, rank: int, seconds: float, product: Callable[[], Tensor]
) -> list[tuple[float, int]]:
    """(seconds of the collective, products made meanwhile) of each call, all ranks multiplying."""
    call, count = _calls(op, payload_bytes, rank, seconds)
    found = []
    for index in range(count):
        dist.barrier()
        start_s = time.perf_counter()
        work = call(index % BUFFERS)
        made = 0
        while not work.is_completed():
            product()
            made += 1
        found.append((time.perf_counter() - start_s, made))
        work.wait()
    return found


def _product() -> Callable[[], Tensor]:
    left, right = torch.ones(BESIDE_PRODUCT, BESIDE_PRODUCT), torch.ones(BESIDE_PRODUCT, BESIDE_PRODUCT)
    return lambda: left @ right


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


# ---- what the ranks found together


def slowest(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[float, list[float]]]:
    """Seconds alone by operation and bytes: each call as long as on its last rank."""
    first = found[0]["alone"]
    return {
        op: {
            float(size): [max(one) for one in zip(*(rank["alone"][op][size] for rank in found), strict=True)]
            for size in sizes
        }
        for op, sizes in first.items()
    }


def factors(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over all calls: `communication`, how much longer a collective takes beside products than alone, and
    `computation`, how much longer products take beside it; both 1 where nothing was measured beside.
    """
    alone = slowest(found)
    longer, slower = [], []
    for rank in found:
        for op, sizes in rank["beside"].items():
            for size, calls in sizes.items():
                solo_s = statistics.median(alone[op][float(size)])
                longer += [max(1.0, seconds / solo_s) for seconds, _ in calls]
                slower += [max(1.0, seconds / (made * rank["product_s"])) for seconds, made in calls if made]
    return {
        "communication": statistics.median(longer) if longer else 1.0,
        "computation": statistics.median(slower) if slower else 1.0,
    }
