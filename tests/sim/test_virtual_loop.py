"""The loop on virtual time: fair, closed to the outside, and loud when nobody can wake."""

from __future__ import annotations

import asyncio

import pytest

from rollart.core.errors import DeadlockError
from rollart.sim.loop import run


def test_sleeping_moves_time_and_costs_nothing() -> None:
    async def main() -> float:
        await asyncio.sleep(1e9)
        return asyncio.get_running_loop().time()

    assert run(main()) == 1e9


def test_equal_deadlines_wake_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        woken: list[int] = []

        async def sleeper(index: int) -> None:
            await asyncio.sleep(1.0)
            woken.append(index)

        await asyncio.gather(*(sleeper(index) for index in range(500)))
        return woken

    assert run(main()) == list(range(500))


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(20_000):
            loop.call_later(100.0, print).cancel()
        return len(loop._scheduled)  # type: ignore[attr-defined]

    assert run(main()) < 2000


@pytest.mark.parametrize("wait", [lambda: asyncio.Event().wait(), lambda: asyncio.sleep(float("inf"))])
def test_a_wait_that_nobody_can_end_is_an_error_that_names_the_waiter(wait: object) -> None:
    async def waits_for_godot() -> None:
        await wait()  # type: ignore[operator]

    async def main() -> None:
        await asyncio.create_task(waits_for_godot(), name="estragon")

    with pytest.raises(DeadlockError) as caught:
        run(main())
    assert any("estragon" in line and "waits_for_godot" in line for line in caught.value.waiting)


def test_nothing_from_outside_reaches_the_loop() -> None:
    async def to_thread() -> None:
        await asyncio.to_thread(print)

    async def threadsafe() -> None:
        asyncio.get_running_loop().call_soon_threadsafe(print)

    for outside in (to_thread, threadsafe):
        with pytest.raises(RuntimeError, match="virtual time has no"):
            run(outside())


def test_what_a_program_leaves_running_is_cancelled() -> None:
    ended: list[str] = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        asyncio.get_running_loop().create_task(lingers())
        await asyncio.sleep(1.0)

    run(main())
    assert ended == ["cancelled"]
