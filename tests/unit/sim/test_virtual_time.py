"""Virtual time: when it moves, who wakes first, what happens to timers that nobody needs, and how a deadlock ends."""

from __future__ import annotations

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import DeadlockError
from rollart.sim.loop import CANCELLED_TIMERS_KEPT, VirtualLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


# --- when time moves -------------------------------------------------------------------------------------------------


def test_sleeping_takes_exactly_its_virtual_seconds() -> None:
    async def main() -> list[float]:
        seen = [now()]
        for seconds in (0.5, 0.0, 1e-9, 3600.0 * 24 * 365):
            await asyncio.sleep(seconds)
            seen.append(now())
        return seen

    assert run(main()) == [0.0, 0.5, 0.5, 0.5 + 1e-9, 0.5 + 1e-9 + 3600.0 * 24 * 365]


def test_time_stands_still_while_anybody_is_ready() -> None:
    times: list[float] = []

    async def busy() -> None:
        for _ in range(1000):
            times.append(now())
            await asyncio.sleep(0)

    async def main() -> float:
        asyncio.get_running_loop().call_later(1e-6, times.append, -1.0)
        await asyncio.gather(busy(), busy())
        assert -1.0 not in times, "a timer fired while others were ready"
        await asyncio.sleep(1.0)
        return now()

    assert run(main()) == 1.0
    assert set(times[:2000]) == {0.0}
    assert times[2000:] == [-1.0]


def test_time_never_goes_back() -> None:
    async def main() -> list[float]:
        seen: list[float] = []
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5.0)
        loop.call_at(1.0, lambda: seen.append(now()))
        loop.call_later(-3.0, lambda: seen.append(now()))
        await asyncio.sleep(0.1)
        return [*seen, now()]

    assert run(main()) == [5.0, 5.0, 5.1]


def test_the_program_ends_though_others_never_rest() -> None:
    turns = 0

    async def restless() -> None:
        nonlocal turns
        for _ in range(1000):
            turns += 1
            await asyncio.sleep(0)

    async def main() -> str:
        asyncio.create_task(restless())  # noqa: RUF006
        await asyncio.sleep(0)
        return "done"

    assert run(main()) == "done"
    assert turns <= 3


def test_a_hundred_thousand_sleeps_run() -> None:
    woken: list[int] = []

    async def sleeper(n: int) -> None:
        await asyncio.sleep(n % 97)
        woken.append(n)

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            for n in range(20_000):
                group.create_task(sleeper(n))
        for _ in range(80_000):
            await asyncio.sleep(1.0)
        return now()

    assert run(main()) == 96.0 + 80_000.0
    assert woken == sorted(range(20_000), key=lambda n: n % 97), "by deadline, then first come, first woken"


# --- who wakes first -------------------------------------------------------------------------------------------------


def fired(loop: asyncio.AbstractEventLoop, timers: int) -> list[int]:
    """The order in which callbacks with one and the same deadline run."""
    order: list[int] = []

    async def main() -> None:
        all_done = asyncio.Event()

        def fire(n: int) -> None:
            order.append(n)
            if len(order) == timers:
                all_done.set()

        when = loop.time()
        for n in range(timers):
            loop.call_at(when, fire, n)
        await all_done.wait()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return order


def test_equal_deadlines_wake_in_the_order_in_which_they_were_set_unlike_in_asyncio() -> None:
    assert fired(VirtualLoop(), 500) == list(range(500))
    stock = fired(asyncio.new_event_loop(), 500)
    assert sorted(stock) == list(range(500))
    assert stock != list(range(500)), "asyncio has become first come, first served: _Timer is not needed any more"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_timers_fire_by_deadline_then_by_the_order_in_which_they_were_set(timers: list[tuple[int, bool]]) -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_at(float(when), order.append, n) for n, (when, _) in enumerate(timers)]
        for handle, (_, cancelled) in zip(handles, timers, strict=True):
            if cancelled:
                handle.cancel()
        await asyncio.sleep(10.0)

    run(main())
    kept = [n for n, (_, cancelled) in enumerate(timers) if not cancelled]
    assert order == sorted(kept, key=lambda n: timers[n][0])


def test_a_timer_cancelled_by_another_of_the_same_instant_does_not_fire() -> None:
    fired_too: list[str] = []
    errors: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        handles: list[asyncio.TimerHandle] = []
        loop.call_at(1.0, lambda: handles[0].cancel())
        handles.append(loop.call_at(1.0, fired_too.append, "second"))
        await asyncio.sleep(2.0)

    run(main())
    assert fired_too == []
    assert errors == []


# --- timers that nobody needs ----------------------------------------------------------------------------------------


