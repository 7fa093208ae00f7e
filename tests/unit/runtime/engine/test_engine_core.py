"""The life of a request: reuse between turns, order, refusals, aborts, the book."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import (
    VOCAB,
    by_traj,
    config,
    engine,
    ids,
    logprobs,
    mismatch,
    one,
    random_ids,
    request,
    run,
    update,
    weights,
)

from rollart.core.errors import EngineError
from rollart.core.types import EngineBook, Sampling, Segment, Tokens, TurnRequest
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.payload import TokenPayload

ANY_TOKEN = tuple(range(8))
"""Stop ids that a random policy over 48 tokens meets soon."""


def sampled(book: EngineBook) -> int:
    return sum(book.sampled.values())


def live_tokens(book: EngineBook) -> int:
    return sum(live.n_tokens for live in book.live.values())


def test_a_turn_computes_only_what_the_turn_before_did_not() -> None:
    core, context = engine(), random_ids(30)
    cached = 0
    for turn in range(4):
        answer = one(core, request("t", context, turn=turn, max_tokens=5))
        assert answer.rebuilt_tokens == 0
        assert answer.prefilled_tokens == len(context) - cached
        cached = len(context) + answer.tokens.n_tokens - 1
        context = np.concatenate([context, ids(answer), random_ids(12, turn)]).astype(np.int32)


def test_a_context_in_pieces_is_the_same_context() -> None:
    context = random_ids(30)
    whole = request("t", context)
    pieces = tuple(
        Tokens(n_tokens=len(part), payload=TokenPayload(ids=part)) for part in np.split(context, [4, 11, 29])
    )
    cut = TurnRequest(
        id=whole.id, model="policy", purpose="train", domain="test", context=Segment(pieces=pieces), max_tokens=8,
        sampling=whole.sampling,
    )  # fmt: skip
    assert ids(one(engine(), cut)) == ids(one(engine(), whole))


def test_a_changed_history_is_reused_up_to_the_change_only() -> None:
    core, context = engine(), random_ids(40)
    one(core, request("t", context))
    changed = context.copy()
    changed[25] = (changed[25] + 1) % VOCAB
    answer = one(core, request("t", changed, turn=1))
    assert answer.prefilled_tokens == 15
    assert mismatch(changed, answer) < 1e-5


def test_another_attempt_shares_nothing() -> None:
    core, context = engine(), random_ids(20)
    first = request("t", context)
    one(core, first)
    again = TurnRequest(
        id=first.id._replace(attempt=1), model="policy", purpose="train", domain="test", context=first.context,
        max_tokens=8, sampling=first.sampling,
    )  # fmt: skip
    assert one(core, again).prefilled_tokens == 20


def test_the_same_context_again_is_cached_whole() -> None:
    core, context = engine(), random_ids(20)
    first = one(core, request("t", context))
    again = one(core, request("t", context, part=1))
    assert (again.prefilled_tokens, again.rebuilt_tokens, core.book().rebuilt_tokens) == (0, 0, 0)
    assert ids(again) == ids(first)


def test_two_requests_of_one_trajectory_at_once_do_not_disturb_each_other() -> None:
    core = engine()
    one(core, request("t", random_ids(20)))
    both = [request("t", random_ids(25), turn=1), request("t", random_ids(25, 1), turn=2)]
    core.submit(both)
    answers = run(core)
    for wanted, context in zip(both, (random_ids(25), random_ids(25, 1)), strict=True):
        assert mismatch(context, answers[wanted.id]) < 1e-5


def test_a_stop_token_ends_a_turn_and_is_part_of_it() -> None:
    core = engine()
    sampling = Sampling(seed=3, stop_ids=ANY_TOKEN)
    answer = one(core, request("t", random_ids(10), max_tokens=200, sampling=sampling))
    assert answer.finish == "stop"
    assert [token in ANY_TOKEN for token in ids(answer)] == [False] * (answer.tokens.n_tokens - 1) + [True]
    free = one(core, request("u", random_ids(10), max_tokens=6, sampling=Sampling(seed=3)))
    assert (free.finish, free.tokens.n_tokens) == ("length", 6)


def test_an_idle_engine_has_no_work_and_a_step_does_nothing() -> None:
    core = engine()
    assert (core.has_work, core.step(), core.live_count, core.waiting_count) == (False, [], 0, 0)
    core.abort([request("unknown", [1]).id])
    assert not core.has_work


def test_requests_are_admitted_by_priority_then_in_order() -> None:
    core = engine(max_live=1)
    names = {"a": 0, "b": 5, "c": 0, "d": 5}
    core.submit([request(name, [1, 2], max_tokens=2, priority=priority) for name, priority in names.items()])
    assert list(by_traj(core)) == ["b", "d", "a", "c"]


def test_at_most_max_live_requests_are_decoded_together() -> None:
    core = engine(max_live=3)
    core.submit([request(f"t{n}", [1, 2], max_tokens=4) for n in range(7)])
    core.step()
    assert (core.live_count, core.waiting_count) == (3, 4)


def test_an_abort_returns_the_tokens_so_far_by_the_next_step() -> None:
    core = engine()
    going, waiting, other = request("t", random_ids(20), max_tokens=50), request("w", [1]), request("o", [1, 2])
    core.submit([going, other])
    for _ in range(5):
        core.step()
    core.submit([waiting])
    core.abort([going.id, waiting.id])
    book = core.book()
    assert sampled(book) == live_tokens(book) == 10
    answers = dict(core.step())
    assert set(answers) == {going.id, waiting.id}
    assert [answers[r.id].finish for r in (going, waiting)] == ["aborted", "aborted"]
    assert answers[waiting.id].tokens.n_tokens == 0
    assert answers[going.id].tokens.n_tokens == 5
    assert mismatch(random_ids(20), answers[going.id]) < 1e-5
    resumed = one(core, request("t", [*random_ids(20), *ids(answers[going.id])], part=1, max_tokens=45))
    assert (resumed.prefilled_tokens, resumed.rebuilt_tokens) == (1, 0), "all but the last token is in the cache"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (request("t", []), "0 tokens of context"),
        (request("t", [1], max_tokens=0), "max_tokens=0"),
        (request("t", random_ids(300), max_tokens=21), "321 tokens, but a sequence may have 320"),
        (request("t", [1, VOCAB]), "vocabulary"),
        (request("t", [-1]), "vocabulary"),
        (request("t", [1], sampling=Sampling(temperature=float("nan"))), "temperature=nan"),
        (request("t", [1], sampling=Sampling(top_p=0.0)), "top_p=0.0"),
        (request("t", [1], sampling=Sampling(min_p=1.5)), "min_p=1.5"),
        (request("t", [1], sampling=Sampling(stop_ids=tuple(range(9)))), "at most 8 ids"),
        (request("t", [1], sampling=Sampling(stop_ids=(VOCAB,))), "stop_ids"),
        (request("t", [1], sampling=Sampling(temperature=1e-9)), "temperature=1e-09"),
        (request("t", [1], sampling=Sampling(top_k=-1)), "top_k=-1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_disturbs_nobody(wanted: TurnRequest, why: str) -> None:
    core = engine()
    good = request("good", random_ids(10))
    core.submit([good, wanted])
    answers = run(core)
    refused = answers[wanted.id]
    assert (refused.finish, refused.tokens.n_tokens) == ("failed", 0)
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.retryable) == ("refused", False)
    assert why in refused.failure.detail
    assert ids(answers[good.id]) == ids(one(engine(), good))


def test_a_request_longer_than_the_cache_is_refused_and_one_that_just_fits_is_served() -> None:
    core = engine(kv_tokens=100)
    core.submit([request("fits", random_ids(90), max_tokens=10), request("not", random_ids(90), max_tokens=11)])
    assert {traj: answer.finish for traj, answer in by_traj(core).items()} == {"fits": "length", "not": "failed"}


def test_a_request_is_submitted_once() -> None:
    core = engine()
    core.submit([request("t", [1])])
    with pytest.raises(EngineError, match="submitted twice"):
        core.submit([request("u", [1]), request("t", [1])])
    with pytest.raises(EngineError, match="submitted twice"):
        core.submit([request("u", [1]), request("u", [1])])
    assert core.waiting_count == 1


def test_nothing_is_sampled_under_a_version_that_is_too_old() -> None:
    core = engine(1)
    core.submit([request("new", [1, 2], min_version=2), request("any", [1, 2], min_version=1)])
    assert set(by_traj(core)) == {"any"}
    assert (core.has_work, core.waiting_count) == (False, 1)
    update(core, 3)
    answer = run(core)[request("new", []).id]
    assert [span.version for span in answer.tokens.spans] == [3]


def test_a_pinned_request_waits_for_its_version_and_is_refused_after_it() -> None:
    core = engine(1)
    later, now = request("later", [1, 2], pin=2), request("now", [1, 2], pin=1)
    core.submit([later, now])
    assert core.pinned_live()
    answers = run(core)
    assert list(answers) == [now.id]
    assert not core.pinned_live()
    update(core, 2)
    assert core.pinned_live()
    assert [span.version for span in run(core)[later.id].tokens.spans] == [2]
    refused = one(core, request("late", [1, 2], pin=1))
    assert refused.failure is not None
    assert (refused.finish, refused.failure.kind, refused.failure.retryable) == ("failed", "refused", True)
    core.submit([request("skipped", [1, 2], pin=3)])
    update(core, 4)
    assert run(core)[request("skipped", []).id].finish == "failed"


def test_the_book_counts_tokens_by_purpose_and_progress_by_request() -> None:
    core = engine()
    core.submit([request("t", [1, 2], max_tokens=3), request("e", [1, 2], max_tokens=9, purpose="eval")])
    core.submit([request("w", [1, 2], min_version=5)])
    assert sampled(core.book()) == 0
    for _ in range(4):
        core.step()
    book = core.book()
    assert book.sampled == {"train": 3, "eval": 4, "external": 0}
    assert {id_.traj: (live.n_tokens, live.oldest_version) for id_, live in book.live.items()} == {
        "e": (4, 1),
        "w": (0, None),
    }


def test_logits_that_are_not_finite_fail_their_requests_and_leave_no_trace() -> None:
    core, context = engine(1), random_ids(20)
    core.submit([request("t", context, max_tokens=20)])
    for _ in range(3):
        core.step()
    broken = weights(2) | {"model.norm.weight": torch.full((32,), float("nan"))}
    broken["model.layers.0.self_attn.v_proj.weight"] = broken["model.layers.0.self_attn.v_proj.weight"] * float("inf")
    core.stage(2, broken)
    core.apply(2)
    answer = run(core)[request("t", []).id]
    assert (answer.finish, answer.tokens.n_tokens) == ("failed", 3)
    assert answer.failure is not None
    assert "version 2 are not finite" in answer.failure.detail
    assert np.isfinite(logprobs(answer)).all()
    book = core.book()
    assert (sampled(book), book.live) == (3, {})
    update(core, 3)
    assert mismatch(context, one(core, request("t", context, turn=1))) < 1e-5


def test_what_is_not_finite_in_a_slot_never_meets_the_next_request_in_it() -> None:
    core, long = engine(1), random_ids(100)
    core.submit([request("a", long), request("b", long)])
    core.stage(2, weights(2) | {"model.layers.0.self_attn.v_proj.weight": torch.full((16, 32), float("inf"))})
    core.apply(2)
    assert {answer.finish for answer in run(core).values()} == {"failed"}
    update(core, 3)
    core.submit([request("a", long[:10], turn=1), request("b", long, turn=1)])
    answers = by_traj(core)
    assert {answer.finish for answer in answers.values()} == {"length"}
    assert mismatch(long[:10], answers["a"]) < 1e-5
    assert mismatch(long, answers["b"]) < 1e-5


def test_an_engine_without_weights_or_room_says_so() -> None:
    core = EngineCore(config(), max_live=1, kv_tokens=64, prefill_tokens=8)
    core.submit([request("t", [1])])
    with pytest.raises(EngineError, match="no weights are loaded"):
        core.step()
    with pytest.raises(EngineError, match="kv_tokens=0"):
        EngineCore(config(), max_live=1, kv_tokens=0, prefill_tokens=8)
