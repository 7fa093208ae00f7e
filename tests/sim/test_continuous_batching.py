"""Continuous batching as a fluid: exact where closed forms are, near a step-by-step engine elsewhere, never too much cache."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import InvariantBroken
from rollart.sim.batching import Batching, BatchRules
from rollart.sim.loop import run
from rollart.sim.pace import Stopped, Work

BASE_S, ROW_S, PROMPT_S = 0.01, 0.001, 0.0001


class Linear:
    """A step costs something, each row and each prompt token more."""

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        return BASE_S + ROW_S * batch + PROMPT_S * prefill


@dataclass
class Served:
    """What became of requests 0..n-1 that were started at given times."""

    done_s: dict[int, float] = field(default_factory=dict)
    stopped: dict[int, Stopped] = field(default_factory=dict)
    most_held: float = 0.0


def serve(batching: Batching, arrivals: list[tuple[float, Work]]) -> Served:
    served = Served()

    def finisher(index: int) -> Callable[[], None]:
        def done() -> None:
            assert index not in served.done_s
            served.done_s[index] = asyncio.get_running_loop().time()
            served.most_held = max(served.most_held, batching._held)
            served.stopped[index] = batching.stop(index)

        return done

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for index, (at_s, work) in enumerate(arrivals):
            loop.call_at(at_s, batching.start, index, work, finisher(index))
        while len(served.done_s) < len(arrivals):
            await asyncio.sleep(0.25)
            served.most_held = max(served.most_held, batching._held)

    run(main())
    return served


def rules(**changed: object) -> BatchRules:
    return BatchRules(**{"max_live": 64, "step_tokens": 512, "kv_tokens": 1e9, **changed})  # type: ignore[arg-type]


def a_cost(prefill: float, batch: float) -> float:
    """On the grid of contexts a prompt's chunk is known to 2.5 %."""
    return BASE_S + ROW_S * batch + PROMPT_S * prefill


def test_one_request_takes_its_prompts_steps_and_one_step_per_further_token() -> None:
    served = serve(Batching(Linear(), rules()), [(0.0, Work(read=1024, context=1024, wanted=11))])
    expected = 2 * a_cost(512, 0) + 10 * a_cost(0, 1)
    assert served.done_s[0] == pytest.approx(expected, rel=0.02)
    assert served.stopped[0] == Stopped(11)


def test_equal_requests_of_one_instant_share_every_step() -> None:
    works = [(0.0, Work(read=10, context=10, wanted=101)) for _ in range(8)]
    served = serve(Batching(Linear(), rules()), works)
    expected = a_cost(80, 0) + 100 * a_cost(0, 8)
    assert set(served.done_s.values()) == {served.done_s[0]}
    assert served.done_s[0] == pytest.approx(expected, rel=0.01)


def test_an_engine_that_does_not_mix_stands_still_while_it_reads() -> None:
    arrivals = [(0.0, Work(read=1, context=1, wanted=50)), (0.2, Work(read=4096, context=4096, wanted=1))]
    mixed = serve(Batching(Linear(), rules()), arrivals)
    apart = serve(Batching(Linear(), rules(mixed=False)), arrivals)
    assert apart.done_s[0] > mixed.done_s[0] + 0.05


def test_no_more_are_live_than_may_be_and_the_rest_wait_in_order() -> None:
    works = [(0.0, Work(read=1, context=1, wanted=10)) for _ in range(6)]
    served = serve(Batching(Linear(), rules(max_live=2)), works)
    order = sorted(served.done_s, key=served.done_s.__getitem__)
    assert order == [0, 1, 2, 3, 4, 5]
    assert served.done_s[5] > 2.5 * served.done_s[0]


