"""TextWorld games as multi-turn text: a goal, a place, and commands in words.

    You are in a text adventure. Your goal: take the key from the box. ...
    You can: close box, take key from box
    Write one command, nothing else.

Invariants: the seed decides the game, which is made once and kept (`textworld_games.py`); only commands whose first word is a
verb of the game reach it, so that none can restart, save or quit it; what else is written is a bad action. A command is
looked for in the last line first, so that a model may think before it acts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollart.config.schema import TextWorldEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.envs.textworld_games import canonical_id, game_file, loaded

WHAT = "Write one command, nothing else."
WHICH = "Which number do you choose? Answer with the number only."
UNKNOWN = "That is no command."
NUMBERS = ("1", "2", "3", "4", "5", "6")
"""Of commands in a list; few are longer."""
LOOKING = ("examine ", "inventory", "look")
"""How commands begin that change nothing."""
_STATUS = re.compile(r"\n>\s.*$", re.DOTALL)
"""The prompt and the status line that the game's interpreter prints after its text."""
_NUMBER = re.compile(r"\d{1,9}")
_GAP = re.compile(r"\n\s*\n+")
_END = re.compile(r"\s*\*\*\* The End \*\*\*.*$", re.DOTALL)


class TextWorld(TextTask):
    """One game at a time; `reset` may be called again, for another one."""

    def __init__(self, config: TextWorldEnv) -> None:
        self._config = config
        self._seed: int | None = None
        self._game: Any = None
        self._state: Any = None
        self._way: int = 1
        self._left: int = 1
        self._over = True

    def reset(self, seed: int) -> str:
        if seed != self._seed:
            self.close()
            self._game = loaded(game_file(self._config, seed))
            self._seed = seed
        state = self._state = self._game.reset()
        self._way = self._left = max(1, len(state.policy_commands))
        self._over = False
        goal = " ".join(state.objective.split())
        return f"You are in a text adventure. Your goal: {goal}\n{_plain(state.description)}\n{self._asked()}"

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("textworld: step after the end of a game; call reset first")
        command = self._command(action)
        if command is None:
            text = f"{UNKNOWN}\n{self._asked()}"
            reward = self._config.bad_action_reward
            return StepResult(text, reward=reward, bad_action=True, metrics=self._metrics())
        before = self._value()
        state = self._state = self._game.step(command)[0]
        self._over = bool(state.won or state.lost)
        if state.won:
            self._left = 0
        elif not state.lost and state.policy_commands:  # none: the goal is out of reach, and nothing more is done of it
            self._left = len(state.policy_commands)
        text = _plain(state.feedback)
        return StepResult(
            text if self._over else f"{text}\n{self._asked()}",
            reward=self._value() - before,
            terminated=self._over,
            metrics=self._metrics(),
        )

    def close(self) -> None:
        game, self._game, self._seed = self._game, None, None
        if game is not None:
            game.close()

    def canonical(self, seed: int) -> int:
        """Of the game itself: its map, its things and its quests. Makes the game if it is not there yet."""
        return canonical_id(self._config, seed)

    def random_action(self, rng: random.Random) -> str:
        """Uniform over the commands that make sense anywhere in this game, or over small numbers."""
        if self._config.commands == "numbered":
            return rng.choice(NUMBERS)
        commands: list[str] = [] if self._state is None else self._state.possible_admissible_commands
        return rng.choice(commands or ["look"])

    def constant_answers(self) -> Iterable[Sequence[str]]:
        """Always the same number, where numbers are understood."""
        return [(number,) for number in NUMBERS] if self._config.commands == "numbered" else ()

    def _value(self) -> float:
        """What has been earned so far, between 0 and 1."""
        if self._config.reward == "progress":
            return 1 - self._left / self._way
        state = self._state
        return float((state.score or 0) / max(1, state.max_score))

    def _metrics(self) -> dict[str, float]:
        state = self._state
        return {
            "score": float((state.score or 0) / max(1, state.max_score)),
            "progress": 1 - self._left / self._way,
            "won": float(bool(state.won)),
        }

    def _listed(self) -> list[str]:
        """The possible commands that the configuration wants to be told."""
        commands: list[str] = self._state.admissible_commands
        match self._config.commands:
            case "none":
                return []
            case "all":
                return commands
            case _:
                return [command for command in commands if not command.startswith(LOOKING)]

    def _asked(self) -> str:
        """What can be done now, and what to answer."""
        listed = self._listed()
        if self._config.commands == "numbered":
            lines = [f"{number}: {command}\n" for number, command in enumerate(listed, 1)]
            return f"You can:\n{''.join(lines)}{WHICH}"
        can = f"You can: {', '.join(listed)}\n" if listed else ""
        return f"{can}{WHAT}"

    def _chosen(self, action: str) -> str | None:
        """The command of the only number that the answer names."""
        numbers = {int(number) for number in _NUMBER.findall(action)}
        listed = self._listed()
        return listed[min(numbers) - 1] if len(numbers) == 1 and 1 <= min(numbers) <= len(listed) else None

    def _command(self, action: str) -> str | None:
        """The possible command that a line names, last line first; else the last line, if it begins with a verb."""
        if self._config.commands == "numbered" and (chosen := self._chosen(action)):
            return chosen
        lines = [" ".join(line.strip(" \t>*`\"'.!:").split()) for line in action.splitlines()]
        lines = [line for line in lines if line]
        known: dict[str, str] = {command.casefold(): command for command in self._state.admissible_commands}
        for line in reversed(lines):
            if line.casefold() in known:
                return known[line.casefold()]
        if lines and lines[-1].split()[0].casefold() in self._state.verbs:
            return lines[-1]
        return None


def _plain(text: str) -> str:
    """What the game says, without what its interpreter prints around it."""
    return _GAP.sub("\n", _END.sub("", _STATUS.sub("", text))).strip()
