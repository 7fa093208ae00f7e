"""Pipeline schedules as lists: the order in which a stage runs its tasks, and whose output each of them waits for.

Owns the orders of 1F1B, GPipe, interleaved 1F1B and ZB-H1. Invariant: an order holds every task of its stage once, a backward
after its own forward, and the orders of all stages together never wait in a circle. Why lists: a schedule is nothing but an
order, and the composer turns an order into times; closed forms of the same schedules are in `perf.pipeline`.
Sources: arXiv 2104.04473 section 2.2 (1F1B, interleaved; its order is Megatron-LM's table of virtual micro-batches), arXiv
1811.06965 (GPipe), arXiv 2401.10241 section 2.2 (ZB-H1: a stage defers each weight gradient by as many micro-batches as stages
stand before it, so that every stage holds what the first holds in 1F1B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.perf.pipeline import Schedule

TaskKind = Literal["forward", "backward", "input_grad", "weight_grad"]


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch through one chunk of a stage, one way."""

    kind: TaskKind
    micro_batch: int
    chunk: int = 0


def order(schedule: Schedule, *, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> tuple[Task, ...]:
    """The tasks of `stage` in the order in which it runs them.

    Raises `ConfigError` for a schedule without lists, more than one chunk where it has none, or numbers below 1.
    """
    if min(stages, micro_batches, chunks) < 1 or not 0 <= stage < stages:
        raise ConfigError(
            f"schedule: stage {stage} of {stages}, {micro_batches} micro-batches, {chunks} chunks; need 1 or more of each"
        )
    if schedule == "dualpipe":
        raise ConfigError(
            "schedule dualpipe has no order of tasks here: it runs two copies of the model against each other; the nearest "
            "is zero_bubble, and perf.pipeline has dualpipe's closed form"
        )
    if chunks > 1 and schedule != "interleaved":
        raise ConfigError(f"schedule {schedule} has 1 chunk a stage, not {chunks}; take interleaved, or chunks 1")
    if schedule == "gpipe":
        ways: tuple[TaskKind, ...] = ("forward", "backward")
        return tuple(Task(way, index) for way in ways for index in range(micro_batches))
    if schedule == "interleaved" and chunks > 1:
        return _interleaved(stages, stage, micro_batches, chunks)
    if schedule == "zero_bubble":
        return _zero_bubble(stages, stage, micro_batches)
    visits = [(0, index) for index in range(micro_batches)]
    return _one_forward_one_backward(visits, visits, stages - stage - 1)


def source(task: Task, *, stage: int, stages: int, chunks: int = 1) -> tuple[int, Task] | None:
    """(stage, task) whose output `task` reads; None for a forward that reads the batch."""
    place = task.chunk * stages + stage
    if task.kind == "weight_grad":
        return stage, Task("input_grad", task.micro_batch, task.chunk)
    if task.kind == "forward":
        return None if place == 0 else _task_at(place - 1, "forward", task.micro_batch, stages)
    if place == stages * chunks - 1:
        return stage, Task("forward", task.micro_batch, task.chunk)
    return _task_at(place + 1, task.kind, task.micro_batch, stages)


def _task_at(place: int, kind: TaskKind, micro_batch: int, stages: int) -> tuple[int, Task]:
    return place % stages, Task(kind, micro_batch, place // stages)


def _one_forward_one_backward(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> tuple[Task, ...]:
    """`warm_up` forwards, then one of each, then what is left; visits are (chunk, micro-batch)."""
    warm_up = min(warm_up, len(forwards))
    tasks = [Task("forward", index, chunk) for chunk, index in forwards[:warm_up]]
    for position, (chunk, index) in enumerate(forwards[warm_up:]):
        tasks.append(Task("forward", index, chunk))
        back_chunk, back_index = backwards[position]
        tasks.append(Task("backward", back_index, back_chunk))
    tasks += [Task("backward", index, chunk) for chunk, index in backwards[len(forwards) - warm_up :]]
    return tuple(tasks)


def _interleaved(stages: int, stage: int, micro_batches: int, chunks: int) -> tuple[Task, ...]:
    """Groups of micro-batches, as many as stages or a few more, go through one chunk before the next."""
    groups = _groups(micro_batches, stages)
    forwards = [(chunk, index) for group in groups for chunk in range(chunks) for index in group]
    backwards = [(chunk, index) for group in groups for chunk in reversed(range(chunks)) for index in group]
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * len(groups[0])
    if micro_batches < stages:  # too few to keep a stage busy until its first backward: all forwards first
        warm_up = len(forwards)
    return _one_forward_one_backward(forwards, backwards, warm_up)


def _groups(micro_batches: int, stages: int) -> list[range]:
    """Micro-batches in groups of `stages`; a remainder is spread over them, larger groups first."""
    count = max(1, micro_batches // stages)
    size, longer = divmod(micro_batches, count)
    groups, begin = [], 0
    for index in range(count):
        end = begin + size + (index < longer)
        groups.append(range(begin, end))
        begin = end
    return groups


def _zero_bubble(stages: int, stage: int, micro_batches: int) -> tuple[Task, ...]:
    """1F1B whose backward computes input gradients only; weight gradients follow `stage` micro-batches later."""
    tasks: list[Task] = []
    visits = [(0, index) for index in range(micro_batches)]
    for task in _one_forward_one_backward(visits, visits, stages - stage - 1):
        if task.kind == "forward":
            tasks.append(task)
            continue
        tasks.append(Task("input_grad", task.micro_batch))
        if task.micro_batch >= stage:
            tasks.append(Task("weight_grad", task.micro_batch - stage))
    tasks += [Task("weight_grad", index) for index in range(max(0, micro_batches - stage), micro_batches)]
    return tuple(tasks)
