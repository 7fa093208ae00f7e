"""Every wait has a deadline and a reason: what is waited for can be read while it lasts and in what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from rollart.control.waits import WaitExpired, Waits
from rollart.core.errors import RollartError
from rollart.core.events import Recorder
from rollart.sim.loop import run

Events = list[Mapping[str, Any]]


def with_waits(main: Callable[[Waits], Coroutine[Any, Any, None]]) -> Events:
    events: Events = []

    async def inside() -> None:
        await main(Waits(Recorder((events.append,), asyncio.get_running_loop().time)))

    run(inside())
    return events


async def after(seconds: float, value: str = "done") -> str:
    await asyncio.sleep(seconds)
    return value


def test_what_comes_in_time_is_returned_and_nothing_is_recorded() -> None:
    async def main(waits: Waits) -> None:
        assert await waits.on(after(2.0), what="a turn", deadline_s=2.5) == "done"
        assert waits.now() == {}

    assert with_waits(main) == []


def test_a_deadline_that_passes_ends_the_wait_and_is_recorded_with_its_reason() -> None:
    async def main(waits: Waits) -> None:
        await asyncio.sleep(1.0)
        awaited = asyncio.create_task(after(10.0))
        with pytest.raises(WaitExpired, match=r"waited 2\.5 s for a turn") as expired:
            await waits.on(awaited, what="a turn", deadline_s=3.5)
        assert (expired.value.what, expired.value.waited_s) == ("a turn", 2.5)
        assert isinstance(expired.value, RollartError)
        assert asyncio.get_running_loop().time() == 3.5
        assert awaited.cancelled(), "what nobody waits for any more is cancelled"
        assert waits.now() == {}

    assert with_waits(main) == [
        {"seq": 1, "t": 3.5, "kind": "wait_expired", "data": {"what": "a turn", "waited_s": 2.5}}
    ]


def test_a_deadline_in_the_past_expires_at_once() -> None:
    async def main(waits: Waits) -> None:
        await asyncio.sleep(5.0)
        with pytest.raises(WaitExpired, match=r"waited 0\.0 s"):
            await waits.on(after(1.0), what="room", deadline_s=4.0)

    assert len(with_waits(main)) == 1


def test_one_can_read_what_is_being_waited_for_and_by_how_many() -> None:
    async def main(waits: Waits) -> None:
        tasks = [
            asyncio.create_task(waits.on(after(seconds), what=what, deadline_s=100.0))
            for what, seconds in [("engines", 3.0), ("engines", 5.0), ("a batch", 5.0)]
        ]
        seen = [dict(waits.now())]
        for _ in range(3):
            await asyncio.sleep(2.0)
            seen.append(dict(waits.now()))
        assert seen == [{}, {"engines": 2, "a batch": 1}, {"engines": 1, "a batch": 1}, {}]
        await asyncio.gather(*tasks)

    with_waits(main)


def test_an_error_of_what_is_awaited_comes_out_as_it_is() -> None:
    async def raises() -> str:
        await asyncio.sleep(1.0)
        raise LookupError("own")

    async def main(waits: Waits) -> None:
        with pytest.raises(LookupError, match="own"):
            await waits.on(raises(), what="a turn", deadline_s=9.0)
        assert waits.now() == {}

    assert with_waits(main) == []


def test_a_timeout_of_the_awaited_things_own_is_not_taken_for_the_deadline() -> None:
    """A socket's or a store's TimeoutError one second into a wait of nine is that port's fault, with that port's words."""

    async def raises() -> str:
        await asyncio.sleep(1.0)
        raise TimeoutError("connection to the store timed out")

    async def main(waits: Waits) -> None:
        with pytest.raises(TimeoutError, match="connection to the store") as error:
            await waits.on(raises(), what="the trainer to publish", deadline_s=9.0)
        assert not isinstance(error.value, WaitExpired)

    assert with_waits(main) == []


def test_shutdown_is_not_taken_for_a_deadline() -> None:
    async def main(waits: Waits) -> None:
        task = asyncio.create_task(waits.on(after(10.0), what="a turn", deadline_s=5.0))
        await asyncio.sleep(1.0)
        assert waits.now() == {"a turn": 1}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits.now() == {}

    assert with_waits(main) == []


def test_a_cancellation_from_elsewhere_in_the_instant_of_the_deadline_is_not_swallowed() -> None:
    async def main(waits: Waits) -> None:
        waiting = asyncio.create_task(waits.on(after(10.0), what="a turn", deadline_s=1.0))
        asyncio.get_running_loop().call_at(1.0, waiting.cancel)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert waits.now() == {}

    assert with_waits(main) == []


def test_whoever_swallows_the_deadline_is_not_left_cancelled() -> None:
    async def stubborn() -> str:
        try:
            return await after(10.0)
        except asyncio.CancelledError:
            return "late"

    async def main(waits: Waits) -> None:
        assert await waits.on(stubborn(), what="a turn", deadline_s=1.0) == "late"
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert await waits.on(after(1.0), what="another", deadline_s=5.0) == "done"

    assert with_waits(main) == []


def test_a_wait_within_a_wait_expires_at_its_own_deadline() -> None:
    async def main(waits: Waits) -> None:
        async def inner() -> str:
            with pytest.raises(WaitExpired, match="the inner"):
                await waits.on(after(50.0), what="the inner", deadline_s=1.0)
            await asyncio.sleep(50.0)
            return "never"

        with pytest.raises(WaitExpired, match="the outer") as expired:
            await waits.on(inner(), what="the outer", deadline_s=2.0)
        assert expired.value.waited_s == 2.0

    assert [(event["t"], event["data"]["what"]) for event in with_waits(main)] == [
        (1.0, "the inner"),
        (2.0, "the outer"),
    ]
