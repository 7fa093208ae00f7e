"""Name the largest of some digits: one turn, `max 3 7 1 = `, then the answer and a newline.

Invariant: the problem is `seed % 10**digits`, read as that many digits, so there are exactly 10**digits of them. The
best constant answer, 9, is right for 1 - 0.9**digits of them (0.271 for three).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from rollart.config.schema import MaxDigitEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.text import StepResult, TextTask

DIGITS = "0123456789"


class MaxDigit(TextTask):
    """One attempt at one problem."""

    def __init__(self, config: MaxDigitEnv) -> None:
        self._n_digits = config.digits
        self._largest: str | None = None

    def digits(self, seed: int) -> str:
        """The problem of `seed`."""
        return f"{self.canonical(seed):0{self._n_digits}d}"

    def reset(self, seed: int) -> str:
        digits = self.digits(seed)
        self._largest = max(digits)
        return f"max {' '.join(digits)} = "

    def step(self, action: str) -> StepResult:
        """Reward 1 for the largest digit. Anything else than one digit is a bad action; there is no second try."""
        if self._largest is None:
            raise EnvError("max_digit: step without a problem; call reset first")
        largest, self._largest = self._largest, None
        answer = action.strip()
        readable = len(answer) == 1 and answer in DIGITS
        right = answer == largest
        text = "yes\n" if right else f"no, {largest}\n" if readable else "?\n"
        return StepResult(text, reward=float(right), terminated=True, bad_action=not readable)

    def canonical(self, seed: int) -> int:
        return int(seed % 10**self._n_digits)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(DIGITS)

    def constant_answers(self) -> Iterable[Sequence[str]]:
        return DIGITS
