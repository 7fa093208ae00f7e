"""Python's and numpy's global generators, for foreign code that draws from them.

Invariant: such code, called through `Draws.within`, draws what its own seed decides, whatever runs beside it in this process
and in every process alike; afterwards the generators are as they were. Calls come one at a time: there is one pair of global
generators. What this cannot keep out is code that draws from them at the same moment in another thread, past this class.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rollart.core.errors import EnvError

LOCK_S = 120.0
"""Longest wait for another call: the reset of a medium Sokoban takes half a minute."""
_lock = threading.Lock()
T = TypeVar("T")


class Draws:
    """One environment's own state of the two generators."""

    def __init__(self, seed: int) -> None:
        self._python: Any = None
        self._numpy: Any = None
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    def within(self, call: Callable[[], T]) -> T:
        """What `call` returns. Raises what it raises, and EnvError when the generators do not come free."""
        if not _lock.acquire(timeout=LOCK_S):
            raise EnvError(
                f"another environment has kept the global random generators for {LOCK_S:.0f} s; calls take turns"
            )
        try:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                return call()
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
        finally:
            _lock.release()
