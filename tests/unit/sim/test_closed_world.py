"""Nothing from outside reaches the virtual loop, nothing is left behind in it, and the same program does the same again."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from rollart.core.seeds import rng
from rollart.sim.loop import VirtualLoop, run

# --- the outside -----------------------------------------------------------------------------------------------------


async def executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, int)


async def thread() -> None:
    await asyncio.to_thread(int)


async def threadsafe() -> None:
    asyncio.get_running_loop().call_soon_threadsafe(int)


async def connection() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def connection_by_name() -> None:
    await asyncio.open_connection("localhost", 9)


async def given_socket() -> None:
    with socket.socket() as own:
        await asyncio.open_connection(sock=own)


async def accepted_socket() -> None:
    with socket.socket() as own:
        await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, own)


async def server() -> None:
    await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)


async def datagrams() -> None:
    await asyncio.get_running_loop().create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))


async def names() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 9)


async def process() -> None:
    await asyncio.create_subprocess_exec("true")


async def shell() -> None:
    await asyncio.create_subprocess_shell("true")


async def reader() -> None:
    asyncio.get_running_loop().add_reader(0, int)


async def raw_socket() -> None:
    with socket.socket() as own:
        await asyncio.get_running_loop().sock_recv(own, 1)


REFUSED = (
    executor, thread, threadsafe, connection, connection_by_name, given_socket, accepted_socket, server, datagrams,
    names, process, shell,
)  # fmt: skip


@pytest.mark.parametrize("reach_out", REFUSED, ids=lambda f: f.__name__)
def test_nothing_reaches_out_of_virtual_time(reach_out: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="virtual time has no"):
            await reach_out()

    run(main())
    gc.collect()  # a socket that was opened and left would warn now


@pytest.mark.parametrize("reach_out", [reader, raw_socket], ids=lambda f: f.__name__)
def test_what_asyncio_leaves_to_real_loops_is_not_there(reach_out: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with pytest.raises(NotImplementedError):
            await reach_out()

    run(main())


def test_another_thread_cannot_wake_the_loop() -> None:
    errors: list[Exception] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def from_outside() -> None:
            try:
                loop.call_soon_threadsafe(int)
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=from_outside)
        other.start()
        other.join()

    run(main())
    assert [str(error) for error in errors] == [
        "virtual time has no other threads: call_soon_threadsafe is not available"
    ]


# --- what is left behind ---------------------------------------------------------------------------------------------


def test_the_result_and_the_error_of_the_program_come_out_and_the_loop_is_closed() -> None:
    async def fine() -> int:
        return 7

    async def raises() -> None:
        raise LookupError("own")

    first, second = VirtualLoop(), VirtualLoop()
    assert run(fine(), loop=first) == 7
    with pytest.raises(LookupError, match="own"):
        run(raises(), loop=second)
    assert first.is_closed()
    assert second.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        first.call_later(1.0, int)


def test_tasks_left_behind_are_cancelled_in_order_and_may_take_time_to_clean_up() -> None:
    ended: list[tuple[str, float]] = []

    async def left(name: str) -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(0.5)
            ended.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        for n in range(30):
            asyncio.create_task(left(f"t{n}"))  # noqa: RUF006
        await asyncio.sleep(1.0)

    run(main())
    assert ended == [(f"t{n}", 1.5) for n in range(30)]


def test_what_fails_while_it_is_cancelled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            raise LookupError("the session did not close")

    async def main() -> str:
        asyncio.create_task(fails(), name="session")  # noqa: RUF006
        await asyncio.sleep(1.0)
        return "result"

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        assert run(main()) == "result"
    (record,) = caplog.records
    assert "session was left behind and failed when it was cancelled" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the session did not close"


async def ticks(closed: list[float]) -> AsyncIterator[int]:
    try:
        for n in range(10):
            yield n
            await asyncio.sleep(1.0)
    finally:
        await asyncio.sleep(0.25)
        closed.append(asyncio.get_running_loop().time())


def test_a_generator_left_half_way_is_closed_within_the_loop() -> None:
    closed: list[float] = []

    async def main() -> None:
        async for n in ticks(closed):
            if n == 2:
                break
        gc.collect()
        await asyncio.sleep(5.0)
        assert closed == [2.25]

    run(main())


def test_a_generator_held_to_the_end_is_closed_with_the_loop() -> None:
    closed: list[float] = []
    held = []

    async def main() -> None:
        held.append(ticks(closed))
        await anext(held[0])

    run(main())
    assert closed == [0.25]


# --- the same again --------------------------------------------------------------------------------------------------


def traced(seed: int) -> list[tuple[Any, ...]]:
    """A program of everything whose order could differ: groups that fail, deadlines, queues, sets of tasks."""
    trace: list[tuple[Any, ...]] = []
    ballast: list[bytearray] = []

    def note(*what: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        trace.append((asyncio.get_running_loop().time(), task.get_name(), *what))

    async def worker(n: int, queue: asyncio.Queue[int]) -> None:
        draw = rng(seed, "worker", n)
        try:
            for turn in range(6):
                ballast.append(bytearray(16 * (id(draw) // 16 % 50)))  # memory is never laid out the same way twice
                try:
                    async with asyncio.timeout(draw.choice([0.5, 1.0, 1.5])):
                        await asyncio.sleep(draw.choice([0.0, 0.5, 1.0, 1.5]))
                    queue.put_nowait(n)
                except TimeoutError:
                    note("late", turn)
        finally:
            note("ended", n)

    async def attempt(n: int) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                for member in range(12):
                    group.create_task(worker(100 * n + member, queue))
                for _ in range(20):
                    note("got", await queue.get())
                raise LookupError
        except* LookupError:
            note("gave up", n)

    async def main() -> None:
        done, pending = await asyncio.wait([asyncio.create_task(attempt(n)) for n in range(4)], timeout=2.25)
        for task in (*done, *pending):
            note(task.get_name())
            task.cancel()
        for n in range(9):
            asyncio.create_task(worker(1000 + n, asyncio.Queue()))  # noqa: RUF006 (cancelled as left behind)
        await asyncio.sleep(0.75)

    run(main())
    return trace


@pytest.mark.parametrize("seed", range(3))
def test_two_loops_one_after_the_other_give_the_same_trace(seed: int) -> None:
    first = traced(seed)
    held = [object() for _ in range(1000)]
    assert traced(seed) == first
    assert len(first) > 100
    assert traced(seed + 1) != first
    del held
