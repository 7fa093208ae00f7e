"""Messages on a simulated machine: when they leave, what gathers, who pays; by the same law as the real ones."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sched.pacing import PAUSE_S
from rollart.sim import loop
from rollart.sim.host import FIRST, Host, Process
from rollart.sim.threads import Threads
from rollart.sim.wires import SimWire, WireCosts

FREE = WireCosts(send_s=0.0, take_s=0.0, batch_s=0.0, answer_s=0.0)
ROUNDING_S = 1e-6


def arrivals(costs: WireCosts, sent_s: list[float], *, busy_s: float = 0.0) -> tuple[list[float], int]:
    """When the worker has each of the items that are sent at these times, and in how many batches they came."""

    async def main() -> tuple[list[float], int]:
        host = Host(2)
        control, worker = Process(host, "control", weight=FIRST), Process(host, "worker")
        wire = SimWire(control, worker, costs)
        if busy_s:
            worker.do(busy_s, lambda: None)

        async def one(at_s: float) -> float:
            await asyncio.sleep(at_s)
            return await wire.there()

        return list(await asyncio.gather(*map(one, sent_s))), wire.traffic[0]

    return loop.run(main())


def test_the_first_leaves_at_once_and_what_comes_within_the_pause_leaves_together_after_it() -> None:
    half = PAUSE_S / 2
    found, batches = arrivals(FREE, [0.0, 0.0, half, 0.75 * PAUSE_S, 10 * PAUSE_S])
    assert found == pytest.approx([0.0, 0.0, PAUSE_S, PAUSE_S, 10 * PAUSE_S], abs=ROUNDING_S)
    assert batches == 3


def test_a_worker_that_computes_takes_a_batch_in_when_it_is_done_or_within_its_limit() -> None:
    assert arrivals(FREE, [0.0], busy_s=1.0)[0] == pytest.approx([1.0], abs=ROUNDING_S)

    async def main() -> float:
        host = Host(2)
        worker = Process(host, "worker")
        for _ in range(100):
            worker.do(0.01, lambda: None)
        return await SimWire(Process(host, "control"), worker, replace(FREE, within_s=0.025)).there()

    assert loop.run(main()) == pytest.approx(0.04, abs=ROUNDING_S)


def test_answers_of_quick_calls_leave_together() -> None:
    """Ten calls of 1 ms, one after the other in a thread: the thread that sends gets the interpreter after 5 ms of them."""

    async def main() -> tuple[int, list[float]]:
        host = Host(2)
        worker = Process(host, "worker")
        wire = SimWire(Process(host, "control"), worker, replace(FREE, within_s=0.005))
        calls = Threads(1)

        async def one() -> float:
            came_s = await wire.there()
            await calls.run(lambda: worker.work(0.001))
            await wire.back(came_s, 0.0)
            return asyncio.get_running_loop().time()

        times = await asyncio.gather(*(one() for _ in range(10)))
        return wire.traffic[1], times

    answers, times = loop.run(main())
    assert answers == 2
    assert times == pytest.approx([0.007] * 6 + [0.01] * 4, abs=1e-5)


def test_a_worker_waits_between_its_answers_in_proportion_to_what_they_take() -> None:
    """Calls of 0.04 s each, answers 1 ms apart: the mean goes to 0.04 s, and the pause to a quarter of it."""

    async def main() -> tuple[int, list[float]]:
        host = Host(2)
        wire = SimWire(Process(host, "control"), Process(host, "worker"), FREE)
        times: list[float] = []

        async def one(index: int) -> None:
            await asyncio.sleep(0.001 * index)
            came_s = await wire.there()
            await asyncio.sleep(0.04)
            await wire.back(came_s, 0.0)
            times.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(one(index) for index in range(400)))
        return wire.traffic[1], times

    answers, times = loop.run(main())
    late = sorted(set(times))[-10:]
    pauses = [later - earlier for earlier, later in itertools.pairwise(late)]
    assert pauses[:-1] == pytest.approx([0.01] * len(pauses[:-1]), rel=0.15)
    assert answers < 100


def test_messages_cost_both_ends_and_items_the_worker() -> None:
    async def main() -> tuple[float, float]:
        host = Host(2)
        control, worker = Process(host, "control"), Process(host, "worker")
        costs = WireCosts(send_s=1e-3, take_s=2e-3, batch_s=3e-3, answer_s=4e-3, item_s=1e-4)
        wire = SimWire(control, worker, costs)

        async def one() -> None:
            await wire.back(await wire.there(), 5e-4)

        await asyncio.gather(*(one() for _ in range(20)))
        return control.used_s, worker.used_s

    control_s, worker_s = loop.run(main())
    assert control_s == pytest.approx(1e-3 + 2e-3 + 20 * 5e-4)
    assert worker_s == pytest.approx(3e-3 + 4e-3 + 2 * 20 * 1e-4)


@settings(max_examples=40, deadline=None)
@given(
    sent_s=st.lists(st.floats(0, 0.05), min_size=1, max_size=30).map(sorted),
    cost_s=st.sampled_from([0.0, 1e-4, 3e-3]),
)
def test_items_arrive_once_in_their_order_and_batches_keep_their_distance(sent_s: list[float], cost_s: float) -> None:
    costs = WireCosts(send_s=cost_s, take_s=0.0, batch_s=cost_s, answer_s=0.0, way_s=2e-4)
    found, batches = arrivals(costs, sent_s)
    assert found == sorted(found)
    assert all(there_s >= at_s + costs.way_s for at_s, there_s in zip(sent_s, found, strict=True))
    assert batches <= 1 + (found[-1] - sent_s[0]) / PAUSE_S + ROUNDING_S
