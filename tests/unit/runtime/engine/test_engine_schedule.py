"""Random schedules of turns, aborts, updates and evictions: the books agree and every log-probability is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from engine_cases import engine, ids, mismatch, random_ids, request, update, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollart.core.types import Generation, Purpose, RequestId, Sampling, TrajId
from rollart.runtime.engine.core import EngineCore

PURPOSES: tuple[Purpose, ...] = ("train", "eval", "external")
LAST_VERSION = 6
"""Weights are made once per version and kept: schedules share them."""


@dataclass(slots=True)
class Client:
    """What a caller knows: contexts of requests, and its own count of delivered tokens."""

    core: EngineCore
    contexts: dict[RequestId, NDArray[np.int32]] = field(default_factory=dict)
    histories: dict[str, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    purposes: dict[RequestId, Purpose] = field(default_factory=dict)
    delivered: Counter[Purpose] = field(default_factory=Counter)
    answered: list[tuple[RequestId, Generation]] = field(default_factory=list)

    def submit(self, traj: str, new_tokens: int, max_tokens: int, seed: int) -> None:
        turn, history = self.histories.get(traj, (0, np.empty(0, np.int32)))
        context = np.concatenate([history, random_ids(new_tokens, seed)]).astype(np.int32)
        purpose = PURPOSES[seed % 3]
        wanted = request(
            traj, context, turn=turn, max_tokens=max_tokens, purpose=purpose, priority=seed % 2,
            sampling=Sampling(seed=seed, top_k=3 * (seed % 5 == 0), stop_ids=(1, 2) if seed % 4 == 0 else ()),
            pin=self.core.version if purpose == "eval" and seed % 6 == 1 else None,
            min_version=self.core.version + (seed % 7 == 0),
        )  # fmt: skip
        self.histories[traj] = (turn + 1, history)
        self.contexts[wanted.id], self.purposes[wanted.id] = context, purpose
        self.core.submit([wanted])

    def take(self, answers: list[tuple[RequestId, Generation]]) -> None:
        for id_, answer in answers:
            assert id_ not in [earlier for earlier, _ in self.answered]
            self.answered.append((id_, answer))
            self.delivered[self.purposes[id_]] += answer.tokens.n_tokens
            history = np.concatenate([self.contexts[id_], ids(answer)]).astype(np.int32)
            self.histories[id_.traj] = (self.histories[id_.traj][0], history if len(history) < 200 else history[:40])

    def check_books(self) -> None:
        book = self.core.book()
        live: Counter[Purpose] = Counter()
        for id_, progress in book.live.items():
            live[self.purposes[id_]] += progress.n_tokens
            assert (progress.oldest_version is None) == (progress.n_tokens == 0)
        for purpose in PURPOSES:
            assert book.sampled[purpose] == self.delivered[purpose] + live[purpose]
        assert set(book.live) | {id_ for id_, _ in self.answered} == set(self.contexts)
        assert self.core.live_count + self.core.waiting_count == len(book.live)


def check_answer(context: NDArray[np.int32], answer: Generation) -> None:
    versions = [span.version for span in answer.tokens.spans]
    assert versions == sorted(set(versions))
    assert sum(span.n_tokens for span in answer.tokens.spans) == answer.tokens.n_tokens
    assert 0 <= answer.prefilled_tokens <= len(context)
    assert answer.rebuilt_tokens >= 0
    if answer.tokens.n_tokens:
        assert mismatch(context, answer) < 2e-5


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 7), st.integers(1, 40), st.integers(1, 25)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 7), st.just(0), st.just(0)),
        st.tuples(st.just("apply"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 7), st.just(0), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=25)
@given(schedule=actions, kv_tokens=st.sampled_from([256, 512, 2048]), prefill_tokens=st.sampled_from([8, 33, 256]))
def test_books_agree_and_tokens_are_right_whatever_happens(
    schedule: list[tuple[str, int, int, int]], kv_tokens: int, prefill_tokens: int
) -> None:
    client = Client(engine(1, kv_tokens=kv_tokens, prefill_tokens=prefill_tokens, max_live=5))
    core = client.core
    for seed, (action, a, b, c) in enumerate(schedule):
        busy = {id_.traj: id_ for id_ in core.book().live}
        traj = f"t{a}"
        if action == "submit" and traj not in busy:
            client.submit(traj, b, c, seed)
        elif action == "step":
            for _ in range(a):
                client.take(core.step())
                client.check_books()
        elif action == "abort" and traj in busy:
            core.abort([busy[TrajId(traj)]])
        elif action == "apply" and core.version < LAST_VERSION:
            client.take(core.abort_pinned())
            core.stage(core.version + 1, weights(core.version + 1))
            client.take(core.apply(core.version + 1, kept="abort" if a else "rebuild"))
        elif action == "forget":
            core.forget(TrajId(traj), 0)
        client.check_books()
    while core.has_work:
        client.take(core.step())
        client.check_books()
    client.take(core.abort_pinned())
    update(core, LAST_VERSION + 1)
    while core.has_work:
        client.take(core.step())
    assert core.book().live == {}
    assert core.book().rebuilt_tokens == sum(answer.rebuilt_tokens for _, answer in client.answered)
    for id_, answer in client.answered:
        check_answer(client.contexts[id_], answer)
