"""Each request is answered once; what comes twice or too late is counted; a burst of answers does not hold the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.exchange import SLICE, Exchange
from rollart.sim.loop import run

Orphans = list[tuple[str, int]]


def with_exchange(main: Callable[[Exchange[str, int], Orphans], Coroutine[Any, Any, None]]) -> None:
    orphans: Orphans = []
    run(main(Exchange(lambda key, answer: orphans.append((key, answer))), orphans))


async def asking(exchange: Exchange[str, int], *keys: str) -> list[asyncio.Task[int]]:
    """Tasks that already wait for their answers."""
    tasks = [asyncio.create_task(exchange.ask(key), name=key) for key in keys]
    await asyncio.sleep(0)
    return tasks


def test_every_asker_gets_its_own_answer() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        tasks = await asking(exchange, "a", "b", "c")
        exchange.answer([("c", 3), ("a", 1)])
        exchange.answer([("b", 2)])
        assert await asyncio.gather(*tasks) == [1, 2, 3]
        assert orphans == []

    with_exchange(main)


def test_the_first_answer_wins_and_duplicates_go_to_the_orphans() -> None:
    """Field case 29: at the exchange."""

    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        (task,) = await asking(exchange, "a")
        exchange.answer([("a", 1), ("a", 2)])  # in one burst
        exchange.answer([("a", 3)])  # before the asker has taken the first
        assert await task == 1
        exchange.answer([("a", 4)])  # after it
        assert orphans == [("a", 2), ("a", 3), ("a", 4)]

    with_exchange(main)


def test_an_answer_that_nobody_asked_for_is_an_orphan() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        exchange.answer([("a", 1)])
        assert orphans == [("a", 1)]
        (task,) = await asking(exchange, "a")
        assert not task.done(), "what came before the question does not answer it"
        exchange.answer([("a", 2)])
        assert await task == 2

    with_exchange(main)


def test_an_answer_after_the_asker_was_cancelled_is_an_orphan() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        (task,) = await asking(exchange, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert exchange.waiting == ()
        exchange.answer([("a", 1)])
        assert orphans == [("a", 1)]

    with_exchange(main)


def test_an_asker_cancelled_between_answer_and_collection_makes_it_an_orphan_once() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        taken, cancelled = await asking(exchange, "a", "b")
        exchange.answer([("a", 1), ("b", 2)])
        assert exchange.pending == {"a": 1, "b": 2}
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await taken == 1
        assert orphans == [("b", 2)]
        assert exchange.pending == {}

    with_exchange(main)


def test_a_deadline_in_the_instant_of_the_answer_loses_no_answer() -> None:
    """Either the asker has it or the orphans do."""

    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        loop = asyncio.get_running_loop()
        got: Orphans = []

        async def ask(key: str, when: float) -> None:
            try:
                async with asyncio.timeout_at(when):
                    got.append((key, await exchange.ask(key)))
            except TimeoutError:
                return

        loop.call_at(1.0, exchange.answer, [("before", 1)])  # set before the deadline of the same instant
        tasks = [asyncio.create_task(ask(key, 1.0)) for key in ("before", "after")]
        await asyncio.sleep(0)
        loop.call_at(1.0, exchange.answer, [("after", 2)])
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        assert sorted(got + orphans) == [("after", 2), ("before", 1)]
        assert exchange.pending == {}
        assert exchange.waiting == ()

    with_exchange(main)


def test_two_may_not_ask_for_the_same() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        (task,) = await asking(exchange, "a")
        with pytest.raises(RuntimeError, match="'a' is already waited for"):
            await exchange.ask("a")
        exchange.answer([("a", 1)])
        assert await task == 1, "the first asker is not disturbed"

    with_exchange(main)


def test_pending_and_waiting_are_apart() -> None:
    """A book counts what has come in and was not taken as still live, exactly once."""

    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        tasks = await asking(exchange, "a", "b", "c")
        assert (exchange.waiting, dict(exchange.pending)) == (("a", "b", "c"), {})
        exchange.answer([("b", 2)])
        assert (exchange.waiting, dict(exchange.pending)) == (("a", "c"), {"b": 2})
        assert await tasks[1] == 2
        assert (exchange.waiting, dict(exchange.pending)) == (("a", "c"), {})
        exchange.answer([("a", 1), ("c", 3)])
        await asyncio.gather(*tasks)
        assert (exchange.waiting, dict(exchange.pending)) == ((), {})

    with_exchange(main)


# --- bursts ----------------------------------------------------------------------------------------------------------


def test_others_run_between_two_slices_of_a_burst() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        keys = [f"k{n}" for n in range(5 * SLICE + 3)]
        done: list[str] = []

        async def ask(key: str) -> None:
            await exchange.ask(key)
            done.append(key)

        seen: list[int] = []

        async def other() -> None:
            while len(done) < len(keys):
                seen.append(len(done))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask(key)) for key in keys]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(other()))
        exchange.answer([(key, 0) for key in keys])
        await asyncio.gather(*tasks)
        assert done == keys, "in the order in which the answers came"
        steps = [b - a for a, b in pairwise(seen)]
        assert max(steps) <= SLICE
        assert len([step for step in steps if step]) >= 5

    with_exchange(main)


def test_bursts_during_a_burst_queue_up_behind_it_and_make_no_slice_longer() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        bursts = [[f"{burst}-{n}" for n in range(2 * SLICE)] for burst in "abcd"]
        keys = [key for burst in bursts for key in burst]
        done: list[str] = []

        async def ask(key: str) -> None:
            await exchange.ask(key)
            done.append(key)

        tasks = [asyncio.create_task(ask(key)) for key in keys]
        await asyncio.sleep(0)
        for burst in bursts:
            exchange.answer([(key, 0) for key in burst])
        seen = [0]
        while len(done) < len(keys):
            await asyncio.sleep(0)
            seen.append(len(done))
        assert done == keys
        assert max(b - a for a, b in pairwise(seen)) <= SLICE
        await asyncio.gather(*tasks)

    with_exchange(main)


def test_a_request_asked_again_while_its_first_answer_was_on_its_way_waits_for_its_own() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        keys = [f"k{n}" for n in range(5 * SLICE)]
        *others, first = await asking(exchange, *keys, "a")
        exchange.answer([*((key, 0) for key in keys), ("a", 1)])  # several slices ahead of the last
        first.cancel()
        await asyncio.sleep(0)
        assert orphans == [("a", 1)]
        (again,) = await asking(exchange, "a")
        await asyncio.gather(*others)
        assert not again.done()
        exchange.answer([("a", 2)])
        assert await again == 2

    with_exchange(main)


def test_askers_cancelled_in_the_middle_of_a_burst_hold_nobody_up() -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        keys = [f"k{n}" for n in range(4 * SLICE)]
        tasks = await asking(exchange, *keys)
        exchange.answer([(key, n) for n, key in enumerate(keys)])
        for task in tasks[SLICE::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wanted = {n for n in range(4 * SLICE) if n < SLICE or (n - SLICE) % 2}
        assert {result for result in results if isinstance(result, int)} == wanted
        assert {answer for _, answer in orphans} == set(range(4 * SLICE)) - wanted
        assert exchange.pending == {}
        (again,) = await asking(exchange, "new")
        exchange.answer([("new", 7)])
        assert await again == 7

    with_exchange(main)


moves = st.lists(
    st.tuples(st.sampled_from(["ask", "answer", "answer", "cancel", "turn", "turns"]), st.integers(0, 5)), max_size=50
)


@given(moves)
def test_every_answer_is_had_by_one_asker_or_is_an_orphan(steps: list[tuple[str, int]]) -> None:
    async def main(exchange: Exchange[str, int], orphans: Orphans) -> None:
        got: Orphans = []
        asked: dict[str, asyncio.Task[None]] = {}
        given_out: Orphans = []

        async def ask(key: str) -> None:
            got.append((key, await exchange.ask(key)))

        for number, (move, which) in enumerate(steps):
            key = f"k{which}"
            if move == "ask" and (key not in asked or asked[key].done()):
                asked[key] = asyncio.create_task(ask(key))
            elif move == "answer":
                given_out.append((key, number))
                exchange.answer([(key, number)])
            elif move == "cancel" and key in asked:
                asked[key].cancel()
            else:
                for _ in range(3 if move == "turns" else 1):
                    await asyncio.sleep(0)
            assert not {*exchange.waiting} & {*exchange.pending}
        for _ in range(3):
            await asyncio.sleep(0)
        assert exchange.pending == {}
        assert sorted(got + orphans) == sorted(given_out)
        assert {*exchange.waiting} == {key for key, task in asked.items() if not task.done()}

    with_exchange(main)
