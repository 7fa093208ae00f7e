"""What is encoded comes out as it went in, whatever it is; hot classes field by field."""

from __future__ import annotations

import math
import pickle
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rollart.core.types import (
    EngineBook,
    Failure,
    Generation,
    Live,
    Observation,
    RequestId,
    Sampling,
    Segment,
    Span,
    Tokens,
    TurnRequest,
)
from rollart.runtime.encoding import decoded, encoded
from rollart.runtime.engine.actor import EnginePoll, Forget, flat
from rollart.runtime.envs.host import Close, Done, Open, Reset, Score, Step
from rollart.runtime.envs.session import TurnText
from rollart.runtime.payload import TokenPayload, ids_of
from rollart.runtime.trainer.rows import LossRow, Row

INTS = st.integers(-(2**70), 2**70)
FLOATS = st.floats()
TEXT = st.text(max_size=9)
NAMES = st.dictionaries(TEXT, FLOATS, max_size=3)


def vectors(*dtypes: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(dtypes).flatmap(lambda dtype: arrays(dtype, st.integers(0, 5)))


def maybe(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | one


def of(cls: type, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a class with every field of its constructor drawn."""
    assert set(values) == {field.name for field in fields(cls) if field.init}
    return st.builds(cls, **values)


PAYLOADS = of(
    TokenPayload,
    ids=vectors("i4", "i4", "i8"),
    logprobs=maybe(vectors("f4", "f4", "f8")),
    log_kept_mass=maybe(vectors("f4", ">f4")),
)
SPANS = st.lists(of(Span, version=INTS, n_tokens=INTS), max_size=3).map(tuple)
TOKENS = of(Tokens, n_tokens=INTS, spans=SPANS, payload=maybe(PAYLOADS | TEXT))
SEGMENTS = of(
    Segment, pieces=st.lists(TOKENS, max_size=3).map(tuple), parent=maybe(INTS), shared_tokens=st.integers(0, 4)
)
FAILURES = of(Failure, where=st.sampled_from(["env", "engine"]), kind=TEXT, retryable=st.booleans(), detail=TEXT)
SAMPLINGS = of(
    Sampling, temperature=FLOATS, top_p=FLOATS, top_k=INTS, min_p=FLOATS, stop_ids=st.lists(INTS).map(tuple), seed=INTS
)
IDS = st.builds(RequestId, TEXT, INTS, INTS, INTS)
REQUESTS = of(
    TurnRequest, id=IDS, model=TEXT, purpose=TEXT, domain=TEXT, context=SEGMENTS, max_tokens=INTS, sampling=SAMPLINGS,
    min_version=INTS, pin=maybe(INTS), priority=INTS, draft_depth=INTS, deadline_s=FLOATS,
)  # fmt: skip
GENERATIONS = of(
    Generation, tokens=TOKENS, finish=TEXT, prefilled_tokens=INTS, rebuilt_tokens=INTS, failure=maybe(FAILURES)
)
LIVE = st.dictionaries(IDS, of(Live, n_tokens=INTS, oldest_version=maybe(INTS)), max_size=3)
COUNTS = st.dictionaries(TEXT, INTS, max_size=2)
BOOKS = of(EngineBook, sampled=COUNTS, live=LIVE, rebuilt_tokens=INTS, duplicates=INTS)
ANSWERS = st.lists(st.tuples(IDS, GENERATIONS), max_size=3)
POLLS = st.builds(EnginePoll.of, ANSWERS, BOOKS, st.lists(FLOATS).map(tuple))
OBSERVATIONS = of(
    Observation, tokens=TOKENS, new_segment=maybe(SEGMENTS), terminated=st.booleans(), truncated=st.booleans(),
    reward=maybe(FLOATS), bad_action=st.booleans(), evidence=maybe(st.builds(TurnText, TEXT, TEXT)), metrics=NAMES,
)  # fmt: skip
DONES = of(Done, session=TEXT, seq=INTS, result=maybe(OBSERVATIONS | FLOATS | FAILURES), seconds=FLOATS)
ASKED = {"session": TEXT, "seq": INTS, "budget_s": FLOATS}
CALLS = (
    of(Open, **ASKED, task=TEXT)
    | of(Reset, **ASKED, seed=INTS, chance_seed=INTS)
    | of(Step, **ASKED, ids=vectors("i4"))
    | of(Close, **ASKED)
    | of(Score, **ASKED, task=TEXT, text=TEXT, metrics=NAMES)
)
ROWS = of(
    Row, ids=vectors("i8"), positions=vectors("i8"), targets=vectors("i8"), behaviour=vectors("f4"),
    log_kept=maybe(vectors("f4")),
)  # fmt: skip
LOSS_ROWS = of(
    LossRow, key=st.tuples(TEXT, INTS), row=ROWS, advantage=FLOATS, token_weight=FLOATS, share=FLOATS,
    fresh=maybe(vectors("?")),
)  # fmt: skip
FORGETS = st.builds(Forget, TEXT, INTS)
HOT = st.one_of(REQUESTS, IDS, FORGETS, GENERATIONS, BOOKS, POLLS, CALLS, DONES, LOSS_ROWS)


def same(one: Any, other: Any) -> bool:
    """Equal in class and every value, NaN to NaN, an array in all that it is."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Mapping):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other)))


@settings(max_examples=60, deadline=None)
@given(st.lists(HOT, min_size=1, max_size=2))
def test_hot_classes_come_out_as_they_went_in(batch: list[Any]) -> None:
    assert same(decoded(encoded(batch)), batch)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_a_flat_request_is_the_request_with_its_context_in_one_piece(request: TurnRequest) -> None:
    (found,) = decoded(encoded([flat(request)]))
    ids = ids_of(request.context)
    context = Segment(pieces=(Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids)),))
    assert context.n_tokens == found.context.n_tokens
    assert same(found, _replaced(request, context))
    assert same(decoded(encoded(found)), found)


def _replaced(request: TurnRequest, context: Segment) -> TurnRequest:
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    return TurnRequest(**(values | {"context": context}))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", ">i4", "c8", "U3", "M8[s]"]).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    ),
    st.booleans(),
    st.integers(1, 2),
)
def test_any_array_travels_and_stays_what_it_is(array: np.ndarray[Any, Any], writeable: bool, stride: int) -> None:
    array.flags.writeable = writeable
    array = array[::stride] if array.ndim else array
    found = decoded(encoded(array))
    assert same(found, array)
    assert found.flags.writeable or not array.flags.writeable


