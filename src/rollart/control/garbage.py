"""The cyclic garbage collector of the process that runs control.

Thousands of live trajectories are a million objects that all live long, and the loops make no reference cycles (measured:
none in 100,000 turns; what is dropped is freed at once by its reference count). A full collection would find nothing and
hold the loop for a second each time that the number of objects has grown by a quarter.
"""

from __future__ import annotations

import gc

YOUNG = 20_000
"""Allocations between two looks at the youngest objects; each look takes about a millisecond."""
MIDDLE = 10
"""Looks at the youngest between two looks at what survived them."""
FULL = 100_000
"""The same between two full collections: after billions of allocations, that is for cycles made once in a while."""


def spare_the_loop() -> None:
    """Make full collections rare, for the rest of the process: for whoever owns the process, before it runs control."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
