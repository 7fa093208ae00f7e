"""New weights under live requests: no token is read from a cache of other weights, and every token keeps its version."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import engine, ids, logprobs, mismatch, one, payload, random_ids, request, run, update, weights

from rollart.core.errors import EngineError
from rollart.core.types import Span
from rollart.runtime.weights import fingerprint


def test_a_turn_that_lives_through_an_update_keeps_every_token_its_version() -> None:
    """Field case 16: at the engine."""
    core, context = engine(1), random_ids(20)
    wanted = request("t", context, max_tokens=12)
    core.submit([wanted])
    for _ in range(5):
        core.step()
    update(core, 2)
    assert core.book().live[wanted.id].oldest_version == 1
    answer = run(core)[wanted.id]
    assert answer.tokens.spans == (Span(version=1, n_tokens=5), Span(version=2, n_tokens=7))
    assert len(payload(answer).ids) == len(logprobs(answer)) == 12
    assert mismatch(context, answer) < 1e-5, "each token's log-probability is that of its own version"
    assert (answer.prefilled_tokens, answer.rebuilt_tokens) == (20, 20 + 4)


def test_the_answer_after_an_update_is_that_of_a_fresh_engine() -> None:
    """Field case 23: no prefix cache is kept across versions."""
    core, context = engine(1), random_ids(40)
    before = one(core, request("t", context))
    update(core, 2)
    after = one(core, request("t", context, part=1))
    fresh = one(engine(2), request("t", context, part=1))
    assert ids(after) == ids(fresh)
    assert np.array_equal(logprobs(after), logprobs(fresh))
    assert not np.allclose(logprobs(before), logprobs(fresh), atol=1e-3)
    assert (after.prefilled_tokens, after.rebuilt_tokens) == (0, 40)


def test_a_kept_cache_is_rebuilt_once_after_two_versions_and_only_when_it_is_used() -> None:
    core, context = engine(1), random_ids(30)
    first = one(core, request("t", context))
    one(core, request("unused", context))
    update(core, 2)
    update(core, 3)
    assert core.book().rebuilt_tokens == 0
    longer = [*context, *ids(first), *random_ids(10, 1)]
    second = one(core, request("t", longer, turn=1))
    known = 30 + first.tokens.n_tokens - 1
    assert second.rebuilt_tokens == core.book().rebuilt_tokens == known
    assert second.prefilled_tokens == len(longer) - known
    assert mismatch(longer, second) < 1e-5
    third = one(core, request("t", [*longer, *ids(second), 1, 2], turn=2))
    assert third.rebuilt_tokens == 0


def test_a_live_request_is_rebuilt_once_after_two_versions_between_two_steps() -> None:
    core, wanted = engine(1), request("t", random_ids(20), max_tokens=9)
    core.submit([wanted])
    for _ in range(4):
        core.step()
    update(core, 2)
    update(core, 3)
    answer = run(core)[wanted.id]
    assert answer.tokens.spans == (Span(version=1, n_tokens=4), Span(version=3, n_tokens=5))
    assert answer.rebuilt_tokens == 23


def test_an_update_in_the_middle_of_a_prompt_leaves_no_token_of_the_old_weights() -> None:
    core, context = engine(1, prefill_tokens=16), random_ids(60)
    wanted = request("t", context)
    core.submit([wanted])
    core.step()
    core.step()
    update(core, 2)
    answer = run(core)[wanted.id]
    assert answer.tokens.spans == (Span(version=2, n_tokens=8),)
    assert (answer.prefilled_tokens, answer.rebuilt_tokens) == (60, 32)
    assert mismatch(context, answer) < 1e-5


def test_kept_abort_answers_what_has_begun_and_leaves_what_has_not() -> None:
    core = engine(1, max_live=2)
    requests = [request(f"t{n}", random_ids(10, n), max_tokens=9) for n in range(3)]
    core.submit(requests)
    for _ in range(3):
        core.step()
    core.stage(2, weights(2))
    aborted = dict(core.apply(2, kept="abort"))
    assert set(aborted) == {requests[0].id, requests[1].id}
    for answer in aborted.values():
        assert (answer.finish, answer.tokens.spans) == ("aborted", (Span(version=1, n_tokens=3),))
    assert sum(core.book().sampled.values()) == 6
    assert [span.version for span in run(core)[requests[2].id].tokens.spans] == [2]


def test_pinned_requests_delay_an_apply_until_they_end_or_are_aborted() -> None:
    core = engine(1, max_live=2)
    pinned = [request(f"p{n}", [1, 2], max_tokens=9, purpose="eval", pin=1) for n in range(3)]
    free = request("free", [1, 2], max_tokens=20)
    core.submit([*pinned, free])
    core.step()
    core.stage(2, weights(2))
    with pytest.raises(EngineError, match="pinned to version 1"):
        core.apply(2)
    assert core.version == 1
    aborted = dict(core.abort_pinned())
    assert {id_: answer.tokens.n_tokens for id_, answer in aborted.items()} == {
        pinned[0].id: 1, pinned[1].id: 1, pinned[2].id: 0,
    }  # fmt: skip
    assert {answer.finish for answer in aborted.values()} == {"aborted"}
    assert core.apply(2) == []
    assert list(run(core)) == [free.id]


def test_the_fingerprint_follows_every_apply_and_not_what_is_staged() -> None:
    """Field case 24: three in a row."""
    core = engine(1)
    for version in (2, 3, 5):
        before = core.fingerprint()
        core.stage(version, weights(version))
        assert core.fingerprint() == before
        core.apply(version)
        assert core.fingerprint() == fingerprint(weights(version))
        assert core.version == version


def test_a_version_may_be_staged_in_parts_and_is_applied_whole_or_not_at_all() -> None:
    core, tensors = engine(1), weights(2)
    names = sorted(tensors)
    core.stage(2, {name: tensors[name] for name in names[:3]})
    with pytest.raises(EngineError, match=f"lacks {len(names) - 3} tensors"):
        core.apply(2)
    assert core.fingerprint() == fingerprint(weights(1))
    for name in names[3:]:
        core.stage(2, {name: tensors[name]})
    core.apply(2)
    assert core.fingerprint() == fingerprint(tensors)


def test_staged_tensors_are_copied() -> None:
    core = engine(1)
    tensors = {name: tensor.clone() for name, tensor in weights(2).items()}
    core.stage(2, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    core.apply(2)
    assert core.fingerprint() == fingerprint(weights(2))


def test_an_unfinished_version_never_mixes_with_the_next() -> None:
    core, tensors = engine(1), weights(2)
    core.stage(2, tensors)
    core.stage(3, {"model.norm.weight": weights(3)["model.norm.weight"]})
    with pytest.raises(EngineError, match="version 2 is not staged"):
        core.apply(2)
    with pytest.raises(EngineError, match="version 3 lacks"):
        core.apply(3)


def test_version_numbers_only_rise() -> None:
    core = engine(4)
    core.stage(4, weights(2))
    with pytest.raises(EngineError, match="version 4 cannot follow version 4"):
        core.apply(4)
    with pytest.raises(EngineError, match="is loaded already"):
        core.load(5, weights(2))
