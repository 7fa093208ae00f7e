"""Memory that a process has freed and keeps.

Owns one setting of the C library. Why: torch asks it for every tensor, and by default it gives large ones back to the system
at once and gets them zeroed again, page by page. The cost: a process keeps the most memory that it had at any one time, so
this is for a process that does nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""`mallopt` parameters of glibc (malloc.h)."""
KEPT_BYTES = 1 << 30
"""Freed memory at the top of the heap that is kept, and the size from which allocations have pages of their own."""
OLDER_KEPT_BYTES = 32 << 20
"""The largest such size that an older glibc takes (malloc.c, `HEAP_MAX_SIZE` / 2)."""
STEP_BYTES = 64 << 20
"""By which the heap grows."""

Mallopt = Callable[[int, int], int]
"""Parameter, value -> whether it was taken."""


def keep_freed_memory(mallopt: Mallopt | None = None) -> bool:
    """Let this process keep what it frees. False where the C library cannot be told to: nothing is changed then.

    Any of the three parameters ends glibc's own raising of the size from which allocations have pages of their own, so that
    size comes first: without it the others would leave the size at its least.
    """
    tell: Mallopt | None = mallopt or getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is None or not (tell(_MMAP_THRESHOLD, KEPT_BYTES) or tell(_MMAP_THRESHOLD, OLDER_KEPT_BYTES)):
        return False
    tell(_TRIM_THRESHOLD, KEPT_BYTES)
    tell(_TOP_PAD, STEP_BYTES)
    return True
