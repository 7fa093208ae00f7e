"""Continuous batching step by step, as an engine process on a shared machine does it: for replays of real runs.

Owns who is in the batch. An event per step, where `sim.batching` has one per turn: turns of a small run are a few steps long,
and messages are taken in between two steps. Invariants: a step computes one token of every row that decodes and at most
`step_tokens` of prompts; a request that is stopped has exactly the tokens of the steps that have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from rollart.perf.measured import EngineLaw
from rollart.sim.host import TURN_S, Process
from rollart.sim.pace import Stopped, Work


@dataclass(slots=True, eq=False)
class _Row:
    key: Hashable
    work: Work
    done: Callable[[], None]
    to_read: int
    sampled: int = 0


@dataclass(slots=True, eq=False)
class Stepping:
    """Implements `pace.Pace` on a process; what goes on between two steps is in the step's law."""

    process: Process
    law: EngineLaw
    max_live: int
    step_tokens: int
    steps: int = 0
    rows: int = 0
    read: int = 0
    """Tokens computed in all steps."""
    attended: int = 0
    """Tokens that their rows attended to."""
    cpu_s: float = 0.0
    _in: dict[Hashable, _Row] = field(default_factory=dict)
    _waiting: deque[_Row] = field(default_factory=deque)
    _live: dict[_Row, None] = field(default_factory=dict)
    _stepping: bool = False

    def start(self, key: Hashable, work: Work, done: Callable[[], None]) -> None:
        # the last token that was sampled is always still to be computed
        row = self._in[key] = _Row(key, work, done, work.read + 1)
        self._waiting.append(row)
        if not self._stepping:
            self._stepping = True
            self.process.do(0.0, self._step)

    def tokens(self, key: Hashable) -> int:
        row = self._in.get(key)
        return 0 if row is None else row.sampled

    def stop(self, key: Hashable) -> Stopped:
        row = self._in.pop(key, None)
        if row is None:
            return Stopped(0)
        if row in self._live:
            del self._live[row]
        else:
            self._waiting.remove(row)
        return Stopped(row.sampled)

    def _step(self) -> None:
        """Lay out the next step; it takes effect when it has been computed."""
        while self._waiting and len(self._live) < self.max_live:
            self._live[self._waiting.popleft()] = None
        if not self._live:
            self._stepping = False
            return
        budget = self.step_tokens
        parts: list[tuple[_Row, int]] = []
        tokens = context = 0
        for row in self._live:
            width = 1
            if row.to_read > 1:
                width = min(row.to_read, budget)
                budget -= width
            if width:
                parts.append((row, width))
                tokens += width
                context += row.work.context + row.sampled - row.to_read + width + 1
        law = self.law
        self.steps += 1
        self.rows += len(parts)
        self.read += tokens
        self.attended += context
        cost_s = law.step_s + law.row_s * len(parts) + law.token_s * tokens + law.context_s * context
        self.cpu_s += cost_s
        self.process.do(cost_s * _slowest(parts), lambda: self._stepped(parts))

    def _stepped(self, parts: list[tuple[_Row, int]]) -> None:
        ended: list[_Row] = []
        for row, width in parts:
            if row not in self._live:
                continue
            row.to_read -= width
            if row.to_read <= 0:
                row.to_read = 1
                row.sampled += 1
                if row.sampled >= row.work.wanted:
                    ended.append(row)
        for row in ended:
            row.done()  # it stops the row
        # what waits for these tokens in the process has its turn before the next step
        asyncio.get_running_loop().call_later(TURN_S, self.process.do, 0.0, self._step)


def _slowest(parts: list[tuple[_Row, int]]) -> float:
    return max(row.work.slowness for row, _ in parts)
