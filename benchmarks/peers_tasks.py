"""The tasks of the measurements beside peers, as text environments that both sides run: the same text, the same rewards.

`Letters` is one turn of many tokens; `Lake` is FrozenLake by turns of some tokens, with a latency that is drawn if asked
for; `Waits` only waits. Invariant: what is drawn depends on the episode's seed alone, so a latency that was drawn for an
episode can be drawn again by whoever computes a bound from it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from rollart.config.schema import FrozenLakeEnv
from rollart.runtime.envs.frozen_lake import MOVES, FrozenLake
from rollart.runtime.envs.text import StepResult

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TURN_TOKENS = 64
"""Of `Letters`."""
LAKE_TURNS, LAKE_TURN_TOKENS = 4, 16
LAKE_WAY = 6
"""Moves from start to goal of a 4x4 lake without holes: the reward counts in these."""
WAITING_TURNS = 4


class Letters:
    """Write one letter as often as you can. Reward: its share of the tokens of the turn."""

    def __init__(self) -> None:
        self._letter = ""

    def reset(self, seed: int) -> str:
        self._letter = LETTERS[seed % len(LETTERS)]
        return f"Write the letter {self._letter} many times: "

    def step(self, action: str) -> StepResult:
        return StepResult("", reward=action.count(self._letter) / TURN_TOKENS, terminated=True)


class Lake:
    """FrozenLake on random maps; the move is the last of L, D, R, U in what was written. Reward: the way that was made.

    `latency_s` +- `spread_s`: each step sleeps for as long as is drawn from the normal distribution, cut off at 0.
    """

    def __init__(self, *, latency_s: float = 0.0, spread_s: float = 0.0) -> None:
        self._lake = FrozenLake(FrozenLakeEnv(kind="frozen_lake", map="random"))
        self._latency_s, self._spread_s = latency_s, spread_s
        self._chance = random.Random(0)
        self._left = 0

    def seed_chance(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def canonical(self, seed: int) -> int:
        return self._lake.canonical(seed)

    def reset(self, seed: int) -> str:
        text = self._lake.reset(seed)
        self._left = _to_go(text)
        return text

    def draw_s(self) -> float:
        """The latency of the next step."""
        if not self._latency_s:
            return 0.0
        return max(0.0, self._chance.gauss(self._latency_s, self._spread_s))

    def step(self, action: str) -> StepResult:
        seconds = self.draw_s()
        if seconds:
            time.sleep(seconds)
        return self.move(action)

    def move(self, action: str) -> StepResult:
        """The step without its latency."""
        moves = [letter for letter in action if letter in MOVES]
        result = self._lake.step(moves[-1] if moves else "")
        before, self._left = self._left, _to_go(result.text)
        return StepResult(
            result.text, reward=(before - self._left) / LAKE_WAY, terminated=result.terminated,
            truncated=result.truncated, bad_action=result.bad_action,
        )  # fmt: skip

    def close(self) -> None:
        self._lake.close()


def _to_go(text: str) -> int:
    """Moves to the goal from where the map at the end of `text` has the player, holes aside."""
    rows = text.rstrip("\n").split("\n")[-4:]
    at = next((row, line.index("P")) for row, line in enumerate(rows) if "P" in line)
    return LAKE_WAY - sum(at)


class Waits:
    """A few turns that take as long as drawn; nothing can be learned."""

    def __init__(self, *, mean_s: float, cv: float) -> None:
        self._mean_s, self._cv = mean_s, cv
        self._left: list[float] = []

    def seed_chance(self, seed: int) -> None:
        self._left = list(waits_s(seed, self._mean_s, self._cv))

    def reset(self, seed: int) -> str:
        return f"{seed % 100:02d}"

    def step(self, action: str) -> StepResult:
        time.sleep(self._left.pop(0))
        return StepResult("ok", reward=float(len(action) % 2), terminated=not self._left)


def waits_s(seed: int, mean_s: float, cv: float) -> Sequence[float]:
    """The latencies of one episode of `Waits`: log-normal with this mean and this deviation over the mean."""
    chance = random.Random(seed)
    sigma = math.sqrt(math.log(1 + cv * cv))
    return [
        chance.lognormvariate(math.log(mean_s) - sigma * sigma / 2, sigma) if mean_s else 0.0
        for _ in range(WAITING_TURNS)
    ]
