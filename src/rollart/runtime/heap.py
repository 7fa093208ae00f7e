"""Memory that a process has freed and keeps.

Owns one setting of the C library. Why: torch asks it for every tensor, and by default it gives large ones back to the system
at once and gets them zeroed again, page by page: a sixth of a training step on one core (30 000 page faults in 0.5 s).
The cost: a process keeps the most memory that it had at any one time.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""`mallopt` parameters of glibc (malloc.h)."""
KEPT_BYTES = 1 << 30
"""Freed memory at the top of the heap that is kept, and the size from which allocations have pages of their own."""
STEP_BYTES = 64 << 20
"""By which the heap grows."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees. False where the C library has no such setting: nothing is changed then."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_MMAP_THRESHOLD: KEPT_BYTES, _TRIM_THRESHOLD: KEPT_BYTES, _TOP_PAD: STEP_BYTES}
    return all([bool(mallopt(name, value)) for name, value in wanted.items()])
