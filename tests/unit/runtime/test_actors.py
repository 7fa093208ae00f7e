"""What is kept of Ray's account of an error: the cause, and nothing that differs from run to run. What ends with an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
import ray

from rollart.core.errors import StoreError
from rollart.core.types import Failure
from rollart.runtime.actors import InlineActors, call, fetch, in_words

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 5d0c3a8f0f1e2d3c4b5a697801000000
\tpid: 12345
\tnamespace: rollart-smoke
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file."""
CAUSE = (
    "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
    "End of file."
)
UNBUILT = """The actor died because of an error raised in its creation task, \x1b[36mray::EngineActor.__init__()\x1b[39m \
(pid=12345, ip=10.0.0.1, actor_id=5d0c3a8f0f1e2d3c4b5a697801000000, repr=<x.EngineActor object at 0x7f8a12345678>)
  File "/somewhere/actor.py", line 3, in __init__
    raise ValueError("bad")
ValueError: 3 heads do not divide 32"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KILLED, CAUSE),
        (" ".join(KILLED.split()), CAUSE),
        (UNBUILT, "ValueError: 3 heads do not divide 32"),
        (
            "The actor 5d0c3a8f0f1e2d3c4b5a697801000000 is unavailable: no answer (10.1.2.3:6379).",
            "The actor is unavailable: no answer.",
        ),
        (
            "Memory on the node (IP: 10.0.0.1, ID: 5d0c3a8f) where the task (actor ID: 5d0c, name=E.__init__, pid=123, "
            "memory used=1GB) was running was 15GB / 16GB (0.95)",
            "Memory on the node where the task (memory used=1GB) was running was 15GB / 16GB (0.95)",
        ),
    ],
)
def test_processes_addresses_and_ids_are_left_out(text: str, words: str) -> None:
    assert in_words(text) == words


class Gone:
    """What stands for an array whose owner died."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        raise ray.exceptions.OwnerDiedError("00ab", b"", "")


def test_an_array_that_is_gone_or_does_not_come_is_an_error_of_the_store() -> None:
    async def main() -> None:
        with pytest.raises(StoreError, match="gone, and so is what put it: OwnerDiedError"):
            await fetch(Gone())
        with pytest.raises(StoreError, match=r"did not come within 0.01 s"):
            await fetch(asyncio.get_running_loop().create_future(), limit_s=0.01)
        assert await fetch("itself") == "itself"

    asyncio.run(main())


class Busy:
    """An actor with a task of its own."""

    def __init__(self, ticks: list[int]) -> None:
        self._ticks = ticks
        self._task = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self._ticks.append(1)
            await asyncio.sleep(0)

    async def hang(self) -> None:
        await asyncio.Event().wait()

    def end(self) -> None:
        self._task.cancel()


def test_an_actor_without_a_process_stops_when_it_is_killed() -> None:
    async def main() -> None:
        actors, ticks = InlineActors(), list[int]()
        handle = actors.start(Busy, ticks)
        hanging = handle.hang.remote()
        await asyncio.sleep(0.01)
        assert ticks
        actors.kill(handle)
        actors.kill(handle)
        for ref in (hanging, handle.hang.remote()):
            why = await call("engine", ref)
            assert isinstance(why, Failure)
            assert (why.where, why.kind) == ("engine", "lost")
        ticks.clear()
        await asyncio.sleep(0.01)
        assert not ticks

    asyncio.run(main())
