"""A process that keeps what it frees."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import resource, sys
from rollart.runtime.heap import keep_freed_memory
told = keep_freed_memory() if sys.argv[1] == "kept" else True
for _ in range(3):
    b"x" * (48 << 20 | _)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    b"x" * (48 << 20 | _)
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of making a large array five times, in a process of its own."""
    out = subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "True"
    return int(out[1])


def test_memory_that_was_freed_is_taken_again_without_a_page_fault() -> None:
    assert 4 * faults("kept") < faults("plain")
