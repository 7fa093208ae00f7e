"""The contract of the engine port.

No contract knows how fast an engine is, or how late it hears of it: turns that something is to meet stay under way until it
has met them.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from itertools import pairwise

from rigs import EngineRig, until

from rollart.control.weights import same_weights
from rollart.core.types import Applied, Failure, Generation, Manifest, RequestId, TurnRequest, Version

FOREVER = float("inf")


async def progress(rig: EngineRig, request: TurnRequest, tokens: int = 1) -> None:
    """Wait until the engine reports that many tokens of a live request."""

    def far_enough() -> bool:
        live = rig.engine.book().live.get(request.id)
        return live is not None and live.n_tokens >= tokens

    await until(far_enough, tick_s=rig.tick_s, what=f"{tokens} tokens of {request.id}")


async def under_way(rig: EngineRig, *requests: TurnRequest, tokens: int = 1) -> list[asyncio.Task[Generation]]:
    """Turns of which that many tokens are there each, and which do not end before `rig.go_on`."""
    rig.hold()
    turns = [asyncio.create_task(rig.engine.generate(request)) for request in requests]
    for request in requests:
        await progress(rig, request, tokens)
    return turns


async def fetched(rig: EngineRig, version: Version) -> Manifest:
    """New weights, which the engine has and does not serve yet."""
    manifest = await rig.publish(version)
    assert await rig.engine.prefetch(manifest) is None
    return manifest


async def served(rig: EngineRig, manifest: Manifest) -> Applied:
    """Serve what was fetched."""
    applied = await rig.engine.apply(manifest.version, kept="rebuild", pinned_deadline_s=FOREVER)
    assert isinstance(applied, Applied)
    assert same_weights(applied.fingerprint, manifest.fingerprint, rig.engine.info)
    return applied


async def serve(rig: EngineRig, version: Version) -> Applied:
    """Bring new weights to the engine."""
    return await served(rig, await fetched(rig, version))


def well_formed(answer: Generation, max_tokens: int) -> None:
    """Spans are versions that never fall, sum to the tokens, and hold no empty one."""
    spans = answer.tokens.spans
    assert answer.tokens.n_tokens == sum(span.n_tokens for span in spans) <= max_tokens
    assert all(span.n_tokens > 0 for span in spans)
    assert all(one.version < other.version for one, other in pairwise(spans))
    assert (answer.failure is not None) == (answer.finish == "failed")


async def a_turn_is_answered_with_its_tokens(rig: EngineRig) -> None:
    answer = await rig.engine.generate(rig.request("one", max_tokens=8))
    well_formed(answer, 8)
    assert answer.finish == "length"
    assert answer.tokens.n_tokens == 8
    assert [span.version for span in answer.tokens.spans] == [0]


async def many_turns_at_once_get_each_its_own_answer(rig: EngineRig) -> None:
    requests = [rig.request(f"t{n}", max_tokens=n) for n in range(1, 25)]
    answers = await asyncio.gather(*map(rig.engine.generate, requests))
    assert [answer.tokens.n_tokens for answer in answers] == list(range(1, 25))


async def an_aborted_turn_answers_with_the_tokens_so_far(rig: EngineRig) -> None:
    request = rig.request("long", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request)
    await rig.engine.abort([request.id])
    answer = await turn
    well_formed(answer, rig.long_tokens)
    assert answer.finish == "aborted"
    assert 0 < answer.tokens.n_tokens < rig.long_tokens


async def aborts_of_unknown_and_of_answered_requests_are_ignored(rig: EngineRig) -> None:
    request = rig.request("done")
    await rig.engine.generate(request)
    await rig.engine.abort([request.id, RequestId(request.id.traj, 7, 7, 7)])
    answer = await rig.engine.generate(rig.request("done", turn=1))
    assert answer.finish == "length"


async def an_aborted_turn_goes_on_from_its_tokens(rig: EngineRig) -> None:
    request = rig.request("long", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request)
    await rig.engine.abort([request.id])
    first = await turn
    rig.go_on()
    context = request.context.extended(first.tokens)
    rest = await rig.engine.generate(rig.request("long", turn=1, context=context, max_tokens=5))
    assert rest.tokens.n_tokens == 5
    assert rest.prefilled_tokens + rest.rebuilt_tokens <= context.n_tokens


async def the_context_of_an_earlier_turn_is_not_computed_again(rig: EngineRig) -> None:
    request = rig.request("two turns")
    first = await rig.engine.generate(request)
    assert first.prefilled_tokens == request.context.n_tokens
    context = request.context.extended(first.tokens)
    second = await rig.engine.generate(rig.request("two turns", turn=1, context=context))
    assert second.rebuilt_tokens == 0
    assert second.prefilled_tokens < request.context.n_tokens


async def a_version_that_was_not_fetched_is_not_applied(rig: EngineRig) -> None:
    applied = await rig.engine.apply(5, kept="rebuild", pinned_deadline_s=0.0)
    assert isinstance(applied, Failure)
    answer = await rig.engine.generate(rig.request("as before"))
    assert [span.version for span in answer.tokens.spans] == [0]


async def an_applied_version_is_served_and_its_fingerprint_is_the_published_one(rig: EngineRig) -> None:
    first, second = await serve(rig, 1), await serve(rig, 3)
    assert first.fingerprint != second.fingerprint
    answer = await rig.engine.generate(rig.request("new"))
    assert [span.version for span in answer.tokens.spans] == [3]


async def fetching_twice_is_fetching_once(rig: EngineRig) -> None:
    manifest = await rig.publish(1)
    assert await rig.engine.prefetch(manifest) is None
    assert await rig.engine.prefetch(manifest) is None
    assert isinstance(await rig.engine.apply(1, kept="rebuild", pinned_deadline_s=0.0), Applied)


async def a_fetch_changes_nothing_that_is_served(rig: EngineRig) -> None:
    assert await rig.engine.prefetch(await rig.publish(1)) is None
    answer = await rig.engine.generate(rig.request("old"))
    assert [span.version for span in answer.tokens.spans] == [0]


async def a_kept_turn_goes_on_under_the_new_version_and_its_old_tokens_keep_theirs(rig: EngineRig) -> None:
    manifest = await fetched(rig, 1)
    request = rig.request("kept", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request, tokens=3)
    applied = await served(rig, manifest)
    rig.go_on()
    answer = await turn
    assert applied.live_requests == 1
    assert applied.exposed_s >= 0.0
    well_formed(answer, rig.long_tokens)
    assert answer.finish == "length"
    assert [span.version for span in answer.tokens.spans] == [0, 1]
    assert answer.tokens.spans[0].n_tokens >= 3
    assert answer.rebuilt_tokens >= request.context.n_tokens


async def a_kept_context_is_rebuilt_once_after_two_versions(rig: EngineRig) -> None:
    request = rig.request("between turns")
    first = await rig.engine.generate(request)
    await serve(rig, 1)
    await serve(rig, 2)
    context = request.context.extended(first.tokens)
    second = await rig.engine.generate(rig.request("between turns", turn=1, context=context))
    assert 0 < second.rebuilt_tokens <= context.n_tokens
    assert second.rebuilt_tokens + second.prefilled_tokens <= context.n_tokens


async def a_turn_that_an_apply_aborts_answers_with_its_old_tokens(rig: EngineRig) -> None:
    await fetched(rig, 1)
    request = rig.request("cut", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request)
    assert isinstance(await rig.engine.apply(1, kept="abort", pinned_deadline_s=0.0), Applied)
    answer = await turn
    well_formed(answer, rig.long_tokens)
    assert answer.finish == "aborted"
    assert [span.version for span in answer.tokens.spans] == [0]


async def a_pinned_turn_puts_an_apply_off_until_it_ends(rig: EngineRig) -> None:
    manifest = await fetched(rig, 1)
    request = rig.request("pinned", max_tokens=rig.long_tokens, purpose="eval", pin=0)
    [turn] = await under_way(rig, request)
    apply = asyncio.create_task(served(rig, manifest))
    await asyncio.sleep(rig.tick_s)
    rig.go_on()
    answer, applied = await asyncio.gather(turn, apply)
    assert answer.finish == "length"
    assert [(span.version, span.n_tokens) for span in answer.tokens.spans] == [(0, rig.long_tokens)]
    assert applied.live_requests == 0


async def a_pinned_turn_is_aborted_when_its_deadline_has_passed(rig: EngineRig) -> None:
    await fetched(rig, 1)
    pinned = rig.request("pinned", max_tokens=rig.long_tokens, purpose="eval", pin=0)
    other = rig.request("other", max_tokens=rig.long_tokens)
    turns = await under_way(rig, pinned, other)
    now = asyncio.get_running_loop().time()
    assert isinstance(await rig.engine.apply(1, kept="rebuild", pinned_deadline_s=now + rig.tick_s), Applied)
    rig.go_on()
    cut, kept = await asyncio.gather(*turns)
    assert cut.finish == "aborted"
    assert {span.version for span in cut.tokens.spans} == {0}
    assert kept.finish == "length"
    assert [span.version for span in kept.tokens.spans] == [0, 1]


async def a_turn_pinned_to_a_version_that_is_gone_is_refused(rig: EngineRig) -> None:
    await serve(rig, 1)
    answer = await rig.engine.generate(rig.request("late", purpose="eval", pin=0))
    assert answer.finish == "failed"
    assert answer.failure is not None
    assert (answer.failure.where, answer.failure.kind) == ("engine", "refused")
    assert answer.tokens.n_tokens == 0


async def a_turn_that_needs_a_newer_version_waits_for_it_and_blocks_nobody(rig: EngineRig) -> None:
    turn = asyncio.create_task(rig.engine.generate(rig.request("early", min_version=1)))
    other = await rig.engine.generate(rig.request("any"))
    assert [span.version for span in other.tokens.spans] == [0]
    assert not turn.done()
    await serve(rig, 1)
    answer = await turn
    assert answer.finish == "length"
    assert [span.version for span in answer.tokens.spans] == [1]


async def a_waiting_turn_can_be_aborted(rig: EngineRig) -> None:
    request = rig.request("early", min_version=9)
    turn = asyncio.create_task(rig.engine.generate(request))
    await rig.engine.generate(rig.request("any"))
    await rig.engine.abort([request.id])
    answer = await turn
    assert (answer.finish, answer.tokens.n_tokens) == ("aborted", 0)


async def the_book_equals_what_was_delivered_and_what_is_live_at_every_moment(rig: EngineRig) -> None:
    delivered = 0

    async def ask(request: TurnRequest) -> None:
        nonlocal delivered
        answer = await rig.engine.generate(request)
        delivered += answer.tokens.n_tokens

    def closes() -> bool:
        book = rig.engine.book()
        live = sum(request.n_tokens for request in book.live.values())
        assert sum(book.sampled.values()) == delivered + live
        return live > 0

    await fetched(rig, 1)
    rig.hold()
    requests = [rig.request(f"t{n}", max_tokens=rig.long_tokens - n) for n in range(40)]
    turns = [asyncio.create_task(ask(request)) for request in requests]
    await until(closes, tick_s=rig.tick_s, what="live tokens")
    rig.go_on()
    await rig.engine.abort([request.id for request in requests[::3]])
    apply = asyncio.create_task(rig.engine.apply(1, kept="rebuild", pinned_deadline_s=0.0))
    while not apply.done():
        closes()
        await asyncio.sleep(rig.tick_s / 4)
    await rig.engine.abort([request.id for request in requests[1::3]])
    await until(lambda: not closes() and all(turn.done() for turn in turns), tick_s=rig.tick_s, what="all answers")
    assert sum(rig.engine.book().sampled.values()) == delivered > 0
    assert not rig.engine.book().live


async def the_book_tells_purposes_apart(rig: EngineRig) -> None:
    await asyncio.gather(
        rig.engine.generate(rig.request("trained", max_tokens=5)),
        rig.engine.generate(rig.request("evaluated", max_tokens=7, purpose="eval", pin=0)),
    )
    sampled = rig.engine.book().sampled
    assert (sampled.get("train", 0), sampled.get("eval", 0)) == (5, 7)


async def an_engine_that_slept_loses_no_turn_and_no_token(rig: EngineRig) -> None:
    request = rig.request("going", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request, tokens=3)
    await rig.engine.sleep()
    rig.go_on()
    held = asyncio.create_task(rig.engine.generate(rig.request("held")))
    await serve(rig, 1)
    await rig.engine.sleep()
    await rig.engine.wake()
    answers = await asyncio.gather(turn, held)
    assert [answer.finish for answer in answers] == ["length", "length"]
    assert [answer.tokens.n_tokens for answer in answers] == [rig.long_tokens, 8]
    assert [span.version for span in answers[0].tokens.spans] == [0, 1]
    assert [span.version for span in answers[1].tokens.spans] == [1], "a sleeping engine sampled it"
    well_formed(answers[0], rig.long_tokens)
    assert sum(rig.engine.book().sampled.values()) == rig.long_tokens + 8


async def a_sleeping_engine_answers_aborts(rig: EngineRig) -> None:
    request = rig.request("going", max_tokens=rig.long_tokens)
    [turn] = await under_way(rig, request)
    await rig.engine.sleep()
    rig.go_on()
    await rig.engine.abort([request.id])
    answer = await turn
    assert answer.finish == "aborted"
    assert 0 < answer.tokens.n_tokens < rig.long_tokens
    await rig.engine.wake()
    assert (await rig.engine.generate(rig.request("after"))).finish == "length"


async def a_lost_engine_fails_what_it_has_and_what_comes(rig: EngineRig) -> None:
    requests = [rig.request(f"t{n}", max_tokens=rig.long_tokens) for n in range(40)]
    rig.hold()
    turns = [asyncio.create_task(rig.engine.generate(request)) for request in requests]
    await progress(rig, requests[0])
    await rig.lose()
    for answer in await asyncio.gather(*turns):
        assert answer.finish == "failed"
        assert answer.failure is not None
        assert answer.failure.where == "engine"
        assert answer.tokens.n_tokens == 0
    late = await rig.engine.generate(rig.request("late"))
    assert late.finish == "failed"
    await rig.engine.abort([requests[0].id])
    book = rig.engine.book()
    assert sum(book.sampled.values()) == sum(request.n_tokens for request in book.live.values()) > 0


async def a_lost_engine_answers_commands_with_failures(rig: EngineRig) -> None:
    manifest = await rig.publish(1)
    await rig.lose()
    assert isinstance(await rig.engine.prefetch(manifest), Failure)
    assert isinstance(await rig.engine.apply(1, kept="rebuild", pinned_deadline_s=0.0), Failure)


async def a_turn_that_nobody_waits_for_any_more_is_counted_as_a_duplicate(rig: EngineRig) -> None:
    request = rig.request("given up", max_tokens=8)
    turn = asyncio.create_task(rig.engine.generate(request))
    await asyncio.sleep(0)
    turn.cancel()
    await until(lambda: rig.engine.book().duplicates == 8, tick_s=rig.tick_s, what="the late answer")
    assert sum(rig.engine.book().sampled.values()) == 8


CONTRACTS = [
    contract
    for name, contract in inspect.getmembers(sys.modules[__name__], inspect.iscoroutinefunction)
    if contract.__module__ == __name__ and list(inspect.signature(contract).parameters) == ["rig"]
]
