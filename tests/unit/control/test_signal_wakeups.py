"""A notification wakes everybody who waits, in order, and nobody misses one between looking and waiting."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.signal import Signal
from rollart.sim.loop import run


def test_waiters_wake_in_the_order_in_which_they_came() -> None:
    async def main() -> list[int]:
        signal, woken = Signal(), list[int]()

        async def waiter(n: int) -> None:
            await signal.wait()
            woken.append(n)

        tasks = [asyncio.create_task(waiter(n)) for n in range(50)]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.gather(*tasks)
        return woken

    assert run(main()) == list(range(50))


def test_a_notification_wakes_those_who_wait_and_not_those_who_come_later() -> None:
    async def main() -> None:
        signal = Signal()
        signal.notify()
        late = asyncio.create_task(signal.wait())
        await asyncio.sleep(1.0)
        assert not late.done()
        signal.notify()
        await late

    run(main())


def test_a_notification_while_others_wake_reaches_those_who_wait_again() -> None:
    async def main() -> list[str]:
        signal, seen = Signal(), list[str]()

        async def twice(name: str) -> None:
            for turn in range(2):
                await signal.wait()
                seen.append(f"{name}{turn}")

        async def relays() -> None:
            await signal.wait()
            signal.notify()

        tasks = [asyncio.create_task(twice("a")), asyncio.create_task(relays()), asyncio.create_task(twice("b"))]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.sleep(0)
        assert seen == ["a0", "b0"]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.gather(*tasks)
        return seen

    assert run(main()) == ["a0", "b0", "a1", "b1"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30), st.integers(1, 4))
def test_no_wake_up_is_lost_between_looking_at_the_condition_and_waiting(
    puts: list[tuple[int, int]], consumers: int
) -> None:
    """A lost wake-up would end as a deadlock of the virtual loop."""

    async def main() -> None:
        signal, stock, taken = Signal(), 0, 0

        async def produce() -> None:
            nonlocal stock
            for amount, turns in puts:
                stock += amount
                signal.notify()
                for _ in range(turns):
                    await asyncio.sleep(0)

        async def consume() -> None:
            nonlocal stock, taken
            while taken < sum(amount for amount, _ in puts):
                while not stock and taken < sum(amount for amount, _ in puts):
                    await signal.wait()
                if stock:
                    stock -= 1
                    taken += 1
                    signal.notify()
                    await asyncio.sleep(0)

        await asyncio.gather(*(consume() for _ in range(consumers)), produce())
        assert (stock, taken) == (0, sum(amount for amount, _ in puts))

    run(main())


def test_a_waiter_that_gave_up_is_not_kept_and_disturbs_nobody() -> None:
    """Waiting with a deadline, again and again, must not use up memory while nothing happens."""

    async def main() -> None:
        signal = Signal()
        for _ in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await signal.wait()
        assert len(signal._waiters) == 0
        stays, goes = asyncio.create_task(signal.wait()), asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        goes.cancel()
        signal.notify()
        await stays
        with pytest.raises(asyncio.CancelledError):
            await goes

    run(main())
