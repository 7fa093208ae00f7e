"""Tokens in, tokens out: ids that were sampled are kept, only new text is encoded."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import pytest

from rollart.config.schema import CharsTokenizer, FrozenLakeEnv, MaxDigitEnv
from rollart.core.errors import EnvError
from rollart.core.types import Observation, Segment, Span, Tokens
from rollart.runtime.envs.frozen_lake import FrozenLake
from rollart.runtime.envs.max_digit import MaxDigit
from rollart.runtime.envs.session import TextSession, TurnText, evidence_text
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.payload import TokenPayload, ids_of
from rollart.runtime.tokenizers import Chars, Ids

RIGHT, LEFT_NEWLINE = 97, 98


class Ambiguous(Chars):
    """Has two more ids: a second one for "R", and one token for "L" and the newline together. Notes what it encodes."""

    def __init__(self) -> None:
        super().__init__(CharsTokenizer())
        self.vocab_size += 2
        self._text_of = (*self._text_of, "R", "L\n")
        self.stop_ids += (LEFT_NEWLINE,)
        self.encoded: list[str] = []

    def encode(self, text: str) -> Ids:
        self.encoded.append(text)
        return super().encode(text)


class Scripted(TextTask):
    """Answers with what it was given."""

    def __init__(self, first: object, result: object) -> None:
        self.first = first
        self.result = result
        self.actions: list[str] = []

    def reset(self, seed: int) -> str:
        return self.first  # type: ignore[return-value]

    def step(self, action: str) -> StepResult:
        self.actions.append(action)
        return self.result  # type: ignore[return-value]


def ids(observation: Observation) -> Ids:
    payload = observation.tokens.payload
    assert isinstance(payload, TokenPayload)
    assert observation.tokens.n_tokens == len(payload.ids)
    assert not observation.tokens.sampled
    return payload.ids


def array(plain: Sequence[int]) -> Ids:
    return np.asarray(plain, np.int32)


def test_sampled_ids_are_kept_even_where_encoding_their_text_gives_others() -> None:
    tokenizer = Ambiguous()
    session = TextSession(FrozenLake(FrozenLakeEnv(kind="frozen_lake")), tokenizer)
    newline = tokenizer.turn_end_ids[0]
    segment = Segment(pieces=(session.reset(0, 0).tokens,))
    for action in ([RIGHT, newline], [RIGHT, newline], [LEFT_NEWLINE]):
        observation = session.step(array(action))
        assert not observation.bad_action or action == [LEFT_NEWLINE]
        sampled = Tokens(
            n_tokens=len(action),
            spans=(Span(version=0, n_tokens=len(action)),),
            payload=TokenPayload(ids=array(action)),
        )
        segment = segment.extended(sampled, observation.tokens)
    whole = ids_of(segment).tolist()
    assert whole[20:22] == [RIGHT, newline]
    assert whole[42:44] == [RIGHT, newline]
    assert whole[64] == LEFT_NEWLINE
    assert all(set(text) <= set("SPFHG?\n") for text in tokenizer.encoded), "the text of an action was encoded again"
    assert segment.n_tokens == len(whole) == segment.n_sampled + sum(map(len, tokenizer.encoded))


def test_the_stop_token_is_not_part_of_the_action() -> None:
    tokenizer = Chars(CharsTokenizer())
    env = Scripted("go ", StepResult("more "))
    session = TextSession(env, tokenizer)
    session.reset(0, 0)
    observation = session.step(tokenizer.encode("ab\n"))
    assert env.actions == ["ab"]
    assert tokenizer.decode(ids(observation)) == "more "


def test_a_turn_cut_before_its_stop_token_is_ended_by_tokens_that_are_not_sampled() -> None:
    tokenizer = Chars(CharsTokenizer())
    env = Scripted("go ", StepResult("more "))
    session = TextSession(env, tokenizer)
    session.reset(0, 0)
    assert tokenizer.decode(ids(session.step(tokenizer.encode("ab")))) == "\nmore "
    assert tokenizer.decode(ids(session.step(array([])))) == "\nmore "
    assert env.actions == ["ab", ""]


def test_the_last_observation_has_no_tokens_but_its_text_is_evidence() -> None:
    tokenizer = Chars(CharsTokenizer())
    session = TextSession(MaxDigit(MaxDigitEnv(kind="max_digit")), tokenizer)
    first = session.reset(371, 0)
    assert tokenizer.decode(ids(first)) == "max 3 7 1 = "
    assert (first.reward, first.terminated) == (None, False)
    last = session.step(tokenizer.encode("7\n"))
    assert last.tokens.n_tokens == len(ids(last)) == 0
    assert (last.reward, last.terminated, last.evidence) == (1.0, True, TurnText("7", "yes\n"))
    assert evidence_text([first.evidence, last.evidence]) == "max 3 7 1 = 7\nyes\n"


def test_what_goes_out_is_plain_whatever_the_environment_made_it_of() -> None:
    """An answer that cannot be pickled would take its whole batch, and its host, with it."""

    class Loud(str):
        __slots__ = ()

    result = StepResult(
        Loud("go "),
        reward=np.float32(0.5),  # type: ignore[arg-type]
        bad_action=np.True_,  # type: ignore[arg-type]
        metrics=MappingProxyType({Loud("score"): np.float32(2)}),  # type: ignore[dict-item]
    )
    session = TextSession(Scripted(Loud("go "), result), Chars(CharsTokenizer()))
    for observation in (session.reset(0, 0), session.step(array([1]))):
        copy = pickle.loads(pickle.dumps(observation))
        assert (copy.reward, copy.metrics, copy.evidence) == (
            observation.reward,
            observation.metrics,
            observation.evidence,
        )
    assert (observation.reward, observation.bad_action, observation.metrics) == (0.5, True, {"score": 2.0})


def test_what_begins_a_text_comes_first_and_once() -> None:
    tokenizer = Chars(CharsTokenizer())
    tokenizer.begin_ids = (0,)
    session = TextSession(Scripted("ab", StepResult("c")), tokenizer)
    assert ids(session.reset(0, 0)).tolist() == [0, *tokenizer.encode("ab")]
    assert ids(session.step(tokenizer.encode("x\n"))).tolist() == tokenizer.encode("c").tolist()


def test_twelve_turns_of_frozen_lake_fit_a_tiny_context() -> None:
    tokenizer = Chars(CharsTokenizer())
    session = TextSession(FrozenLake(FrozenLakeEnv(kind="frozen_lake")), tokenizer)
    total = len(ids(session.reset(0, 0)))
    assert total == 20
    for _ in range(11):
        total += 2 + len(ids(session.step(tokenizer.encode("U\n"))))
    assert total + 2 == 264


@pytest.mark.parametrize(
    ("first", "result", "message"),
    [
        (None, StepResult(""), "reset returned NoneType, not str"),
        ("", StepResult(""), "at least one token"),
        ("go", ("text", 1.0), "step returned tuple, not StepResult"),
        ("go", StepResult("", reward=float("nan")), "reward nan; a reward is finite"),
        ("go", StepResult("", metrics={"a": "b"}), "each must be a number"),  # type: ignore[dict-item]
        ("go", StepResult(None), "the text None, not a str"),  # type: ignore[arg-type]
        ("go", StepResult("é"), "not in tokenizer.alphabet"),
    ],
)
def test_a_broken_contract_is_named(first: object, result: object, message: str) -> None:
    session = TextSession(Scripted(first, result), Chars(CharsTokenizer()))

    def episode() -> None:
        session.reset(0, 0)
        session.step(array([1]))

    with pytest.raises(EnvError, match=message):
        episode()
