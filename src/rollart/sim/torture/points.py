"""The places at which control may stand when it is cancelled: every await in it, and which of them tasks stand at now.

Invariant: the list is read off the source, so an await that is added later is in it without a change here.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import rollart.control

FOLDER = Path(rollart.control.__file__).parent
_AWAITS = (ast.Await, ast.AsyncWith, ast.AsyncFor)


@cache
def await_points() -> dict[tuple[str, int], str]:
    """(file, line) -> `module.function:line` of each await, async with and async for of control."""
    points: dict[tuple[str, int], str] = {}
    for file in sorted(FOLDER.glob("*.py")):
        for name, node in _awaits(ast.parse(file.read_text(encoding="utf-8")), file.stem):
            points[str(file), node.lineno] = f"{name}:{node.lineno}"
    return points


def _awaits(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    for node in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{node.name}"
        if isinstance(node, _AWAITS):
            yield name, node
        yield from _awaits(node, inner)


def standing(tasks: Iterable[asyncio.Task[Any]]) -> set[str]:
    """The awaits of control at which these tasks stand."""
    points, found = await_points(), set[str]()
    for task in tasks:
        awaited: Any = task.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None)
            inner = getattr(awaited, "cr_await", None)
            if frame is not None and inner is not None:  # without an inner one it has not begun, or runs
                point = points.get((frame.f_code.co_filename, frame.f_lineno))
                if point is not None:
                    found.add(point)
            awaited = inner
    return found


def timed_out() -> set[str]:
    """The awaits of control that a deadline has just ended, asked while that is being recorded: those through which the
    recorder was reached, and those inside, which the cancellation went through."""
    points, lines = await_points(), list[tuple[str, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    late = sys.exc_info()[1]
    trace = late.__cause__.__traceback__ if late is not None and late.__cause__ is not None else None
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return {points[line] for line in lines if line in points}
