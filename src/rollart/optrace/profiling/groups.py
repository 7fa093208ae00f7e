"""Collectives between local processes, measured: gloo on a CPU, NCCL between the GPUs of a node.

Owns `profile_collectives` and the processes that it starts. Invariant: a time runs from the moment all ranks are ready to
the moment the last has its result, as the median of rounds; processes end with the call, whatever happens in them. Why: a
collective in a step starts when its last member arrives, and what came before is another operator's time.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollart.core.errors import ClusterError, ConfigError
from rollart.optrace.profiling.timing import reading
from rollart.perf.collectives import OPS
from rollart.perf.device_profile import CollectiveTime

WIDTH = 4
"""Bytes of an element: collectives move fp32."""
BUFFERS = 4
"""In turn, so that a small payload is not always found in the cache."""
WARM_UP = 3
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
GRACE_S = 5.0
"""For a process to end after the answer; after a failure the others wait for what will not come."""
DEADLINE_S = 300.0
"""For all of a call; a rank that waits for one that died would wait for ever."""
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One collective to measure."""

    op: str
    payload_bytes: float

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ConfigError(f"unknown collective {self.op!r}; known: {', '.join(OPS)}")
        if self.payload_bytes < WIDTH:
            raise ConfigError(f"{self.op} of {self.payload_bytes} bytes: give at least {WIDTH}")


def standard() -> tuple[Asked, ...]:
    """Every operation at every size of `SIZES`."""
    return tuple(Asked(op=op, payload_bytes=size) for size in SIZES for op in OPS)


def profile_collectives(
    ranks: int, asked: Sequence[Asked], *, backend: str = "gloo", rounds: int = 15, threads: int = 1,
    deadline_s: float = DEADLINE_S,
) -> tuple[CollectiveTime, ...]:  # fmt: skip
    """Seconds of `asked` among `ranks` processes of this host, the first `ranks` GPUs with NCCL.

    Payloads are made whole elements for every rank; the row says the bytes asked for. Raises ConfigError for a group that
    cannot be, ClusterError when a process fails or the deadline passes.
    """
    if ranks < 2:
        raise ConfigError(f"a collective of {ranks} rank communicates nothing; ask for 2 or more")
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    rows = run_ranks(_measured, ranks, backend, threads, deadline_s, tuple(asked), rounds)
    return tuple(
        CollectiveTime(
            op=one.op, library=backend, ranks=ranks, domains=1, payload_bytes=one.payload_bytes, seconds=seconds,
            log_std=log_std,
        )
        for one, (seconds, log_std) in zip(asked, rows, strict=True)
    )  # fmt: skip


# ---- processes


def run_ranks(
    work: Callable[..., Any], ranks: int, backend: str, threads: int, deadline_s: float, *arguments: Any
) -> Any:
    """What `work(rank, device, *arguments)` gives on rank 0 of a new process group of `ranks` processes."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    ends_at = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        processes = [
            context.Process(
                target=_rank,
                args=(work, rank, ranks, backend, threads, deadline_s, meeting, answers, arguments),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        grace_s = 0.0
        try:
            for process in processes:
                process.start()
            found = _answer(answers, processes, ends_at, deadline_s)
            grace_s = GRACE_S
            return found
        finally:
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=grace_s)
                    if process.is_alive():
                        process.kill()
                        process.join()
            answers.close()


def _answer(answers: Any, processes: Sequence[Any], ends_at: float, deadline_s: float) -> Any:
    while True:
        try:
            good, said = answers.get(timeout=0.2)
        except queue.Empty:
            dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
            if dead:
                raise ClusterError(f"a process of the group ended with {dead[0]} before it answered") from None
            if time.monotonic() > ends_at:
                raise ClusterError(
                    f"{len(processes)} processes have not measured within {deadline_s:.0f} s; ask for less or give more time"
                ) from None
            continue
        if good:
            return said
        raise ClusterError(f"a process of the group failed: {said}")


def _rank(
    work: Callable[..., Any], rank: int, ranks: int, backend: str, threads: int, deadline_s: float, meeting: str,
    answers: Any, arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    device = torch.device(BACKENDS[backend], rank) if BACKENDS[backend] == "cuda" else torch.device("cpu")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=deadline_s)
        )
        try:
            with torch.no_grad():
                found = work(rank, device, *arguments)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        if rank == 0:
            answers.put((True, found))
    except (RuntimeError, ValueError) as error:
        answers.put((False, f"rank {rank}: {type(error).__name__}: {error}"))


# ---- the collectives


def call_of(op: str, payload_bytes: float, rank: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """The collective on buffers of its own, of whole elements for every rank."""
    share = max(1, round(payload_bytes / WIDTH / ranks))
    whole = torch.rand(share * ranks, device=device)
    part = torch.rand(share, device=device)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "alltoall": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    if op in calls:
        return calls[op]
    # neighbours in pairs, the even one sends; an odd last rank stands aside
    peer = rank + 1 if rank % 2 == 0 else rank - 1
    if peer >= ranks:
        return lambda: None
    return lambda: dist.send(whole, peer) if rank % 2 == 0 else dist.recv(whole, peer)


def _measured(rank: int, device: torch.device, asked: Sequence[Asked], rounds: int) -> list[tuple[float, float]]:
    ranks = dist.get_world_size()
    found = []
    for one in asked:
        calls = [call_of(one.op, one.payload_bytes, rank, ranks, device) for _ in range(BUFFERS)]
        own = []
        for number in range(rounds + WARM_UP):
            dist.barrier()
            wait(device)
            started = time.perf_counter()
            calls[number % BUFFERS]()
            wait(device)
            own.append(time.perf_counter() - started)
        last = torch.tensor(own[WARM_UP:], dtype=torch.float64, device=device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        taken = reading([float(value) for value in last.tolist()])
        found.append((taken.seconds, taken.log_std))
    return found


def wait(device: torch.device) -> None:
    """Until all that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
