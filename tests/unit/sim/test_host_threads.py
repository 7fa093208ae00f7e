"""Threads of a simulated environment host: few for quick calls, more and more for slow ones, in the order of the calls."""

from __future__ import annotations

import asyncio

from rollart.runtime.envs import workers
from rollart.sim import loop, threads
from rollart.sim.threads import Threads


def ends(host: Threads, n: int, seconds: float) -> list[float]:
    """When each of `n` calls that come at once is done."""

    async def one() -> float:
        await host.run(lambda: asyncio.sleep(seconds))
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        return list(await asyncio.gather(*(one() for _ in range(n))))

    return loop.run(main())


def test_slow_calls_get_more_threads_and_end_in_order() -> None:
    host = Threads(64)
    done = ends(host, 32, 0.1)
    assert done == sorted(done)
    assert 8 < host.threads <= 64
    assert done[-1] < 32 * 0.1 / 4


def test_quick_calls_stay_with_one_thread() -> None:
    host = Threads(64)
    done = ends(host, 100, 0.001)
    assert host.threads == 1
    assert abs(done[-1] - 0.1) < 1e-9


def test_threads_outlive_a_wave_of_quick_calls_and_not_a_long_time_of_them() -> None:
    host = Threads(64)

    async def wave(n: int, seconds: float) -> None:
        await asyncio.gather(*(host.run(lambda: asyncio.sleep(seconds)) for _ in range(n)))

    async def main() -> tuple[int, int]:
        await wave(32, 0.1)
        slow = host.threads
        for _ in range(10):
            await wave(200, 0.001)
        kept = host.threads
        while host.threads > 1 and asyncio.get_running_loop().time() < 60.0:
            await wave(80, 0.001)
        return slow, kept

    slow, kept = loop.run(main())
    assert 8 < slow <= kept
    assert host.threads == 1


def test_there_are_never_more_threads_than_allowed() -> None:
    host = Threads(3)
    ends(host, 40, 0.1)
    assert host.threads == 3


def test_it_goes_by_the_numbers_of_the_real_hosts() -> None:
    ours, real = ((it.TICK_S, it.SLOW_CALL_S, it.KEEP_LOOKS) for it in (threads, workers))
    assert ours == real
