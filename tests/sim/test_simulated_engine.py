"""What the simulated engine promises beyond its port: exact times, and nothing sampled while weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollart.core.resources import EngineInfo
from rollart.core.types import (
    Fingerprint,
    Manifest,
    RequestId,
    Sampling,
    Segment,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run


def serving(script: Callable[[SimEngine], Awaitable[None]]) -> None:
    """An engine with 0.125 s a token and 1 s an apply; version 1 is fetched."""

    async def main() -> None:
        info = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1 << 20, fingerprint="bitwise")
        engine = SimEngine(info, EngineModel(token_s=0.125, prefill_token_s=0.01, apply_s=1.0))
        await engine.prefetch(Manifest(version=1, fingerprint=Fingerprint(digest="one")))
        await script(engine)

    run(main())


def ask(name: str, *, context: int = 0, max_tokens: int = 8, min_version: Version = 0) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(name), 0, 0, 0), model="policy", purpose="train", domain="t",
        context=Segment(pieces=(Tokens(n_tokens=context),)), max_tokens=max_tokens, sampling=Sampling(),
        min_version=min_version,
    )  # fmt: skip


def apply(engine: SimEngine) -> asyncio.Task[object]:
    return asyncio.create_task(engine.apply(1, kept="rebuild", pinned_deadline_s=0.0))


def test_a_turn_takes_its_prompt_and_its_tokens() -> None:
    async def script(engine: SimEngine) -> None:
        answer = await engine.generate(ask("t", context=100))
        assert asyncio.get_running_loop().time() == 2.0
        assert (answer.prefilled_tokens, answer.rebuilt_tokens) == (100, 0)

    serving(script)


def test_nothing_is_sampled_while_weights_change() -> None:
    async def script(engine: SimEngine) -> None:
        early = asyncio.create_task(engine.generate(ask("early")))
        await asyncio.sleep(0.5)
        applying = apply(engine)
        await asyncio.sleep(0.5)
        late = asyncio.create_task(engine.generate(ask("late")))
        for _ in range(5):
            assert [live.n_tokens for live in engine.book().live.values()][:1] == [4]
            assert sum(engine.book().sampled.values()) == 4
            await asyncio.sleep(0.1)
        await applying
        one, other = await early, await late
        assert [(span.version, span.n_tokens) for span in one.tokens.spans] == [(0, 4), (1, 4)]
        assert [(span.version, span.n_tokens) for span in other.tokens.spans] == [(1, 8)]
        assert asyncio.get_running_loop().time() == 2.5

    serving(script)


def test_a_turn_can_be_aborted_while_weights_change() -> None:
    async def script(engine: SimEngine) -> None:
        turn = asyncio.create_task(engine.generate(ask("t")))
        await asyncio.sleep(0.5)
        applying = apply(engine)
        await asyncio.sleep(0.5)
        await engine.abort([ask("t").id])
        answer = await turn
        assert (answer.finish, answer.tokens.n_tokens) == ("aborted", 4)
        await applying
        assert not engine.book().live

    serving(script)


def test_a_held_turn_takes_no_time_of_its_own_before_its_version_comes() -> None:
    async def script(engine: SimEngine) -> None:
        turn = asyncio.create_task(engine.generate(ask("t", min_version=1)))
        await asyncio.sleep(5.0)
        assert sum(engine.book().sampled.values()) == 0
        await apply(engine)
        await turn
        assert asyncio.get_running_loop().time() == 7.0

    serving(script)
