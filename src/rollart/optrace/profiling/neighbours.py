"""Other processes that run the same operators at the same time, as the other ranks on one host do.

Owns `neighbours`. Invariant: all of them are at work when the block begins, and gone when it ends. Why: ranks on one CPU
share its memory and caches, so an operator is slower there than alone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollart.core.errors import ClusterError
from rollart.optrace.ops import Op
from rollart.optrace.profiling.cases import ready

START_S = 120.0
END_S = 10.0


@contextmanager
def neighbours(ops: Sequence[Op], count: int, threads: int) -> Iterator[None]:
    """`count` processes that run `ops` in turn until the block ends. Raises ClusterError when one does not start."""
    context = multiprocessing.get_context("spawn")
    stop: Any = context.Event()
    started: list[Any] = [context.Event() for _ in range(count)]
    processes = [
        context.Process(target=_run, args=(tuple(ops), threads, event, stop), daemon=True) for event in started
    ]
    try:
        for process in processes:
            process.start()
        for event in started:
            if not event.wait(START_S):
                raise ClusterError(f"a process that shares the host has not begun its work within {START_S:.0f} s")
        yield
    finally:
        stop.set()
        for process in processes:
            if process.pid is not None:
                process.join(END_S)
                if process.is_alive():
                    process.kill()
                    process.join()


def _run(ops: Sequence[Op], threads: int, started: Any, stop: Any) -> None:
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    with torch.no_grad():
        pool = [ready(op, device, number) for op in ops for number in range(2)]
        started.set()
        while not stop.is_set():
            kept = [one.run() for one in pool]
            del kept
