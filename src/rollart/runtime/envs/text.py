"""The interface of text environments: what a user must write (`TextEnv`) and what a task may add (`TextTask`).

    class Parity:
        def reset(self, seed: int) -> str:
            self.n = seed % 100
            return f"{self.n} is odd? "
        def step(self, action: str) -> StepResult:
            right = action.strip() == ("yes" if self.n % 2 else "no")
            return StepResult("", reward=float(right), terminated=True)

Invariant: the same seed gives the same problem, in every process. An action that cannot be read is an observation
(`bad_action=True`, with a text that says so), never an exception: an exception is an infrastructure failure, and
its trajectory is not trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from rollart.core.errors import EnvError


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action."""

    text: str
    """What the model reads next, up to where its next action begins."""
    _: KW_ONLY
    reward: float = 0.0
    """Finite; a trajectory's reward is the sum, unless its task names a scorer."""
    terminated: bool = False
    """The episode came to its own end."""
    truncated: bool = False
    """The episode was cut, for example by a limit of steps."""
    bad_action: bool = False
    """The action could not be read; `text` says so."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class TextEnv(Protocol):
    """All that a user's class must have."""

    def reset(self, seed: int) -> str:
        """Begin the problem that `seed` decides; returns the first text that the model reads."""
        ...

    def step(self, action: str) -> StepResult:
        """Act. `action` is what the model wrote, without the token that ended the turn."""
        ...


class TextTask(TextEnv, Protocol):
    """What a task may add. Inherit from it for these defaults, or just write the methods that differ."""

    def seed_chance(self, seed: int) -> None:
        """Called before `reset`: seeds what is random within an episode, apart from the problem itself."""
        return

    def close(self) -> None:
        """Free what the environment holds. Called once, also on a half-started or broken one."""
        return

    def canonical(self, seed: int) -> int:
        """Id of the problem that `seed` decides: equal for equal problems. It decides what is held back."""
        return seed

    def random_action(self, rng: random.Random) -> str | None:
        """A well-formed action, uniform over all, blind to the state. None: this task does not know any."""
        return None

    def constant_answers(self) -> Iterable[Sequence[str]]:
        """Action sequences worth trying blindly on every instance; each is repeated from its start when it runs out."""
        return ()


class _Completed(TextTask):
    """A user's object, with the defaults of `TextTask` for what it lacks."""

    def __init__(self, env: TextEnv) -> None:
        self._env = env

    def _own(self, name: str) -> Callable[..., Any] | None:
        own = getattr(self._env, name, None)
        return own if callable(own) else None

    def reset(self, seed: int) -> str:
        return self._env.reset(seed)

    def step(self, action: str) -> StepResult:
        return self._env.step(action)

    def seed_chance(self, seed: int) -> None:
        if own := self._own("seed_chance"):
            own(seed)

    def close(self) -> None:
        if own := self._own("close"):
            own()

    def canonical(self, seed: int) -> int:
        own = self._own("canonical")
        return int(own(seed)) if own else TextTask.canonical(self, seed)

    def random_action(self, rng: random.Random) -> str | None:
        own = self._own("random_action")
        return own(rng) if own else TextTask.random_action(self, rng)

    def constant_answers(self) -> Iterable[Sequence[str]]:
        own = self._own("constant_answers")
        return own() if own else TextTask.constant_answers(self)


def complete(env: object, origin: str) -> TextTask:
    """`env` as a whole task. Raises EnvError when `reset` or `step` is missing; `origin` names it in the message."""
    for name in ("reset", "step"):
        if not callable(getattr(env, name, None)):
            raise EnvError(
                f"{origin} has no method {name!r}; a text environment needs reset(seed) -> str and step(action) -> StepResult"
            )
    return _Completed(env)  # type: ignore[arg-type]
