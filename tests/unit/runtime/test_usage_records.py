"""What a run uses: recorded while it goes on, as sums that only rise."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollart.core.events import Recorder
from rollart.runtime import usage


def test_the_machine_is_told_once_and_use_from_the_beginning() -> None:
    events: list[Mapping[str, Any]] = []

    async def main() -> None:
        record = Recorder((events.append,), asyncio.get_running_loop().time)
        async with usage.recorded(record, lambda: ({"engine": (3, 2)}, {"engine-0": (1.0, 2.0, 3.0, 4.0, 0.5)})):
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert [event["kind"] for event in events] == ["machine", "usage"]
    assert events[0]["data"]["cores"] == len(os.sched_getaffinity(0))
    assert events[0]["data"]["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    used = events[1]["data"]
    assert used["traffic"] == {"engine": [3, 2]}
    assert used["work"] == {"engine-0": [1.0, 2.0, 3.0, 4.0, 0.5]}
    assert used["cpu_s"]["control"] > 0
    assert used["cpu_s"]["others"] >= 0


def test_cpu_time_of_a_child_counts_and_stays_when_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        used = usage.Used()
        until = time.monotonic() + 20
        while used.by_role().get("ray", 0.0) < 0.05 and time.monotonic() < until:
            time.sleep(0.02)
        before = used.by_role()["ray"]
    finally:
        child.kill()
        child.wait()
    assert before >= 0.05
    assert used.by_role()["ray"] >= before
