"""What a simulated engine has keys and values of: each attempt its own, siblings their prompt, and only what was read."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.resources import EngineInfo
from rollart.core.types import Generation, Manifest, RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.sim.batching import Batching, BatchRules
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run
from rollart.sim.pace import EachAlone, Pace, Stopped, Work
from rollart.sim.prefixes import Key, Prefixes, Taken

PROMPT = 1000


def key(member: int, group: int = 0) -> Key:
    return TrajId(f"train/t/0/{group}/{member}"), 0


def test_after_an_apply_siblings_find_the_prompt_of_the_first_that_comes_and_no_more() -> None:
    prefixes = Prefixes(shares=True)
    assert prefixes.take(key(0), PROMPT, prompt=PROMPT) == Taken(new=PROMPT, rebuilt=0)
    assert prefixes.take(key(1), PROMPT, prompt=PROMPT) == Taken(new=0, rebuilt=0)
    prefixes.keep(key(0), 5000)
    prefixes.keep(key(1), 4000)
    prefixes.invalidate()
    assert prefixes.take(key(0), 5010, prompt=PROMPT) == Taken(new=10, rebuilt=5000)
    assert prefixes.take(key(1), 4010, prompt=PROMPT) == Taken(new=10, rebuilt=4000 - PROMPT)
    assert prefixes.take(key(3), 2000, prompt=300) == Taken(new=1700, rebuilt=0), (
        "a shorter prompt is shared as far as it goes"
    )
    assert prefixes.take(key(2), 2000, prompt=1500) == Taken(new=2000 - PROMPT, rebuilt=0), "a prompt that goes on"


@pytest.mark.parametrize("loses", ["evict", "drop", "forget"])
def test_a_prompt_is_gone_with_the_last_that_held_it(loses: str) -> None:
    prefixes = Prefixes(shares=True)
    for member in (0, 1):
        prefixes.take(key(member), PROMPT, prompt=PROMPT)
        prefixes.keep(key(member), PROMPT)

    def lose(member: int) -> None:
        if loses == "evict":
            prefixes.evict(1)
        else:
            getattr(prefixes, loses)(key(member))

    lose(0)
    assert prefixes.take(key(2), PROMPT, prompt=PROMPT).new == 0, "another holds it"
    prefixes.forget(key(2))
    lose(1)
    assert prefixes.take(key(3), PROMPT, prompt=PROMPT).new == PROMPT
    assert prefixes.idle_tokens == 0


def test_without_sharing_each_reads_its_own_prompt() -> None:
    prefixes = Prefixes()
    assert [prefixes.take(key(member), PROMPT, prompt=PROMPT).new for member in (0, 1)] == [PROMPT, PROMPT]


Move = tuple[int, int, str]
MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 900), st.sampled_from(["turn", "apply", "evict", "forget"])),
    max_size=40,
)


@given(MOVES, st.integers(1, 600))
def test_tokens_are_counted_once_and_idle_ones_are_those_that_are_kept(moves: list[Move], prompt: int) -> None:
    """Nothing is computed for the first time twice; an attempt that has kept all reads what is new alone."""
    prefixes = Prefixes(shares=True)
    context, new, kept = dict.fromkeys(range(4), prompt), dict.fromkeys(range(4), 0), dict[int, int]()
    for member, more, what in moves:
        if what == "apply":
            prefixes.invalidate()
            kept.clear()
        elif what == "evict":
            before = prefixes.idle_tokens
            assert prefixes.evict(more) == before - prefixes.idle_tokens >= min(more, before)
            kept = {index: n for index, n in kept.items() if key(index) in prefixes._valid}
        elif what == "forget":
            prefixes.forget(key(member))
            kept.pop(member, None)
            context[member], new[member] = prompt, 0
        else:
            n = context[member] = context[member] + more
            taken = prefixes.take(key(member), n, prompt=prompt)
            new[member] += taken.new
            assert n - prompt <= new[member] <= n
            if member in kept:
                assert taken == Taken(new=n - kept[member], rebuilt=0)
            prefixes.keep(key(member), n)
            kept[member] = n
        assert prefixes.idle_tokens == sum(kept.values())
    for member in range(4):
        prefixes.forget(key(member))
    assert not prefixes._prompts
    assert not prefixes._computed


# --- what was read -------------------------------------------------------------------------------------------------------


class Linear:
    """A step of 0.1 s, whatever is in it."""

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        return 0.1


def batching(kv_tokens: float = 1e9) -> Batching:
    return Batching(Linear(), BatchRules(max_live=64, step_tokens=100, kv_tokens=kv_tokens))


@pytest.mark.parametrize("pace", [EachAlone(0.1, 0.001), batching()])
def test_a_pace_says_what_is_left_to_be_read(pace: Pace) -> None:
    left: list[Stopped] = []

    async def main() -> None:
        for seconds in (0.0, 0.2501, 0.9, 1.35):
            pace.start("a", Work(read=1000, context=1000, wanted=10), lambda: None)
            await asyncio.sleep(seconds)
            left.append(pace.stop("a"))
            await asyncio.sleep(1.0)

    run(main())
    assert [stopped.unread for stopped in left] == pytest.approx([1000, 750, 100, 0], abs=2)
    assert [stopped.tokens > 0 for stopped in left] == [False, False, False, True]


def test_prompts_that_are_read_together_are_read_one_after_another() -> None:
    stopped: list[int] = []

    async def main() -> None:
        pace = batching()
        for name in "abc":
            pace.start(name, Work(read=30, context=30, wanted=10), lambda: None)
        await asyncio.sleep(0.05)  # half of a step of 90
        stopped.extend(pace.stop(name).unread for name in "acb")
        await asyncio.sleep(1.0)
        assert not pace._in

    run(main())
    assert stopped == pytest.approx([0, 30, 15], abs=1)


def test_a_preempted_request_has_read_again_what_it_had_time_for() -> None:
    ends: dict[str, Stopped] = {}

    async def main() -> None:
        pace = batching(kv_tokens=700)
        pace.start("old", Work(read=300, context=300, wanted=400), lambda: ends.update(old=pace.stop("old")))
        await asyncio.sleep(0.5)
        pace.start("young", Work(read=300, context=300, wanted=400), lambda: None)
        while not pace.preemptions:  # noqa: ASYNC110 - a pace tells nobody
            await asyncio.sleep(0.05)
        ends["young"] = pace.stop("young")
        await asyncio.sleep(100)

    run(main())
    young = ends["young"]
    assert young.tokens > 20
    assert (young.reread, young.unread) == (0, 300 + young.tokens), "it was stopped before it was read again"
    assert ends["old"] == Stopped(400)


INFO = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1 << 20, fingerprint="bitwise", version=-1)
SLOW = EngineModel(token_s=0.1, prefill_token_s=0.001, apply_s=1.0)


async def ready() -> SimEngine:
    engine = SimEngine(INFO, SLOW)
    await serve(engine, 0)
    return engine


async def serve(engine: SimEngine, version: int) -> None:
    await engine.prefetch(Manifest(version=version))
    await engine.apply(version, kept="rebuild", pinned_deadline_s=0.0)


def a_request(turn: int, context: int) -> TurnRequest:
    return TurnRequest(
        id=RequestId(key(0)[0], 0, turn, 0), model="policy", purpose="train", domain="t",
        context=Segment(pieces=(Tokens(n_tokens=context),)), max_tokens=10, sampling=Sampling(),
    )  # fmt: skip


def counts(answer: Generation) -> tuple[int, int]:
    return answer.prefilled_tokens, answer.rebuilt_tokens


def test_an_apply_in_the_middle_of_a_prompt_makes_it_read_again_what_was_read() -> None:
    async def main() -> None:
        engine = await ready()
        asked = asyncio.ensure_future(engine.generate(a_request(0, 1000)))
        await asyncio.sleep(0.4001)
        await serve(engine, 1)
        assert counts(await asked) == (1000, 400)

    run(main())


def test_what_was_not_read_when_a_turn_was_aborted_is_new_in_the_next() -> None:
    async def main() -> None:
        engine = await ready()
        request = a_request(0, 1000)
        asked = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0.4001)
        await engine.abort([request.id])
        assert counts(await asked) == (400, 0)
        assert engine._prefixes.idle_tokens == 400
        assert counts(await engine.generate(a_request(1, 1000))) == (600, 0)

    run(main())


def test_a_rebuild_that_was_cut_short_goes_on_as_a_rebuild() -> None:
    async def main() -> None:
        engine = await ready()
        await engine.generate(a_request(0, 1000))
        await serve(engine, 1)
        request = a_request(1, 1100)
        asked = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0.5001)
        await engine.abort([request.id])
        assert counts(await asked) == (0, 500)
        assert counts(await engine.generate(a_request(2, 1100))) == (90, 510)

    run(main())
