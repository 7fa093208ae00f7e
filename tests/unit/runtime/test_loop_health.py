"""The control loop's health: what it stood still in is named; an idle loop and a starved process are no blocking call."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import pytest

from rollart.core.events import Recorder
from rollart.runtime.health import LIMIT_S, REPORT_S, Look, Standstill, live_stack, place_of, tell, watched

BLOCK_S = 3 * LIMIT_S


def recorded() -> tuple[list[dict[str, Any]], Recorder]:
    events: list[dict[str, Any]] = []
    return events, Recorder((lambda event: events.append(dict(event)),), asyncio.get_running_loop().time)


def advisories(events: list[dict[str, Any]]) -> list[str]:
    return [e["data"]["text"] for e in events if e["kind"] == "advisory" and e["data"]["code"] == "loop_blocked"]


def sleeps_in_the_loop() -> None:
    time.sleep(BLOCK_S)


def computes_in_the_loop() -> None:
    until_s = time.thread_time() + BLOCK_S
    while time.thread_time() < until_s:
        pass


def encodes_in_the_loop() -> None:
    """Many calls of a library, each too short to be seen by itself."""
    until_s = time.thread_time() + BLOCK_S
    rows = list(range(20_000))
    while time.thread_time() < until_s:
        json.dumps(rows, indent=1)


def keeps_the_lock_in_the_loop() -> None:
    json.dumps(NUMBERS)


NUMBERS = [1.5] * 3_000_000


def block_with(blocker: Any, *, beats: float = 2.5) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        events, record = recorded()
        async with watched(record):
            await asyncio.sleep(beats * 0.1)
            blocker()
            await asyncio.sleep(0.25)
        return events

    return asyncio.run(run())


@pytest.mark.parametrize("blocker", [sleeps_in_the_loop, computes_in_the_loop])
def test_the_call_that_blocks_the_loop_is_named(blocker: Any) -> None:
    (text,) = advisories(block_with(blocker))
    assert f"test_loop_health.py:{blocker.__code__.co_firstlineno + 1}" in text or blocker is computes_in_the_loop
    assert f"in {blocker.__name__}" in text
    assert "the control loop stood still for" in text
    assert "no time" not in text


def test_a_library_that_blocks_is_named() -> None:
    (text,) = advisories(block_with(encodes_in_the_loop))
    assert "json/encoder.py" in text or "in encodes_in_the_loop" in text


def test_a_call_that_keeps_the_interpreters_lock_is_named() -> None:
    (text,) = advisories(block_with(keeps_the_lock_in_the_loop))
    assert "json/encoder.py" in text or "in keeps_the_lock_in_the_loop" in text


def test_a_block_that_lasts_to_the_end_is_told() -> None:
    async def run() -> list[dict[str, Any]]:
        events, record = recorded()
        async with watched(record):
            await asyncio.sleep(0.15)
            sleeps_in_the_loop()
        return events

    events = asyncio.run(run())
    assert "sleeps_in_the_loop" in advisories(events)[0]
    (lag,) = [e["data"] for e in events if e["kind"] == "loop_lag"]
    assert lag["worst_s"] >= LIMIT_S


def test_several_blocks_are_told_once_with_their_number() -> None:
    async def run() -> list[dict[str, Any]]:
        events, record = recorded()
        async with watched(record):
            for _ in range(3):
                await asyncio.sleep(0.15)
                sleeps_in_the_loop()
                await asyncio.sleep(0.15)
        return events

    first, rest = advisories(asyncio.run(run()))
    assert "shorter" not in first
    assert "1 shorter one since" in rest


def test_an_idle_loop_gets_no_advisory_and_is_left_as_it_was() -> None:
    async def run() -> list[dict[str, Any]]:
        events, record = recorded()
        async with watched(record):
            await asyncio.sleep(0.5)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return events

    events = asyncio.run(run())
    told = advisories(events)
    # a machine under load may starve the process even here, which must then be what is told
    assert all("no time" in text for text in told)
    assert [e["kind"] for e in events if e["kind"] != "advisory"] == ["loop_lag"]
    assert events[0]["data"].keys() == {"worst_s", "p99_s", "seconds"}
    assert REPORT_S > 0.5


STOPPED = """
import asyncio
from rollart.core.events import Recorder
from rollart.runtime.health import watched
async def run():
    def sink(event):
        if event["kind"] == "advisory":
            print(event["data"]["text"], flush=True)
    async with watched(Recorder((sink,), asyncio.get_running_loop().time)):
        print("up", flush=True)
        await asyncio.to_thread(input)
        await asyncio.sleep(0.3)
asyncio.run(run())
"""


def test_a_process_that_was_stopped_blames_no_call() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4 * LIMIT_S)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate("\n", timeout=30)
    assert "the machine gave this process no time" in out


def still(**changes: Any) -> Standstill:
    facts: dict[str, Any] = {
        "waited_s": 1.0, "loop_cpu_s": 0.01, "process_cpu_s": 0.01, "watch_late_s": 0.0,
        "looks": (Look("a.py:1 in f", False),) * 4,
    }  # fmt: skip
    return Standstill(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, "in a.py:1 in f", "no time"),
        ({"looks": (Look("a.py:1 in f", True),) * 4}, "no time", "a.py"),
        ({"watch_late_s": 0.9, "looks": (Look("a.py:1 in f", False),)}, "no time", "a.py"),
        ({"waited_s": 9.0, "loop_cpu_s": 0.9, "process_cpu_s": 0.9}, "it had a core for 0.9 s of it", "no time"),
        (
            {"looks": (Look("a.py:1 in f", True),) * 4, "loop_cpu_s": 0.9, "process_cpu_s": 0.9},
            "in a.py:1 in f",
            "no time",
        ),
        ({"process_cpu_s": 1.5}, "other threads of this process computed", "no time"),
        ({"looks": ()}, "no time", "a.py"),
        ({"looks": (), "loop_cpu_s": 0.9, "process_cpu_s": 0.9}, "before the call could be seen", "no time"),
        ({"looks": (Look("a.py:1 in f", False),) * 3 + (Look("b.py:2 in g", False),)}, "in 3 of 4 looks", "b.py"),
    ],
)
def test_what_is_told_follows_from_what_was_seen(changes: dict[str, Any], said: str, unsaid: str) -> None:
    text = tell(still(**changes))
    assert said in text
    assert unsaid not in text


def test_a_call_at_an_instruction_without_a_line_is_told_by_its_functions_first() -> None:
    def held() -> FrameType:
        return sys._getframe()

    held.__code__ = held.__code__.replace(co_linetable=b"")
    frame = held()
    assert frame.f_lineno is None, "as between the lines of a cleared handler"
    stack = live_stack(frame)
    assert stack[0].line == held.__code__.co_firstlineno
    assert place_of(stack).startswith(str(stack[0]))
