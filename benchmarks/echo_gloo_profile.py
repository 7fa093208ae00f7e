"""One process's profile for `echo_gloo.py`: every operator of a rank's sub-model as it runs, and whole passes without a clock.

Owns the clock that times operators and the passes that it times. Invariant: no process belongs to a group with another: a
tensor-parallel rank runs on torch's fake group of two, a data-parallel one on a group of itself, whose collectives end at
once and are not timed. Why in the step and not one by one: on a CPU the state of the caches decides a memory-bound pass, and
each one finds what the one before left. Why whole passes too: what a pass takes beyond its operators is the host's: Python,
dispatch, DTensor, DDP's hooks and copies.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echo_gloo_job import WORLD, Size, Way, as_size
from echo_gloo_step import Trained, batches, llama, reference_s, trained
from rollart.optrace.kernels import base_name, work

Key = tuple[str, str, str, tuple[int, ...], float, float]
"""Kind, name, dtype, shape, FLOPs, bytes moved."""
WARM_UP = 2
LEAST_ROUNDS = 3
NESTED = (DTensor, AsyncCollectiveTensor)


@dataclass(slots=True)
class Reading:
    """Seconds of the calls of one operator in one pass over the model."""

    calls: int = 0
    seconds: float = 0.0


class Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator of this rank; what it takes to watch is in no reading."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.readings: dict[Key, Reading] = defaultdict(Reading)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, NESTED) for kind in types):
            return NotImplemented  # they come again as operators on local tensors
        kwargs = kwargs or {}
        start_s = time.perf_counter()
        out = func(*args, **kwargs)
        taken_s = time.perf_counter() - start_s
        if not any(issubclass(kind, FakeTensor) for kind in types):
            self._note(func, args, kwargs, out, taken_s)
        return out

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, taken_s: float) -> None:
        asked = work(func, args, kwargs, out)
        if asked is None or asked.stream == "comm":
            return
        key = (asked.kind, base_name(func), asked.dtype, tuple(asked.shape), asked.flops, asked.moved_bytes)
        reading = self.readings[key]
        reading.calls += 1
        reading.seconds += taken_s


@dataclass(slots=True)
class Rounds:
    """What several steps say: mean seconds of a call by operator and step; of a step without a clock, mean seconds of a
    forward and a backward pass, and of the update."""

    by_key: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    def add(self, clock: Clock) -> None:
        for key, reading in clock.readings.items():
            self.by_key[key].append(reading.seconds / reading.calls)

    def table(self) -> dict[str, Any]:
        rows = [
            {"kind": kind, "name": name, "dtype": dtype, "shape": list(shape), "flops": flops, "moved_bytes": moved,
             "seconds": seconds}
            for (kind, name, dtype, shape, flops, moved), seconds in self.by_key.items()
        ]  # fmt: skip
        return {
            "rows": rows, "forward_s": self.forward_s, "backward_s": self.backward_s, "update_s": self.update_s,
        }  # fmt: skip


def operators(spec: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Tables of `Rounds` by way.

    `spec`: `size`, `ways`, `seconds` per way, `seed`.
    """
    size = as_size(spec["size"])
    found = {}
    for way in spec["ways"]:
        with alone(way):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
            job = trained(way, llama(size), size, mesh)
            found[way] = rounds(job, size, spec["seconds"], spec["seed"]).table() | {"reference_s": [reference_s()]}
    return found


@contextmanager
def alone(way: Way) -> Iterator[None]:
    """What stands for the group, without another process: DTensor asks for a second rank, DDP's reducer for real answers."""
    if way == "tensor":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    elif way == "data":
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rounds(job: Trained, size: Size, seconds: float, seed: int) -> Rounds:
    """Steps of as many micro-batches as the rank has, with and without the clock in turn."""
    batch = batches(size, job.shares, seed)
    found = Rounds()
    end_s = time.monotonic() + seconds
    for count in range(-WARM_UP, 1 << 20):
        with Clock() if count >= 0 else nullcontext() as clock:
            job.step(batch)
        if clock is not None:
            found.add(clock)
        taken = _step_s(job, batch)
        if count >= 0:
            for seconds_of, one in zip((found.forward_s, found.backward_s, found.update_s), taken, strict=True):
                seconds_of.append(one)
        if time.monotonic() >= end_s and count >= LEAST_ROUNDS:
            break
    return found


def _step_s(job: Trained, batch: Sequence[Any]) -> tuple[float, float, float]:
    """Mean seconds of a forward and of a backward pass, and seconds of the update, of one whole step."""
    forward_s = backward_s = 0.0
    for index, tokens in enumerate(batch):
        with job.around(last=index == len(batch) - 1):
            start_s = time.perf_counter()
            loss = job.loss(tokens)
            between_s = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            backward_s += time.perf_counter() - between_s
            forward_s += between_s - start_s
    start_s = time.perf_counter()
    job.update.step()
    return forward_s / len(batch), backward_s / len(batch), time.perf_counter() - start_s
