"""Environments and a scorer that misbehave, for the contract suite's real world."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rollart.runtime.envs.text import StepResult

NEVER_S = 1.5
"""How long a stuck step holds its thread: longer than any deadline here, and no longer than the test run."""


class Echo:
    """Three turns of anything."""

    def reset(self, seed: int) -> str:
        self.turn = 0
        return "x" * (seed % 7 + 1) + "\n"

    def step(self, action: str) -> StepResult:
        self.turn += 1
        return StepResult("ok\n", reward=0.5, terminated=self.turn == 3)


class Stuck(Echo):
    def step(self, action: str) -> StepResult:
        threading.Event().wait(NEVER_S)
        return super().step(action)


class Raising(Echo):
    def step(self, action: str) -> StepResult:
        raise ValueError("no such move")


class Unopenable(Echo):
    def __init__(self) -> None:
        raise OSError("no such image")


def score(text: str, metrics: Mapping[str, float]) -> float:
    """By what the trajectory says of itself."""
    if "broken" in text:
        raise RuntimeError("HTTP 500")
    if "slow" in text:
        threading.Event().wait(NEVER_S)
    return 0.5
