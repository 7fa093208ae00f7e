"""textarena's single-player games as multi-turn text.

Invariant: the seed decides the problem and its chance together, in every process, whatever else runs beside it: the games
draw from the global generators, so each call is made with the game's own state of them (`draws.py`). The games' raw form is
played: what is new since the last move, without the player's own words, for the context already holds the rest.

A move that a game calls invalid is a bad action and its text says why; most games end at the second in a row.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

from rollart.config.schema import TextArenaEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.draws import Draws
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.envs.textarena_games import MOVES, game_of, make

CHANCE_IS_THE_PROBLEM = frozenset({"Minesweeper"})
"""Games that begin alike for every seed and draw their problem at the first move."""
_INVALID = re.compile(r"Invalid Move: (-?[0-9.]+)$")
"""Four games give reward and reason of an invalid move in the wrong order; then the reason is the number."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class TextArena(TextTask):
    """One game. `reset` may be called again."""

    def __init__(self, config: TextArenaEnv) -> None:
        self._config = config
        self._game = game_of(config.id)
        self._draws = Draws(0)
        self._env: Any = self._draws.within(lambda: make(config))
        self._over = True

    def reset(self, seed: int) -> str:
        self._draws.seed(seed)
        self._draws.within(lambda: self._env.reset(num_players=1, seed=seed))
        self._over = False
        return self._news()

    def step(self, action: str) -> StepResult:
        """The reward comes with the end: what the game gives, and `bad_action_reward` whenever the move was invalid."""
        if self._over:
            raise EnvError(f"{self._config.id}: step after the end of an episode; call reset first")
        done, _ = self._draws.within(lambda: self._env.step(action))
        self._over = bool(done)
        state = self._env.state
        told = state.game_info[0]
        invalid = bool(told["invalid_move"]) if done else bool(getattr(state, "error_count", 0))
        reward = self._config.bad_action_reward if invalid else 0.0
        text, metrics = self._news(), {"game_turns": float(told["turn_count"])}
        if done:
            reward += _reward(self._config.id, (state.rewards or {}).get(0), told.get("reason"))
            text += f"{told.get('reason') or ''}\n"
        return StepResult(text, reward=reward, terminated=self._over, bad_action=invalid, metrics=metrics)

    def close(self) -> None:
        """The games hold nothing but memory."""
        self._over = True

    def canonical(self, seed: int) -> int:
        """Of the first text and the hidden state: many seeds may make one problem, and some games have a single one."""
        if self._game in CHANCE_IS_THE_PROBLEM:
            return seed
        begun = (self.reset(seed), _ordered(self._env.state.game_state))
        self._over = True
        return int.from_bytes(hashlib.blake2b(repr(begun).encode(), digest_size=8).digest(), "big")

    def random_action(self, rng: random.Random) -> str | None:
        """A well-formed move; None for games whose form of a move is not known here."""
        move = MOVES.get(self._game)
        return None if move is None else f"[{move(rng, self._env)}]"

    def _news(self) -> str:
        from textarena import ObservationType

        _, messages = self._env.get_observation()
        return "".join(f"{text}\n" for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION) or "\n"


def _reward(game_id: str, value: object, reason: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    swapped = _INVALID.match(str(reason))
    if swapped is None:
        raise EnvError(f"{game_id} ended with the reward {value!r}, which is no number")
    return float(swapped[1])


def _ordered(value: object) -> object:
    """A state as a value with one `repr`, in every process."""
    if isinstance(value, dict):
        return sorted((repr(key), _ordered(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_ordered(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return _ADDRESS.sub("", repr(value))
