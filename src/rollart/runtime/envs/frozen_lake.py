"""gymnasium's FrozenLake as multi-turn text: each turn the model reads the map and writes one move.

    PFFF          P is the player; S start, F ice, H hole, G goal
    FHFH
    FFFH
    HFFG
    R             the move, ended by a newline

Invariant: the last `side * (side + 1)` characters before every move are the map as it is now, also after a bad action
("?", a newline, the map): what must be done next depends on one place of the context only, which is what lets a
model of 100 k parameters learn it.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from rollart.config.schema import FrozenLakeEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.gymnasium import import_gymnasium
from rollart.runtime.envs.text import StepResult, TextTask

MOVES = "LDRU"
"""gymnasium's actions 0, 1, 2, 3."""
STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Change of (row, column) on ice that does not slip."""
MAX_CONSTANT_ANSWERS = 64
"""Blind move sequences that a baseline tries: all 20 straight ways over a 4x4 map, a sample on larger ones."""

MAPS_KEPT = 1024
"""Drawn maps that are remembered: a few kilobytes for each hundred."""


class FrozenLake(TextTask):
    """One lake. `reset` may be called again, for another map."""

    def __init__(self, config: FrozenLakeEnv) -> None:
        self._config = config
        self._gymnasium = import_gymnasium()
        self._rows: tuple[str, ...] = ()
        self._env: Any = None
        self._flat = ""
        self._chance: int | None = None
        self._over = True

    def rows(self, seed: int) -> tuple[str, ...]:
        """The map that `seed` decides, as gymnasium writes it."""
        from gymnasium.envs.toy_text.frozen_lake import MAPS

        side = self._config.side
        return tuple(MAPS[f"{side}x{side}"]) if self._config.map == "default" else _random_rows(side, seed)

    def seed_chance(self, seed: int) -> None:
        self._chance = seed

    def reset(self, seed: int) -> str:
        rows = self.rows(seed)
        if rows != self._rows:
            self.close()
            # the checker would warn about, and slow down, an environment that gymnasium itself ships
            self._env = self._gymnasium.make(
                "FrozenLake-v1", desc=list(rows), is_slippery=self._config.slippery, disable_env_checker=True
            )
            self._rows, self._flat = rows, "\n".join(rows) + "\n"
        state, _ = self._env.reset(seed=self._chance)
        self._chance, self._over = None, False
        return self._view(state)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("FrozenLake: step after the end of an episode; call reset first")
        move = action.strip()
        if len(move) != 1 or move not in MOVES:
            text = "?\n" + self._view(self._env.unwrapped.s)
            return StepResult(text, reward=self._config.bad_action_reward, bad_action=True)
        state, reward, terminated, truncated, _ = self._env.step(MOVES.index(move))
        self._over = bool(terminated or truncated)
        return StepResult(
            self._view(state), reward=float(reward), terminated=bool(terminated), truncated=bool(truncated)
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def canonical(self, seed: int) -> int:
        """The holes as bits, row by row: many seeds give the same random map."""
        return int("".join("1" if cell == "H" else "0" for row in self.rows(seed) for cell in row), 2)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(MOVES)

    def constant_answers(self) -> Iterable[Sequence[str]]:
        """Each single move; on the default map also its shortest solutions, on random maps the ways without a detour."""
        if self._config.map == "default":
            ways: Iterable[str] = itertools.islice(solutions(self.rows(0)), MAX_CONSTANT_ANSWERS)
        else:
            ways = _straight_ways(self._config.side)
        return [*MOVES, *ways]

    def _view(self, state: int) -> str:
        row, column = divmod(int(state), self._config.side)
        at = row * (self._config.side + 1) + column
        return self._flat[:at] + "P" + self._flat[at + 1 :]


@lru_cache(maxsize=MAPS_KEPT)
def _random_rows(side: int, seed: int) -> tuple[str, ...]:
    """What gymnasium draws: it costs as much as three moves, and the members of a group walk on one map."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size=side, seed=seed))


def solutions(rows: Sequence[str]) -> Iterator[str]:
    """All shortest move sequences from S to G over ice that does not slip, in the order of `MOVES`; none: no way."""
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    goal = next(at for at, cell in cells.items() if cell == "G")
    start = next(at for at, cell in cells.items() if cell == "S")
    distance = {goal: 0}
    frontier = deque([goal])
    while frontier:
        row, column = frontier.popleft()
        for down, right in STEPS.values():
            before = (row - down, column - right)
            if cells.get(before, "H") != "H" and before not in distance:
                distance[before] = distance[row, column] + 1
                frontier.append(before)

    def onward(at: tuple[int, int], moves: str) -> Iterator[str]:
        if at == goal:
            yield moves
            return
        for move, (down, right) in STEPS.items():
            after = (at[0] + down, at[1] + right)
            if distance.get(after, -1) == distance[at] - 1:
                yield from onward(after, moves + move)

    if start in distance:
        yield from onward(start, "")


def _straight_ways(side: int) -> Iterator[str]:
    """Up to MAX_CONSTANT_ANSWERS of the ways from corner to corner by R and D only, spread evenly over all of them."""
    length = 2 * (side - 1)
    ways = list(itertools.islice(itertools.combinations(range(length), side - 1), 1 << 14))
    for index in range(0, len(ways), -(-len(ways) // MAX_CONSTANT_ANSWERS)):
        yield "".join("R" if at in ways[index] else "D" for at in range(length))
