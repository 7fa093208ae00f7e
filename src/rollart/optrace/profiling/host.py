"""What an operator costs the host that launches it: called, recorded by autograd, run by the backward pass.

Owns `host_times`. Invariant: operands are so small that computing them takes a fraction of the call. Why: small models
are as slow as their host, and no roofline knows that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rollart.perf.device_profile import HostTimes

CALLS = 300
REPEATS = 7
ELEMENTS = 16


def host_times(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> HostTimes:
    """Medians over repeated chains of multiplications; of a GPU, while its queue has room."""
    x = torch.rand(ELEMENTS, device=device)
    y = torch.ones(ELEMENTS, device=device)

    def plain() -> float:
        return _launched_s(x, y, device, clock) / CALLS

    def recorded() -> tuple[float, float]:
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            _wait(device)
            started = clock()
            out = leaf
            for _ in range(CALLS):
                out = out * y
            ended = clock()
            last = out.sum()
            _wait(device)
            backward = clock()
            last.backward()  # type: ignore[no-untyped-call]
            back_s = clock() - backward
            _wait(device)
        return (ended - started) / CALLS, back_s / CALLS

    plain(), recorded()
    both = [recorded() for _ in range(REPEATS)]
    return HostTimes(
        op_s=statistics.median(plain() for _ in range(REPEATS)),
        recorded_op_s=statistics.median(one for one, _ in both),
        backward_op_s=statistics.median(one for _, one in both),
        serial=device.type == "cpu",
    )


def _launched_s(x: torch.Tensor, y: torch.Tensor, device: torch.device, clock: Callable[[], float]) -> float:
    with torch.no_grad():
        _wait(device)
        started = clock()
        out = x
        for _ in range(CALLS):
            out = out * y
        taken_s = clock() - started
        _wait(device)
    return taken_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
