"""A simulated engine that gives its memory away: nothing live, no cache, no sampling, until it is woken."""

from __future__ import annotations

import asyncio

import pytest

from rollart.core.resources import EngineInfo
from rollart.core.types import Generation, Manifest, RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run

INFO = EngineInfo(
    id="engine-0", lease="lease-1", pool="a", role="mixed", kv_tokens=1 << 20, fingerprint="bitwise", version=-1
)
MODEL = EngineModel(token_s=0.1, prefill_token_s=0.001, apply_s=1.0, sleep_s=2.0, wake_s=3.0)


def a_request(turn: int, context: int) -> TurnRequest:
    pieces = (Tokens(n_tokens=context),)
    return TurnRequest(
        id=RequestId(traj=TrajId("train/a/0/0/0"), attempt=0, turn=turn, part=0), model="policy", purpose="train", domain="a",
        context=Segment(pieces=pieces), max_tokens=10, sampling=Sampling(),
    )  # fmt: skip


async def ready(engine: SimEngine) -> None:
    await engine.prefetch(Manifest(version=0))
    await engine.apply(0, kept="rebuild", pinned_deadline_s=0.0)


def test_live_requests_and_later_ones_are_held_until_it_wakes() -> None:
    async def main() -> None:
        engine, loop = SimEngine(INFO, MODEL), asyncio.get_running_loop()
        await ready(engine)
        live = asyncio.ensure_future(engine.generate(a_request(0, 100)))
        await asyncio.sleep(0.55)
        began = loop.time()
        await engine.sleep()
        assert loop.time() - began == pytest.approx(2.0)
        held = asyncio.ensure_future(engine.generate(a_request(1, 50)))
        await engine.sleep()  # is asleep: takes no time
        await asyncio.sleep(100.0)
        assert not live.done()
        assert not held.done()
        assert engine.book().sampled == {"train": 4}
        began = loop.time()
        await engine.wake()
        await engine.wake()
        assert loop.time() - began == pytest.approx(3.0)
        cut: Generation = await live
        assert (cut.finish, cut.tokens.n_tokens, cut.rebuilt_tokens) == ("length", 10, 104)
        assert loop.time() - began == pytest.approx(3.0 + 0.104 + 0.6)
        assert (await held).finish == "length"

    run(main())


def test_a_request_that_is_aborted_while_it_sleeps_leaves_no_cache() -> None:
    async def main() -> None:
        engine = SimEngine(INFO, MODEL)
        await ready(engine)
        request = a_request(0, 100)
        live = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0.55)
        await engine.sleep()
        await engine.abort([request.id])
        assert ((await live).finish, (await live).tokens.n_tokens) == ("aborted", 4)
        assert engine._prefixes.idle_tokens == 0
        await engine.wake()
        assert (await engine.generate(a_request(1, 110))).rebuilt_tokens == 104

    run(main())


def test_no_cache_survives_and_what_is_read_again_counts_as_rebuilt() -> None:
    async def main() -> None:
        engine = SimEngine(INFO, MODEL)
        await ready(engine)
        first = await engine.generate(a_request(0, 100))
        assert (first.prefilled_tokens, first.rebuilt_tokens) == (100, 0)
        warm = await engine.generate(a_request(1, 130))
        assert (warm.prefilled_tokens, warm.rebuilt_tokens) == (20, 0)
        await engine.sleep()
        await engine.wake()
        cold = await engine.generate(a_request(2, 150))
        assert (cold.prefilled_tokens, cold.rebuilt_tokens) == (10, 140)

    run(main())


def test_weights_may_be_applied_while_it_sleeps() -> None:
    async def main() -> None:
        engine = SimEngine(INFO, MODEL)
        await ready(engine)
        await engine.sleep()
        await engine.prefetch(Manifest(version=1))
        applied = await engine.apply(1, kept="rebuild", pinned_deadline_s=0.0)
        assert getattr(applied, "exposed_s", None) == 0.0
        await engine.wake()
        after = await engine.generate(a_request(0, 100))
        assert [span.version for span in after.tokens.spans] == [1]

    run(main())


def test_an_engine_without_prefix_cache_reads_each_turn_anew() -> None:
    async def main() -> None:
        engine = SimEngine(INFO, EngineModel(token_s=0.1, caches=False))
        await ready(engine)
        await engine.generate(a_request(0, 100))
        again = await engine.generate(a_request(1, 130))
        assert (again.prefilled_tokens, again.rebuilt_tokens) == (20, 110)

    run(main())
