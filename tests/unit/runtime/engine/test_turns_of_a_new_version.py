"""A turn that comes over the wire before the word that its version is served: nobody has it earlier, nor at all without."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

from rollart.core.errors import EngineError
from rollart.core.resources import EngineInfo
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Fingerprint,
    Generation,
    Purpose,
    RequestId,
    Sampling,
    Segment,
    Span,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.runtime.actors import InlineActors
from rollart.runtime.engine.actor import EnginePoll
from rollart.runtime.engine.remote import RemoteEngine

INFO = EngineInfo(id="engine-0", lease="lease-0", pool="default", role="mixed", kv_tokens=64, fingerprint="bitwise")
SOON_S = 0.05
APPLIED = Applied(fingerprint=Fingerprint(digest="d"))
PURPOSE: Purpose = "train"


class Overtaken:
    """Its answers come when they are told to, and its replies to an apply when `replies` is set."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[EnginePoll] = asyncio.Queue()
        self.replies = asyncio.Event()
        self.fails = False

    async def submit(self, blob: bytes) -> None:
        pickle.loads(blob)

    async def poll(self, wait_s: float) -> bytes:
        return pickle.dumps(await self.answers.get())

    async def apply(self, version: Version, kept: str, pinned_s: float) -> Applied:
        await self.replies.wait()
        if self.fails:
            raise EngineError("it did not work")
        return APPLIED


def asked(turn: int) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId("t"), 0, turn, 0), model="policy", purpose=PURPOSE, domain="t",
        context=Segment(pieces=(Tokens(n_tokens=4),)), max_tokens=8, sampling=Sampling(),
    )  # fmt: skip


def answered(turn: int, versions: Sequence[Version]) -> EnginePoll:
    spans = tuple(Span(version=version, n_tokens=1) for version in versions)
    generation = Generation(tokens=Tokens(n_tokens=len(spans), spans=spans), finish="stop")
    return EnginePoll.of([(asked(turn).id, generation)], EngineBook(sampled={PURPOSE: turn + 1}))


async def two_turns(log: list[str], *, fails: bool = False, lost: bool = False) -> tuple[Generation, Generation]:
    """Turn 0 was sampled under version 0, turn 1 under 0 and 1; both come while the apply of 1 is under way."""
    actor = Overtaken()
    actor.fails = fails
    handle = InlineActors().start(lambda: actor)  # type: ignore[arg-type]
    engine = RemoteEngine(INFO, handle, lambda name, why: log.append("lost"))
    engine.open()

    async def turn(index: int) -> Generation:
        answer = await engine.generate(asked(index))
        log.append(f"turn {index}")
        return answer

    async def apply() -> None:
        outcome = await engine.apply(1, kept="rebuild", pinned_deadline_s=0.0)
        log.append("failed" if isinstance(outcome, Failure) else "applied")

    turns, applying = [asyncio.create_task(turn(index)) for index in range(2)], asyncio.create_task(apply())
    actor.answers.put_nowait(answered(0, [0]))
    actor.answers.put_nowait(answered(1, [0, 1]))
    await asyncio.sleep(SOON_S)
    log.append(f"book of {sum(engine.book().sampled.values())}")
    if lost:
        InlineActors().kill(handle)
    else:
        actor.replies.set()
    first, second = await asyncio.gather(*turns)
    await applying
    engine.close()
    return first, second


def test_it_waits_for_the_word_and_the_turn_before_it_does_not() -> None:
    log: list[str] = []
    first, second = asyncio.run(two_turns(log))
    assert (first.finish, second.finish) == ("stop", "stop")
    assert log == ["turn 0", "book of 1", "applied", "turn 1"]


def test_an_apply_that_fails_lets_it_through() -> None:
    log: list[str] = []
    _, second = asyncio.run(two_turns(log, fails=True))
    assert second.finish == "stop"
    assert log == ["turn 0", "book of 1", "failed", "turn 1"]


def test_it_is_lost_with_an_engine_that_never_gave_the_word() -> None:
    log: list[str] = []
    first, second = asyncio.run(two_turns(log, lost=True))
    assert first.finish == "stop"
    assert second.finish == "failed"
    assert second.failure is not None
    assert second.failure.kind == "lost"
    assert "lost" in log
