"""A wire to an actor that has a loop's turn of its own and is met at a socket: whatever breaks there is told once, with its
cause, answers come by themselves, and a control process that does not read stops no actor."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollart.core.types import Failure
from rollart.runtime.actors import InlineActors, InlineHandle
from rollart.runtime.answering import Answering
from rollart.runtime.line import ANSWER, Address, Line, Offer
from rollart.runtime.wire import Wire
from rollart.sched.pacing import LEAST_ANSWER_PAUSE_S, MOST_ANSWER_PAUSE_S, answer_pause_s

BEAT_S = 0.02
END_S = 20.0
"""Longest wait of a test for what must come; never waited out when things work."""


class Echo(Answering):
    """Answers what it is told."""

    def __init__(self, mean_s: float = 0.0, beat_s: float = BEAT_S) -> None:
        super().__init__(beat_s=beat_s)
        self._mean_s = mean_s
        self.batches: list[list[Any]] = []
        self.items: list[Any] = []
        self.taken_out = 0

    def take_in(self, items: Sequence[Any]) -> None:
        self.batches.append(list(items))
        self.items += items
        self.ring()

    def take_out(self) -> object:
        self.taken_out += 1
        items, self.items = self.items, []
        return items


class Refusing(Echo):
    def take_in(self, items: Sequence[Any]) -> None:
        raise ValueError("two of a kind")


class Unspeaking(Echo):
    def take_out(self) -> object:
        return lambda: None


class Garbling(Echo):
    def take_out(self) -> object:
        return Unreadable()


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class Mute(Echo):
    def _push(self) -> None:
        pass


class Elsewhere(Echo):
    async def listen(self, offer: Offer) -> Address:
        return str(Path(offer.folder) / "nothing")


class Dying(Elsewhere):
    async def listen(self, offer: Offer) -> Address:
        self._ready.set()
        return await super().listen(offer)

    async def hold(self) -> None:
        await self._ready.wait()
        raise OSError("ended for want of memory")


class Unlistening(Echo):
    async def listen(self, offer: Offer) -> Address:
        raise OSError("no port is free")


class Apart:
    """An actor's handle that does not look like one of this process."""

    def __init__(self, handle: InlineHandle) -> None:
        self.handle = handle

    def __getattr__(self, method: str) -> Any:
        return getattr(self.handle, method)

    @property
    def actor(self) -> Any:
        return self.handle._actor


class Wired:
    """A wire, and what has come out of it."""

    def __init__(
        self, folder: Path, cls: type[Echo], *args: object, silent_s: float = END_S, pause_s: float = 0.0
    ) -> None:
        self.folder = folder
        self.apart = Apart(InlineActors().start(cls, *args))
        self.got: list[Any] = []
        self.lost: list[Failure] = []
        self.changed = asyncio.Event()
        self.wire: Wire[object, list[Any]] = Wire(
            self.apart, where="engine", on_poll=self._take, on_lost=self._told, poll_s=BEAT_S, silent_s=silent_s,
            cause_s=BEAT_S, pause_s=pause_s, sockets=folder,
        )  # fmt: skip
        self.wire.open()

    def _take(self, items: list[Any]) -> None:
        self.got += items
        self.changed.set()

    def _told(self, why: Failure) -> None:
        self.lost.append(why)
        self.changed.set()

    async def until(self, count: int) -> None:
        """That many items have come."""
        async with asyncio.timeout(END_S):
            while len(self.got) < count and not self.lost:
                self.changed.clear()
                await self.changed.wait()

    async def loss(self) -> Failure:
        """What the wire says of its loss, after time enough to say it twice."""
        async with asyncio.timeout(END_S):
            while not self.lost:
                self.changed.clear()
                await self.changed.wait()
        await asyncio.sleep(3 * BEAT_S)
        [why] = self.lost
        self.end()
        return why

    def end(self) -> None:
        self.wire.close()
        if self.apart.actor is not None and self.apart.actor._line is not None:
            self.apart.actor._line.close()
        assert list(self.folder.iterdir()) == []


def test_items_sent_at_once_go_as_one_batch_and_answers_come_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo)
        for item in range(3):
            wired.wire.send(item)
        await wired.until(3)
        for item in range(3, 50):
            wired.wire.send(item)
            await asyncio.sleep(0)
        await wired.until(50)
        assert wired.got == list(range(50))
        sent, answered = wired.wire.traffic
        assert wired.apart.actor.batches[0] == [0, 1, 2]
        assert sent == len(wired.apart.actor.batches) > 2
        assert answered >= 2
        assert wired.lost == []
        wired.end()

    asyncio.run(main())


def test_what_comes_within_a_pause_leaves_together_either_way(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo, 9.0, 9.0, pause_s=0.3)
        wired.wire.send(0)
        await wired.until(1)
        for item in (1, 2, 3):
            wired.wire.send(item)
            await asyncio.sleep(0)
        await wired.until(4)
        assert wired.apart.actor.batches == [[0], [1, 2, 3]]
        for item in (4, 5, 6):
            wired.apart.actor.take_in([item])
            await asyncio.sleep(0)
        before = wired.apart.actor.taken_out
        await wired.until(7)
        assert wired.apart.actor.taken_out == before + 1
        wired.end()

    asyncio.run(main())


