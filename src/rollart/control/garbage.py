"""The cyclic garbage collector of the process that runs control.

Thousands of live trajectories are a million objects, and the loops make no reference cycles (measured: none in 100,000
turns; what is dropped is freed at once by its reference count). Python's own settings make it look at all of them each
time that their number has grown by a quarter, which holds the loop for a second and finds nothing.
"""

from __future__ import annotations

import gc

YOUNG = 100
"""Objects made and not yet freed between two looks at the youngest ones. Small: all that was made since the last look is
looked at, and where as much is freed as is made, a large number lets hundreds of thousands pile up."""
MIDDLE = 50
"""Looks at the youngest between two looks at what survived them; each takes some ten milliseconds."""
FULL = 1_000_000
"""The same between two full collections: they are not to come. Cycles that libraries make are short-lived."""


def spare_the_loop() -> None:
    """Leave full collections out for the rest of the process: for whoever owns the process, before it runs control."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
