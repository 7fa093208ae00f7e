"""The process group of the training ranks.

Owns rendezvous and the few collectives that are not sharded training itself. Invariant: nothing is read from or written
to environment variables; addresses are arguments, ports are free ones that the system picks.

A process has one default group (torch keeps it). A group of one rank needs no network and stays for the life of the
process, so that several single-rank trainers can follow each other in one process; a larger one is left with `leave`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollart.core.errors import RollartError, TrainerError

T = TypeVar("T")
K = TypeVar("K")

DEVICE = "cpu"
"""gloo moves CPU tensors; ranks on GPUs would take nccl."""


def listen(host: str, world: int, timeout_s: float) -> TCPStore:
    """Rank 0's meeting place on a free port; the others `connect` to its `.port`."""
    return TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect(host: str, port: int, world: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, world, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(rank: int, world: int, store: Store | None, timeout_s: float) -> DeviceMesh:
    """Enter the group and return its one-dimensional mesh. Waits for all ranks, at most `timeout_s`.

    Raises TrainerError when this process already belongs to another group.
    """
    if not dist.is_initialized():
        if store is None:
            if world > 1:
                raise TrainerError(f"{world} training ranks need a store to meet at; pass `listen` or `connect`")
            store = HashStore()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        raise TrainerError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, it cannot be rank {rank} of "
            f"{world}; start training ranks in processes of their own"
        )
    return init_device_mesh(DEVICE, (world,))


def leave() -> None:
    """Leave a group of several ranks; nothing may use it any more. Idempotent.

    A single-rank group stays: it holds nothing, and the next trainer needs it. Of a larger one every trace is collected here:
    gloo's threads hold Python objects, and one that is still alive when the interpreter ends aborts the process.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.destroy_process_group()
        gc.collect()


def total(value: float) -> float:
    """The sum over all ranks, in float64, equal on every rank."""
    if dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. For small Python objects."""
    values: list[T] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def union(mapping: Mapping[K, T]) -> dict[K, T]:
    """All ranks' entries on every rank."""
    return {key: value for part in gather(dict(mapping)) for key, value in part.items()}


def agree(problem: str, error: type[RollartError]) -> None:
    """Raise `error` on every rank when any has a problem (a text that is not empty): none goes on into the next collective."""
    problems = [text for text in gather(problem) if text]
    if problems:
        raise error(problems[0])
