"""A process that keeps what it frees."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollart.recipes.registry import resolve
from rollart.runtime.heap import KEPT_BYTES, STEP_BYTES, keep_freed_memory
from rollart.runtime.trainer.rank import spec_of

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
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


@pytest.mark.parametrize(
    ("most", "taken"),
    [
        (1 << 40, {MMAP_THRESHOLD: KEPT_BYTES, TRIM_THRESHOLD: KEPT_BYTES, TOP_PAD: STEP_BYTES}),
        (32 << 20, {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: KEPT_BYTES, TOP_PAD: STEP_BYTES}),
        (1 << 19, {}),
    ],
    ids=["glibc", "older glibc", "a smaller limit"],
)
def test_nothing_is_changed_where_large_allocations_would_still_be_given_back(most: int, taken: dict[int, int]) -> None:
    """Each of the parameters freezes the size from which allocations have pages of their own, so it has to be set itself."""
    found: dict[int, int] = {}

    def mallopt(name: int, value: int) -> int:
        if name == MMAP_THRESHOLD and value > most:
            return 0
        found[name] = value
        return 1

    assert keep_freed_memory(mallopt) is bool(taken)
    assert found == taken


def test_only_a_trainer_with_a_process_of_its_own_keeps_what_it_frees() -> None:
    inline, local = (resolve("smoke", [f"world.kind={kind}"]).config for kind in ("inline", "local"))
    assert not spec_of(inline, 8).alone
    assert spec_of(local, 8).alone