def test_the_pause_between_answers_follows_what_one_takes() -> None:
    assert answer_pause_s(0.0) == answer_pause_s(0.001) == LEAST_ANSWER_PAUSE_S
    assert answer_pause_s(0.04) == pytest.approx(0.01)
    assert answer_pause_s(5.0) == MOST_ANSWER_PAUSE_S

    actor = Echo()
    for _ in range(200):
        actor.took(0.1)
    assert actor._mean_s == pytest.approx(0.1, rel=0.01)
    actor.took(0.2)
    assert 0.1 < actor._mean_s < 0.11


def test_an_actor_that_has_nothing_to_say_says_so_and_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo, silent_s=0.3)
        async with asyncio.timeout(END_S):
            while wired.wire.traffic[1] < 30 and not wired.lost:
                wired.changed.clear()
                await wired.changed.wait()
        assert wired.lost == []
        wired.end()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cls", "kind", "detail"),
    [
        (Refusing, "raised", "ValueError: two of a kind"),
        (Unspeaking, "raised", "AttributeError: Can't pickle local object"),
        (Garbling, "raised", "an answer could not be taken: ValueError: "),
        (Mute, "lost", "silent for 0.1 s"),
        (Elsewhere, "lost", "it cannot be reached: no connection: No such file"),
        (Dying, "raised", "OSError: ended for want of memory"),
        (Unlistening, "raised", "OSError: no port is free"),
    ],
)
def test_what_breaks_is_told_once_with_its_cause(tmp_path: Path, cls: type[Echo], kind: str, detail: str) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, cls, silent_s=0.08 if cls is Mute else END_S)
        wired.wire.send("a")
        why = await wired.loss()
        assert (why.where, why.kind) == ("engine", kind)
        assert why.detail.startswith(detail)
        wired.wire.send("b")
        await asyncio.sleep(0)

    asyncio.run(main())


def test_an_item_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo)
        wired.wire.send(lambda: None)
        assert (await wired.loss()).detail.startswith("a batch could not be sent: ")

    asyncio.run(main())


def test_the_end_of_an_actor_is_told_at_once_in_rays_words_and_else_in_our_own(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo)
        wired.wire.send("a")
        await wired.until(1)
        actor = wired.apart.actor
        wired.apart.handle.end()
        assert (await wired.loss()).detail == "the actor was ended"
        assert actor._line is None
        wired = Wired(tmp_path, Echo)
        wired.wire.send("a")
        await wired.until(1)
        wired.apart.actor._line.close()
        assert (await wired.loss()).detail == "its connection has ended: it was closed at the other end"

    asyncio.run(main())


def test_what_an_actor_said_before_its_end_is_taken_before_that_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo)
        wired.wire.send("a")
        await wired.until(1)
        wired.apart.actor.items.append("last")
        wired.apart.actor._push()
        wired.apart.handle.end()
        assert (await wired.loss()).detail == "the actor was ended"
        assert wired.got == ["a", "last"]

    asyncio.run(main())


def test_an_actor_that_is_ended_on_purpose_is_not_told_as_lost(tmp_path: Path) -> None:
    async def main() -> None:
        wired = Wired(tmp_path, Echo)
        wired.wire.send("a")
        await wired.until(1)
        why = Failure(where="engine", kind="lost", retryable=True, detail="released")
        wired.wire.send("b")
        wired.wire.end(why)
        wired.apart.actor._line.close()
        await asyncio.sleep(3 * BEAT_S)
        assert (wired.lost, wired.wire.lost, wired.apart.actor.batches) == ([], why, [["a"]])
        wired.end()

    asyncio.run(main())


def test_a_control_process_that_does_not_read_stops_no_actor_and_gets_all_when_it_does() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        actor = Echo()
        actor._line = Line(here, taken=actor._taken, ended=actor._hung_up, freed=actor._push)
        there.setblocking(False)
        number = 0
        while not actor._line.clogged:
            actor.take_in([number] * 500)
            actor.tend()
            number += 1
        pushed, last = actor.taken_out, number + 300
        for one in range(number, last):
            actor.take_in([one] * 500)
            actor.tend()
        assert actor.taken_out == pushed, "answers stay where they are made"
        assert len(actor.items) >= 500 * 300
        got, more = list[int](), asyncio.Event()

        def take(kind: int, body: memoryview) -> None:
            got.extend(pickle.loads(body) if kind == ANSWER else [])
            more.set()

        reader = Line(there, taken=take, ended=print)
        async with asyncio.timeout(END_S):
            while len(got) < 500 * last:
                more.clear()
                await more.wait()
        assert got == [one for one in range(last) for _ in range(500)]
        assert actor.taken_out <= pushed + 2
        reader.close()
        actor._line.close()

    asyncio.run(main())


def test_a_piece_of_work_that_holds_the_loop_delays_no_batch_by_another(tmp_path: Path) -> None:
    """Between two pieces the actor looks itself: the loop would come round to the socket a piece later."""

    async def main() -> None:
        here, there = socket.socketpair()
        actor = Echo()
        actor._line = Line(here, taken=actor._taken, ended=actor._hung_up, freed=actor._push)
        control = Line(there, taken=lambda kind, body: None, ended=print)
        control.send(1, pickle.dumps(["a"]))
        actor.tend()
        assert actor.batches == [["a"]]
        actor._line.close()
        control.close()

    asyncio.run(main())
