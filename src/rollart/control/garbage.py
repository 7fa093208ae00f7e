"""The cyclic garbage collector of the process that runs control.

Thousands of live trajectories are a million objects, and a run makes no reference cycles while it trains (measured on
fakes and on the local world: none; what is dropped is freed at once by its reference count). Python's own settings look at
all objects each time that their number has grown by a quarter, which holds the loop for a second and finds nothing.
"""

from __future__ import annotations

import gc

YOUNG = 100
"""Objects made and not yet freed between two looks at the youngest ones, where short-lived cycles of libraries are found.
Small: where as much is freed as is made, a larger number lets hundreds of thousands pile up for one look."""
NEVER = 1_000_000
"""Looks at the youngest objects between two at older ones: more than a run has."""


def spare_the_loop() -> None:
    """Look for cycles among the youngest objects only, for the rest of the process: for whoever owns the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, NEVER, NEVER)