def test_a_higher_priority_is_read_first() -> None:
    works = [(0.0, Work(read=1, context=1, wanted=5, priority=index // 2)) for index in range(4)]
    served = serve(Batching(Linear(), rules(max_live=1)), works)
    assert sorted(served.done_s, key=served.done_s.__getitem__) == [2, 3, 0, 1]


def test_a_full_cache_preempts_the_youngest_which_is_read_again() -> None:
    works = [(0.0, Work(read=40, context=40, wanted=60)) for _ in range(2)]
    batching = Batching(Linear(), rules(kv_tokens=150))
    served = serve(batching, works)
    assert batching.preemptions == 1
    assert served.stopped[0] == Stopped(60)
    tokens, reread, _ = served.stopped[1]
    assert tokens == 60
    assert 40 < reread < 100
    assert served.done_s[1] > served.done_s[0]


def test_idle_cache_goes_before_anyone_is_preempted() -> None:
    left = 100.0

    def evict(tokens: float) -> float:
        nonlocal left
        freed = min(left, tokens)
        left -= freed
        return freed

    batching = Batching(Linear(), rules(kv_tokens=250), evict=evict, idle=lambda: left)
    serve(batching, [(0.0, Work(read=40, context=40, wanted=60)) for _ in range(2)])
    assert batching.preemptions == 0
    assert left < 60


def test_what_can_never_have_room_is_refused_at_once() -> None:
    async def main() -> None:
        with pytest.raises(InvariantBroken, match="have no room in a cache of 50"):
            Batching(Linear(), rules(kv_tokens=50)).start(0, Work(read=40, context=40, wanted=11), lambda: None)

    run(main())


def test_progress_is_seen_between_events_and_a_stop_takes_it() -> None:
    batching = Batching(Linear(), rules())
    seen: list[int] = []

    async def main() -> None:
        batching.start(0, Work(read=1, context=1, wanted=1000), lambda: None)
        for _ in range(5):
            await asyncio.sleep(0.5)
            seen.append(batching.tokens(0))
        assert batching.stop(0).tokens == seen[-1]
        assert batching.stop(0) == Stopped(0)
        await asyncio.sleep(10)

    run(main())
    assert all(later - earlier == pytest.approx(0.5 / a_cost(0, 1), abs=1) for earlier, later in pairwise(seen))
    assert batching._held == pytest.approx(0)
    assert batching.busy_s == pytest.approx(2.5)


def reference(arrivals: list[tuple[float, Work]], limits: BatchRules) -> dict[int, float]:
    """The same step by step: each step reads what fits beside the rows that decode."""
    now, done, left, read = 0.0, dict[int, float](), dict[int, int](), dict[int, int]()
    pending = sorted(range(len(arrivals)), key=lambda index: arrivals[index][0])
    while len(done) < len(arrivals):
        while pending and arrivals[pending[0]][0] <= now + 1e-12:
            index = pending.pop(0)
            read[index] = max(1, arrivals[index][1].read)
        decoding = [index for index in left if left[index] > 0]
        budget, chunk = limits.step_tokens - len(decoding), 0
        ready: list[int] = []
        for index in list(read):
            if len(decoding) + len(ready) >= limits.max_live or budget <= 0:
                break
            part = min(read[index], budget)
            read[index] -= part
            budget -= part
            chunk += part
            if read[index] == 0:
                ready.append(index)
        if not decoding and not chunk:
            now = arrivals[pending[0]][0]
            continue
        now += Linear().step_s(len(decoding), 0.0, prefill=chunk)
        for index in ready:
            del read[index]
            left[index] = arrivals[index][1].wanted
        for index in (*decoding, *ready):
            left[index] -= 1
            if left[index] == 0:
                done[index] = now
                del left[index]
    return done


WORKS = st.lists(
    st.tuples(
        st.floats(0, 3).map(lambda seconds: round(seconds, 2)),
        st.tuples(st.integers(1, 1500), st.integers(1, 200)).map(
            lambda two: Work(read=two[0], context=two[0], wanted=two[1])
        ),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=25, deadline=None)
@given(WORKS)
def test_the_fluid_is_near_a_step_by_step_engine(arrivals: list[tuple[float, Work]]) -> None:
    limits = rules(max_live=16)
    fluid, exact = serve(Batching(Linear(), limits), arrivals).done_s, reference(arrivals, limits)
    assert max(fluid.values()) == pytest.approx(max(exact.values()), rel=0.06, abs=0.1)
    mean = math.fsum(fluid.values()) / len(fluid), math.fsum(exact.values()) / len(exact)
    assert mean[0] == pytest.approx(mean[1], rel=0.08, abs=0.1)


@settings(max_examples=25, deadline=None)
@given(WORKS, st.integers(1700, 4000))
def test_whatever_comes_everyone_is_served_within_the_cache(arrivals: list[tuple[float, Work]], kv_tokens: int) -> None:
    batching = Batching(Linear(), rules(max_live=16, kv_tokens=kv_tokens))
    served = serve(batching, arrivals)
    assert [served.stopped[index].tokens for index in range(len(arrivals))] == [work.wanted for _, work in arrivals]
    assert served.most_held <= kv_tokens + 1e-3
    assert batching._held == pytest.approx(0, abs=1e-3)
    assert not batching._in
    assert (batching.preemptions == 0) == all(stopped.reread == 0 for stopped in served.stopped.values())


class Asked:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float, float]] = []

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        self.steps.append((batch, context, prefill, prefill_context))
        return a_cost(prefill, batch)


def test_steps_are_asked_for_on_a_grid_so_that_few_of_them_differ() -> None:
    asked = Asked()
    works = [(0.3 * n, Work(read=200 + 7 * n, context=900 + 31 * n, wanted=40 + n)) for n in range(200)]
    serve(Batching(asked, rules()), works)
    assert len(asked.steps) > 400
    assert len(set(asked.steps)) < len(asked.steps) / 2
    chunks = sorted({chunk for _, _, chunk, _ in asked.steps if chunk})
    assert all(larger / less > 1.09 for less, larger in pairwise(chunks))
