"""What a turn in vLLM comes to: its parts under several versions, its costs, and what is refused before it is sent."""

from __future__ import annotations

import numpy as np
import pytest

from rollart.core.types import RequestId, Sampling, Segment, Span, Tokens, TrajId, TurnRequest
from rollart.runtime.payload import TokenPayload
from rollart.runtime.vllm.rows import Computed, Row, refusal, refused_version, wants


def request(n: int = 40, *, tokens: int = 8, sampling: Sampling | None = None, pin: int | None = None) -> TurnRequest:
    ids = Tokens(n_tokens=n, payload=TokenPayload(ids=np.arange(n, dtype=np.int32)))
    return TurnRequest(
        id=RequestId(TrajId("t"), 0, 0, 0), model="policy", purpose="train", domain="d", context=Segment(pieces=(ids,)),
        max_tokens=tokens, sampling=sampling or Sampling(seed=3), pin=pin, min_version=1,
    )  # fmt: skip


def usage(prompt: int, cached: int, sampled: int) -> dict[str, object]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "prompt_tokens_details": details}


def test_a_part_goes_on_where_the_last_one_ended_and_draws_anew() -> None:
    row = Row.of(request(), Computed())
    first = row.sent()
    assert row.take(1, [5, 6, 7], [-1.0, -2.0, -3.0]) is None
    second = row.sent()
    assert second["token_ids"] == [*first["token_ids"], 5, 6, 7]
    assert second["sampling_params"]["max_tokens"] == 5
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]
    assert second["request_id"] != first["request_id"]


def test_spans_follow_the_versions_and_hold_no_empty_one() -> None:
    row = Row.of(request(), Computed())
    for version, ids in ((1, [5]), (1, [6]), (2, []), (3, [7])):
        assert row.take(version, ids, [-1.0] * len(ids)) is None
    answer = row.answer("length")
    assert answer.tokens.spans == (Span(version=1, n_tokens=2), Span(version=3, n_tokens=1))
    assert row.progress.oldest_version == 1


def test_a_log_probability_that_is_none_is_a_failure() -> None:
    row = Row.of(request(), Computed())
    for nothing in (-9999.0, float("nan")):
        why = row.take(1, [5], [nothing])
        assert why is not None
        assert "not finite" in why.detail
    assert not row.ids


def test_tokens_without_a_log_probability_each_are_told_as_such() -> None:
    row = Row.of(request(), Computed())
    why = row.take(1, [5, 6], [-1.0])
    assert why is not None
    assert "2 tokens with 1 log-probabilities" in why.detail
    assert not row.ids


def test_only_what_new_weights_threw_away_counts_as_rebuilt() -> None:
    computed = Computed()
    first = Row.of(request(40), computed)
    first.account(1, usage(40, 0, 8))
    assert (first.prefilled, first.rebuilt) == (40, 0)
    second = Row.of(request(52), computed)  # whole blocks are cached only, so some tokens are read again
    second.account(1, usage(52, 32, 8))
    assert (second.prefilled, second.rebuilt) == (20, 0)
    third = Row.of(request(64), computed)
    third.account(2, usage(64, 0, 8))
    assert (third.prefilled, third.rebuilt) == (64 - 59, 59)


def test_a_part_that_was_ended_before_its_first_token_costs_nothing() -> None:
    row = Row.of(request(), Computed())
    row.account(1, usage(40, 0, 0))
    assert (row.prefilled, row.rebuilt, row.computed.tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request(tokens=61), "101 tokens, but a sequence may have 100"),
        (request(0), "each must be 1 or more"),
        (request(tokens=0), "each must be 1 or more"),
        (request(60), "token ids from 0 to 59"),
        (request(sampling=Sampling(top_p=0.9)), "does not return the kept mass"),
        (request(sampling=Sampling(stop_ids=(50,))), "stop_ids"),
        (request(sampling=Sampling(temperature=0.005)), "vLLM would raise it to 0.01"),
    ],
)
def test_what_the_server_could_not_serve_or_would_die_of_is_refused(asked: TurnRequest, told: str) -> None:
    ids = np.arange(asked.context.n_tokens, dtype=np.int32)
    why = refusal(asked, ids, vocab=50, longest=100)
    assert why is not None
    assert told in why.detail
    assert not why.retryable


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_greedy_and_temperatures_that_the_server_takes_as_they_are_are_served(temperature: float) -> None:
    asked = request(sampling=Sampling(temperature=temperature))
    assert refusal(asked, np.arange(40, dtype=np.int32), vocab=50, longest=100) is None


def test_versions_that_a_request_may_be_sampled_under() -> None:
    assert not wants(request(), 0)
    assert wants(request(), 1)
    assert not wants(request(pin=3), 2)
    assert refused_version(request(pin=3), 3) is None
    assert refused_version(request(pin=3), 4) is not None