def test_deadlines_that_were_met_do_not_pile_up() -> None:
    async def main() -> int:
        largest = 0
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(10 * CANCELLED_TIMERS_KEPT):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0)
            largest = max(largest, len(loop._scheduled))
            assert loop._cancelled == len(loop._scheduled)
        return largest

    assert run(main()) <= CANCELLED_TIMERS_KEPT + 1


def test_purging_keeps_every_timer_that_is_still_wanted() -> None:
    fired_at: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for n in range(5 * CANCELLED_TIMERS_KEPT):
            loop.call_at(1e6 + n, fired_at.append, -1.0).cancel()
            if n % 50 == 0:
                loop.call_at(10.0 + n, lambda: fired_at.append(now()))
        await asyncio.sleep(2e6)

    run(main())
    assert fired_at == [10.0 + n for n in range(0, 5 * CANCELLED_TIMERS_KEPT, 50)]


@given(st.lists(st.sampled_from(["set", "cancel", "cancel late", "sleep"]), max_size=40))
def test_the_count_of_cancelled_timers_is_the_number_in_the_heap(steps: list[str]) -> None:
    """The count decides on purging; a timer that was due already is in the heap no more when it is cancelled."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        handles = [loop.call_later(0.5, int)]
        for step in steps:
            if step == "set":
                handles.append(loop.call_later(1.5, int))
            elif step == "sleep":
                await asyncio.sleep(1.0)
            else:
                handles[-1 if step == "cancel" else 0].cancel()
            assert loop._cancelled == sum(timer.cancelled() for _, _, timer in loop._scheduled)

    run(main())


def test_a_timer_for_no_number_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="NaN"):
            await asyncio.sleep(float("nan"))

    run(main())


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_asyncios_own_timeouts_work_on_virtual_time() -> None:
    async def main() -> list[tuple[str, float]]:
        seen = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(100.0)
        seen.append(("timeout", now()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 1.5)
        seen.append(("wait_for", now()))
        async with asyncio.timeout_at(10.0):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await asyncio.Event().wait()
            await asyncio.sleep(1.0)
        seen.append(("nested", now()))
        done, pending = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(s)) for s in (1.0, 9.0)], timeout=3.0)
        seen.append((f"{len(done)} of {len(done) + len(pending)}", now()))
        return seen

    assert run(main()) == [("timeout", 2.5), ("wait_for", 4.0), ("nested", 5.5), ("1 of 2", 8.5)]


def test_a_deadline_at_infinity_never_comes_and_wakes_nobody() -> None:
    async def main() -> None:
        async with asyncio.timeout_at(float("inf")):
            await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    with pytest.raises(DeadlockError):
        run(main(), loop=loop)
    assert loop.time() == 0.0


# --- deadlock --------------------------------------------------------------------------------------------------------


def test_a_deadlock_names_the_waiting_tasks_in_the_order_in_which_they_were_made() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(1.0)
        for name in ("trainer", "buffer", "groups"):
            asyncio.create_task(waits_for_nobody(), name=name)  # noqa: RUF006 (the loop's own list must suffice)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="nobody can wake; 4 tasks wait") as error:
        run(main())
    names = [line.split(" at ")[0] for line in error.value.waiting]
    assert names == ["Task-1", "trainer", "buffer", "groups"]
    assert all("waits_for_nobody:" in line for line in error.value.waiting[1:])
    assert "test_a_deadlock_names" in error.value.waiting[0]


def test_a_deadlock_is_found_at_the_moment_in_which_it_comes_about() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        await asyncio.sleep(7.0)
        asyncio.get_running_loop().call_later(50.0, int).cancel()
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run(main(), loop=loop)
    assert loop.time() == 7.0, "a cancelled timer moved time"


def test_what_deadlocked_is_cancelled_and_may_clean_up() -> None:
    cleaned: list[float] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(2.0)
            cleaned.append(now())

    with pytest.raises(DeadlockError):
        run(main())
    assert cleaned == [2.0]


def test_a_task_that_does_not_end_on_its_cancellation_is_a_deadlock_and_the_loop_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def deaf() -> None:
        waiting = asyncio.get_running_loop().create_future()
        try:
            await waiting
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        asyncio.create_task(deaf(), name="deaf")  # noqa: RUF006
        await asyncio.sleep(0)

    loop = VirtualLoop()
    with pytest.raises(DeadlockError, match="1 tasks wait: deaf") as error:
        run(main(), loop=loop)
    assert loop.is_closed()
    del error
    gc.collect()
    assert "Task was destroyed but it is pending" in caplog.text, "asyncio has a word for it too"
