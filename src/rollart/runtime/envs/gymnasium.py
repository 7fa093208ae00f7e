"""Any gymnasium environment with discrete actions and the "ansi" rendering, as text.

Invariant: nothing that the rendering says is lost. Colours and highlights, which often carry the state (where the player
stands), become words: a red S is written `<red:S>`. An action is its number or, where the configuration names the
actions, its name. The seed decides the problem and its chance together, as gymnasium has it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollart.config.schema import GymnasiumEnv
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.envs.text import StepResult, TextTask

COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Of the terminal codes 30..37 (text) and 40..47 (background), as gymnasium.utils.colorize names them."""
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_OTHER_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class GymnasiumText(TextTask):
    """A gymnasium environment behind the text interface."""

    def __init__(self, config: GymnasiumEnv) -> None:
        self._id = config.id
        gymnasium = import_gymnasium()
        try:
            creator = gymnasium.spec(config.id).entry_point
            env_class = gymnasium.envs.registration.load_env_creator(creator) if isinstance(creator, str) else creator
            modes = getattr(env_class, "metadata", {}).get("render_modes", [])
            if "ansi" not in modes:
                raise ConfigError(
                    f"env.id={config.id!r} renders as {', '.join(modes) or 'nothing'}, not as text (ansi); write a class with "
                    "reset(seed) and step(action) around it and use env.kind=python"
                )
            self._env: Any = gymnasium.make(config.id, render_mode="ansi", disable_env_checker=True, **config.kwargs)
        except gymnasium.error.Error as error:
            raise ConfigError(f"env.id={config.id!r}: {error}") from error
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"env.id={config.id!r} has actions {space}; only discrete ones can be written as text")
        if config.actions and len(config.actions) != space.n:
            raise ConfigError(
                f"env.actions names {len(config.actions)} actions, but {config.id!r} has {space.n}; name all, in order"
            )
        self._first, self._n = int(space.start), int(space.n)
        self._names = config.actions or tuple(str(self._first + index) for index in range(self._n))
        self._number_of = {str(self._first + index): self._first + index for index in range(self._n)}
        self._number_of |= {name: self._first + index for index, name in enumerate(self._names)}
        self._over = True

    def reset(self, seed: int) -> str:
        self._env.reset(seed=seed)
        self._over = False
        return self._view()

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError(f"{self._id}: step after the end of an episode; call reset first")
        number = self._number_of.get(action.strip())
        if number is None:
            return StepResult(f"? use one of: {' '.join(self._names)}\n{self._view()}", bad_action=True)
        _, reward, terminated, truncated, _ = self._env.step(number)
        self._over = bool(terminated or truncated)
        return StepResult(self._view(), reward=float(reward), terminated=bool(terminated), truncated=bool(truncated))

    def close(self) -> None:
        self._env.close()

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self._names)

    def constant_answers(self) -> Iterable[Sequence[str]]:
        return [(name,) for name in self._names]

    def _view(self) -> str:
        return plain(self._env.render()).strip("\n") + "\n"


def plain(rendered: str) -> str:
    """`rendered` with terminal colours as words, and other terminal codes taken out."""

    def words(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        names = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < len(COLOURS)]
        return f"<{' '.join(names)}:{match[2]}>" if names else match[2]

    return _OTHER_CODES.sub("", _COLOURED.sub(words, rendered))


def import_gymnasium() -> Any:
    """The gymnasium package, or a ConfigError with the line that installs it."""
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            'this task needs gymnasium, which is not installed; install it with: pip install "rollart[envs]"'
        ) from None
    return gymnasium
