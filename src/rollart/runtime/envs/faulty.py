"""An environment that fails on purpose, to see what a run does about it: `rollart.runtime.envs.faulty:Faulty`.

    tasks:
      trouble:
        env: {kind: python, entry: "rollart.runtime.envs.faulty:Faulty", kwargs: {raises: 0.02, hangs: 0.005, slow: 0.1}}
        max_turns: 3

Invariant: what goes wrong in an episode is drawn from its chance, apart from its problem, so an episode that failed is
likely to come out well when it is tried again; rewards are those of the problem alone. It knows nothing of who calls it.
"""

from __future__ import annotations

import random
import subprocess
import time

from rollart.config.schema import MaxDigitEnv
from rollart.core.errors import EnvError
from rollart.runtime.envs.max_digit import MaxDigit
from rollart.runtime.envs.text import StepResult

CHILD_S = 600
"""A child process ends by itself after this, should nobody end it."""


class Faulty:
    """`turns` problems of `max_digit` in a row; each rate is the share of turns at which that happens."""

    def __init__(
        self, *, turns: int = 3, digits: int = 3, raises: float = 0.0, hangs: float = 0.0, hang_s: float = 10.0,
        slow: float = 0.0, slow_s: float = 0.2, spawns: float = 0.0,
    ) -> None:  # fmt: skip
        """`hang_s`: a call that hangs comes back after this, long past any deadline. `spawns`: starts a child process
        that lives until the environment is closed."""
        rates = {"raises": raises, "hangs": hangs, "slow": slow, "spawns": spawns}
        wrong = [f"{name}={rate}" for name, rate in rates.items() if not 0 <= rate <= 1]
        if wrong or raises + hangs + slow > 1:
            raise EnvError(f"faulty: {', '.join(wrong) or rates}: rates lie between 0 and 1, and so does their sum")
        self._turns = turns
        self._raises, self._hangs, self._slow, self._spawns = raises, hangs, slow, spawns
        self._hang_s, self._slow_s = hang_s, slow_s
        self._problem = MaxDigit(MaxDigitEnv(kind="max_digit", digits=digits))
        self._seed = self._turn = 0
        self._chance = random.Random(0)
        self._children: list[subprocess.Popen[bytes]] = []

    def seed_chance(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def reset(self, seed: int) -> str:
        self._seed, self._turn = seed, 0
        self._trouble("reset")
        return self._problem.reset(seed)

    def step(self, action: str) -> StepResult:
        """Reward 1 / turns for each right answer."""
        self._trouble("step")
        result = self._problem.step(action)
        self._turn += 1
        over = self._turn >= self._turns
        text = result.text if over else result.text + self._problem.reset(self._seed + self._turn)
        reward = result.reward / self._turns
        return StepResult(text, reward=reward, terminated=over, bad_action=result.bad_action)

    def canonical(self, seed: int) -> int:
        return self._problem.canonical(seed)

    def random_action(self, rng: random.Random) -> str:
        return self._problem.random_action(rng)

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()

    def _trouble(self, call: str) -> None:
        if self._chance.random() < self._spawns:
            self._children.append(subprocess.Popen(["sleep", str(CHILD_S)], stdin=subprocess.DEVNULL))
        drawn = self._chance.random()
        if drawn < self._raises:
            raise EnvError(f"faulty: {call} raises, as it was asked to")
        if drawn < self._raises + self._hangs:
            time.sleep(self._hang_s)
        elif drawn < self._raises + self._hangs + self._slow:
            time.sleep(self._slow_s)