# --- classes that this package does not know --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plain:
    a: int
    b: Any = None


@dataclass(frozen=True, slots=True)
class More(Plain):
    c: str = "c"


@dataclass(frozen=True, slots=True)
class Renamed(Plain):
    """Says itself how it travels."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Renamed, (self.a + 1, self.b)


@dataclass(frozen=True, slots=True)
class Checked:
    """What its constructor checks was checked."""

    a: int
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append(self.a)


@dataclass(frozen=True)
class Loose:
    a: int


class Bare(Plain):
    """No dataclass of its own, with a place for anything."""


@dataclass(slots=True)
class Changing:
    a: int


@dataclass(frozen=True, slots=True)
class Unlucky:
    """Fields called what a function that makes objects may call its own names."""

    value: int
    new: int
    cls: int
    open_class: int
    name: int
    made: int
    build: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Weak:
    n: int


class Abstract(metaclass=ABCMeta):
    __slots__ = ()

    @abstractmethod
    def told(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Concrete(Abstract):
    n: int

    def told(self) -> int:
        return self.n


class Longer(NamedTuple):
    a: int
    b: str = "b"


class Special(Longer):
    pass


class Array(np.ndarray[Any, Any]):
    pass


@dataclass(frozen=True, slots=True)
class MoreTokens(Tokens):
    more: int = 0


CASES: list[Any] = [
    Plain(1, b=[Plain(2)]), More(1, b=2, c="d"), Checked(3), Loose(1), Changing(1), Longer(1), Special(1, "x"),
    MoreTokens(n_tokens=2, payload=TokenPayload(ids=np.arange(2, dtype=np.int32)), more=7),
    np.arange(3).view(Array), np.float32(2.5), {1, 2}, frozenset("a"), range(3), 1 + 2j, Plain, Longer, print, ...,
    Unlucky(1, 2, 3, 4, 5, 6, 7), Weak(1), Concrete(1), np.arange(40_000),
    np.dtype("i4"), b"x", bytearray(b"y"), slice(1, 2), np.zeros(2, "i4,f4"), np.array([Plain(1), None], object),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_any_object_travels_as_with_pickle(case: Any) -> None:
    found, wanted = decoded(encoded(case)), pickle.loads(pickle.dumps(case, protocol=5))
    assert type(found) is type(wanted) is type(case)
    assert np.array_equal(found, wanted) if isinstance(case, np.ndarray) else same(found, wanted)


def test_an_object_of_the_class_of_its_own_ways_goes_by_them() -> None:
    assert decoded(encoded([Renamed(1), Renamed(1)])) == [Renamed(2), Renamed(2)]


def test_a_subclass_keeps_what_its_own_class_keeps() -> None:
    bare = Bare(1, 2)
    assert same(decoded(encoded(bare)).b, 2)
    assert type(decoded(encoded(bare))) is Bare


def test_what_is_decoded_is_as_frozen_as_it_was_and_was_not_checked_again() -> None:
    found = decoded(encoded([Checked(3), More(1)]))
    for one in found:
        with pytest.raises(FrozenInstanceError):
            one.a = 4
    assert found[0].made == [3]
    assert hash(found[1]) == hash(More(1))


def test_one_object_stays_one_also_inside_itself() -> None:
    shared, knot = Plain(1), Plain(2, b=[])
    knot.b.append(knot)
    one, other = decoded(encoded([shared, shared]))
    assert one is other
    found = decoded(encoded(knot))
    assert found.b[0] is found


def test_what_cannot_travel_is_refused_with_the_words_of_pickle() -> None:
    @dataclass(frozen=True, slots=True)
    class Local:
        a: int

    for odd in (Local(1), lambda: None, (one for one in "a")):
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)) as theirs:
            pickle.dumps(odd, protocol=5)
        with pytest.raises(theirs.type) as ours:
            encoded([odd])
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(pickle.UnpicklingError):
        decoded(b"\x80\x05no pickle")
