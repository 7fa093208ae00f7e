"""Between a proxy and its actor: whatever breaks there is told once, with its cause, and nothing is awaited for ever."""

from __future__ import annotations

import asyncio
import pickle

from rollart.core.types import Failure
from rollart.runtime.actors import InlineActors
from rollart.runtime.wire import Wire

POLL_S = 0.02
SILENT_S = 0.1
END_S = 5.0
"""Longest wait of a test for what must come; never waited out when things work."""


class Echo:
    """Answers each poll with what was submitted since the last one; takes a batch only when it may."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate
        self.submits = 0
        self.items: list[str] = []

    async def submit(self, blob: bytes) -> None:
        self.submits += 1
        await self.gate.wait()
        self.items += pickle.loads(blob)

    async def poll(self, wait_s: float) -> bytes:
        await asyncio.sleep(wait_s)
        items, self.items = self.items, []
        return pickle.dumps(items)


class Silent(Echo):
    async def poll(self, wait_s: float) -> bytes:
        await asyncio.Event().wait()
        return b""


class Refusing(Echo):
    async def submit(self, blob: bytes) -> None:
        raise ValueError("two of a kind")


class Garbled(Echo):
    async def poll(self, wait_s: float) -> bytes:
        return b"not a pickle"


class Wired:
    """A wire to an inline actor, and what has come out of it."""

    def __init__(self, cls: type[Echo], *, silent_s: float = END_S, pause_s: float = 0.0) -> None:
        self.gate = asyncio.Event()
        self.handle = InlineActors().start(cls, self.gate)
        self.got: list[str] = []
        self.lost: list[Failure] = []
        self.something = asyncio.Event()
        self.wire: Wire[object, list[str]] = Wire(
            self.handle,
            where="engine",
            on_poll=self.take,
            on_lost=self.told,
            poll_s=POLL_S,
            silent_s=silent_s,
            pause_s=pause_s,
        )
        self.wire.open()

    def take(self, items: list[str]) -> None:
        if "bad" in items:
            raise KeyError("bad")
        self.got += items
        if items:
            self.something.set()

    def told(self, why: Failure) -> None:
        self.lost.append(why)
        self.something.set()

    async def end(self) -> list[Failure]:
        """What the wire says of its loss, after time enough to say it twice."""
        async with asyncio.timeout(END_S):
            await self.something.wait()
        await asyncio.sleep(2 * POLL_S)
        self.wire.close()
        return self.lost


def test_an_actor_that_never_answers_is_lost() -> None:
    async def main() -> None:
        [why] = await Wired(Silent, silent_s=SILENT_S).end()
        assert (why.where, why.kind, why.detail) == ("engine", "lost", "silent for 0.12 s")

    asyncio.run(main())


def test_an_actor_that_answers_nothing_new_is_not_lost() -> None:
    async def main() -> None:
        wired = Wired(Echo, silent_s=SILENT_S)
        await asyncio.sleep(2.5 * SILENT_S)
        assert wired.wire.lost is None
        wired.wire.close()

    asyncio.run(main())


def test_time_in_which_this_loop_was_held_up_is_no_silence() -> None:
    async def main() -> None:
        wired = Wired(Echo, silent_s=SILENT_S)
        wired.gate.set()
        await asyncio.sleep(0)
        until = asyncio.get_running_loop().time() + 2 * SILENT_S
        while asyncio.get_running_loop().time() < until:
            pass
        wired.wire.send("late")
        assert await wired.end() == []
        assert wired.got == ["late"]

    asyncio.run(main())


def test_batches_do_not_wait_for_one_another() -> None:
    async def main() -> None:
        wired = Wired(Echo)
        for item in "abc":
            wired.wire.send(item)
            await asyncio.sleep(0.01)
        assert wired.handle._actor.submits == 3
        wired.gate.set()
        assert await wired.end() == []
        assert wired.got == ["a", "b", "c"]

    asyncio.run(main())


def test_what_is_sent_within_a_pause_goes_as_one_batch_and_the_first_at_once() -> None:
    async def main() -> None:
        wired = Wired(Echo, pause_s=0.5)
        wired.wire.send("a")
        await asyncio.sleep(0.01)
        for item in "bcd":
            wired.wire.send(item)
            await asyncio.sleep(0)
        assert wired.handle._actor.submits == 1
        await asyncio.sleep(0.6)
        assert wired.wire.traffic[0] == wired.handle._actor.submits == 2
        wired.gate.set()
        assert await wired.end() == []
        assert wired.got == list("abcd")

    asyncio.run(main())


def test_after_a_quiet_moment_nothing_waits_for_the_pause() -> None:
    """Answers in which there is nothing are no reason for one: what comes next would wait for it."""

    async def main() -> None:
        wired = Wired(Echo, pause_s=END_S)
        wired.gate.set()
        for _ in range(100):  # the pause is longer than all of them
            if wired.wire.traffic[1] < 3:
                await asyncio.sleep(POLL_S)
        assert wired.wire.traffic[1] >= 3
        wired.wire.send("a")
        async with asyncio.timeout(END_S / 2):
            await wired.something.wait()
        before = wired.wire.traffic[1]
        await asyncio.sleep(5 * POLL_S)
        assert wired.wire.traffic[1] == before, "an answer that brought something is followed by the pause"
        assert await wired.end() == []

    asyncio.run(main())


def test_a_batch_that_the_actor_refuses_is_not_lost_silently() -> None:
    async def main() -> None:
        wired = Wired(Refusing)
        wired.wire.send("a")
        [why] = await wired.end()
        assert (why.kind, why.detail) == ("raised", "ValueError: two of a kind")

    asyncio.run(main())


def test_a_batch_that_cannot_be_sent_is_told() -> None:
    async def main() -> None:
        wired = Wired(Echo)
        wired.wire.send(lambda: None)
        [why] = await wired.end()
        assert why.detail.startswith("a batch could not be sent: ")

    asyncio.run(main())


def test_an_answer_that_cannot_be_read_or_taken_is_told() -> None:
    async def main() -> None:
        [why] = await Wired(Garbled).end()
        assert why.detail.startswith("an answer could not be taken: UnpicklingError")
        taking = Wired(Echo)
        taking.gate.set()
        taking.wire.send("bad")
        [why] = await taking.end()
        assert why.detail == "an answer could not be taken: KeyError: 'bad'"

    asyncio.run(main())
